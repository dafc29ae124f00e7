"""Periodic jobs: jobs that the leader inserts on a schedule.

Register the same periodic jobs in every client that takes part in leader election, because any of
them may become the leader.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal, TypeAlias, cast, get_type_hints

import msgspec

from riverpy._lifecycle import convert_base_exceptions
from riverpy._names import validate_kind, validate_literal_value
from riverpy.errors import ConfigError, UnknownJobKindError
from riverpy.insert_opts import InsertOpts
from riverpy.job import JobArgs, RawArgs
from riverpy.schedules import NeverSchedule, PeriodicSchedule, find_next_due_time, format_schedule

MissedPolicy: TypeAlias = Literal["skip", "one", "all"]
RunOnStart: TypeAlias = Literal["never", "first_registration", "each_term"]
ConstructorResult: TypeAlias = JobArgs | RawArgs | tuple[JobArgs | RawArgs, InsertOpts]
"""The job that a constructor returns for one run: its args, or a pair of its args and options."""
_ASYNC_OR_GENERATOR_CHECKS = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


class PeriodicJob:
    """A schedule and the job that the leader inserts each time the schedule is due."""

    def __init__(
        self,
        schedule: PeriodicSchedule,
        constructor: Callable[[], ConstructorResult | None] | JobArgs | RawArgs,
        *,
        id: str | None = None,  # noqa: A002 (River's name)
        run_on_start: RunOnStart | bool = "never",
        missed: MissedPolicy = "one",
    ) -> None:
        """Create a periodic job. `Client(periodic_jobs=…)` or `PeriodicJobs.add` registers it.

        Args:
            schedule: `every(…)`, `cron(…)`, `never()`, or your own object with a method `next`.
            constructor: the args of every job; or a plain function without arguments that riverpy
                calls for each run. It returns args, a pair of args and InsertOpts, or None to
                insert no job this time.
            id: identifies the periodic job in the database: 2 to 127 letters, digits and
                `-[]<>/.·:+_`. The state stored under this id is kept when the leader changes.
                Default: the kind or the function's name, and eight hexadecimal digits that depend
                on the schedule. So set an id if the schedule may change later.
            run_on_start: when to insert an additional job. "each_term" (or True): each time that a
                client becomes leader. "first_registration": when the id is new to the database.
                Default "never" (or False).
            missed: what to insert for runs that were due while there was no leader. "one" (the
                default): one job for all of them. "skip": no job for runs that are more than 30
                seconds late. "all": a job for each run, but only for the newest 1,000.

        Raises:
            ConfigError: a value is not allowed, or the schedule has no time in the future.
        """
        if not callable(getattr(schedule, "next", None)):
            raise ConfigError(
                "schedule must be every(timedelta(…)), cron('…') or an object with a method `next`"
                f", got {type(schedule).__name__}"
            )
        if isinstance(run_on_start, bool):
            run_on_start = "each_term" if run_on_start else "never"
        validate_literal_value("run_on_start", run_on_start, RunOnStart)
        validate_literal_value("missed", missed, MissedPolicy)
        self.schedule = schedule
        text = format_schedule(schedule).replace("\0", "")
        self.schedule_text = text.encode(errors="replace").decode()
        """The schedule as text, for example `every 1h`. It contains no characters that PostgreSQL
        cannot store."""
        self.run_on_start: RunOnStart = run_on_start
        self.missed: MissedPolicy = missed
        if not callable(constructor) and not hasattr(constructor, "kind"):
            raise ConfigError(
                "constructor must be job args, or a function that returns them, got "
                f"{type(constructor).__name__}"
            )
        self._constructor = constructor
        self.id = id if id is not None else _make_default_id(constructor, self.schedule_text)
        validate_kind(self.id, subject="the id of a periodic job")
        if callable(constructor):
            _check_constructor(self.id, constructor)
        is_never = isinstance(schedule, NeverSchedule)
        if not is_never and find_next_due_time(schedule, datetime.now(UTC)) is None:
            raise ConfigError(f"the schedule of periodic job {self.id!r} has no time in the future")

    @property
    def kind(self) -> str | None:
        """The kind of the jobs. It is the kind of the args, or of the class in the constructor's
        return annotation. None: the annotation does not name one args class."""
        source: object = self._constructor
        if callable(self._constructor):
            try:
                source = get_type_hints(self._constructor).get("return")
            except (NameError, TypeError, AttributeError):
                return None
        kind = getattr(source, "kind", None)
        return kind if isinstance(kind, str) else None

    def construct(self) -> tuple[JobArgs | RawArgs, InsertOpts] | None:
        """Return the args and options of the job of one run; None: no job is inserted this time.

        Raises:
            ConfigError: the constructor returned an awaitable, or a tuple other than a pair of args
                and InsertOpts.
            Exception: the error that the constructor raised.
        """
        constructor = self._constructor
        with convert_base_exceptions(f"the constructor of periodic job {self.id!r}"):
            run = constructor() if callable(constructor) else constructor
        if run is None:
            return None
        if isinstance(run, Awaitable):
            close = getattr(cast("object", run), "close", None)
            if close is not None:
                close()
            raise ConfigError(_make_constructor_error_text(self.id))
        if not isinstance(run, tuple):
            return run, InsertOpts()
        parts = cast("tuple[object, ...]", run)
        if len(parts) != 2 or not isinstance(parts[1], InsertOpts):
            types = ", ".join(type(part).__name__ for part in parts)
            raise ConfigError(
                f"the constructor of periodic job {self.id!r} must return args, a pair of args and "
                f"InsertOpts, or None; got a tuple of ({types})"
            )
        return run

    def __repr__(self) -> str:
        return f"PeriodicJob({self.id!r}, {self.schedule_text!r})"


def _check_constructor(job_id: str, constructor: Callable[..., object]) -> None:
    """Raise ConfigError if the constructor would fail at each run: it is async or a generator, or
    requires arguments."""
    codes = (constructor, type(constructor).__call__)
    if any(test(code) for test in _ASYNC_OR_GENERATOR_CHECKS for code in codes):
        raise ConfigError(_make_constructor_error_text(job_id))
    try:
        signature = inspect.signature(constructor)
    except (TypeError, ValueError):  # the constructor has no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"the constructor of periodic job {job_id!r} is called without arguments: {error}"
        ) from None


def _make_constructor_error_text(job_id: str) -> str:
    return (
        f"the constructor of periodic job {job_id!r} must be a plain function that returns the "
        "args, neither an `async def` nor a generator"
    )


def _make_default_id(constructor: object, schedule_text: str) -> str:
    name = getattr(constructor, "kind", None) or getattr(constructor, "__qualname__", None)
    if not isinstance(name, str) or "<lambda>" in name:
        raise ConfigError("the constructor of this periodic job has no name: set id=")
    digits = hashlib.sha256(f"{name}\0{schedule_text}".encode()).hexdigest()[:8]
    return f"{name}:{digits}"


class PeriodicJobs:
    """The periodic jobs of a client. The methods add and remove periodic jobs, also while the
    client runs. Call the methods in the client's event loop."""

    def __init__(
        self,
        jobs: Iterable[PeriodicJob] = (),
        get_known_kinds: Callable[[], Container[str] | None] = lambda: None,
    ) -> None:
        """Register `jobs`. Their kinds are not checked yet, because workers may be registered until
        the client runs: `check_kinds` checks the kinds later.

        `get_known_kinds` returns the kinds that the client may insert; None: all kinds.
        """
        self._jobs: dict[str, PeriodicJob] = {}
        self._get_known_kinds: Callable[[], Container[str] | None] = lambda: None
        self.wake: Callable[[], None] = lambda: None
        """A callback that is called after periodic jobs were added. The service that inserts
        periodic jobs sets it."""
        self.add_many(jobs)
        self._get_known_kinds = get_known_kinds

    def add(self, job: PeriodicJob) -> str:
        """Register a periodic job. Returns its id.

        Raises:
            ConfigError: another periodic job has this id.
            UnknownJobKindError: the client may not insert jobs of this kind, because it has no
                worker for the kind. This is checked only if the args, or the return annotation of
                the constructor, name the kind.
        """
        (job_id,) = self.add_many([job])
        return job_id

    def add_many(self, jobs: Iterable[PeriodicJob]) -> list[str]:
        """Register several periodic jobs. After an error none of them is registered. Returns their
        ids.

        Raises:
            ConfigError: two periodic jobs have the same id.
            UnknownJobKindError: as `add`.
        """
        if not isinstance(jobs, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "periodic_jobs must be a list, as in periodic_jobs=[PeriodicJob(…)], got "
                f"{type(jobs).__name__}"
            )
        added: dict[str, PeriodicJob] = {}
        for job in jobs:
            if not isinstance(job, PeriodicJob):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"each periodic job must be a PeriodicJob, got {type(job).__name__}"
                )
            if job.id in self._jobs or job.id in added:
                raise ConfigError(
                    f"two periodic jobs have the id {job.id!r}: set another id= for one of them"
                )
            self._check_kind(job)
            added[job.id] = job
        self._jobs.update(added)
        if added:
            self.wake()
        return list(added)

    def check_kinds(self) -> None:
        """Raise UnknownJobKindError if the client may not insert the kind of one of its periodic
        jobs."""
        for job in self:
            self._check_kind(job)

    def _check_kind(self, job: PeriodicJob) -> None:
        known_kinds, kind = self._get_known_kinds(), job.kind
        if known_kinds is not None and kind is not None and kind not in known_kinds:
            raise UnknownJobKindError(kind)

    def get(self, job_id: str) -> PeriodicJob | None:
        """Return the periodic job with this id, or None."""
        return self._jobs.get(job_id)

    def remove(self, job_id: str) -> bool:
        """Remove a periodic job. Returns whether there was a periodic job with this id.

        The database keeps the state of the periodic job for 30 days. If the periodic job is added
        again within these 30 days with the same schedule, it continues with the stored next time.
        """
        return self._jobs.pop(job_id, None) is not None

    def remove_many(self, job_ids: Iterable[str]) -> list[str]:
        """Remove several periodic jobs, as `remove` does. Unknown ids are ignored. Returns the ids
        of the removed periodic jobs.

        Raises:
            ConfigError: `job_ids` is a string instead of a list.
        """
        if isinstance(job_ids, str):
            raise ConfigError(f"remove_many takes a list of ids, got {job_ids!r}: use remove")
        return [job_id for job_id in dict.fromkeys(job_ids) if self.remove(job_id)]

    def clear(self) -> None:
        """Remove all periodic jobs."""
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[PeriodicJob]:
        return iter(list(self._jobs.values()))

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs


class PeriodicJobState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a periodic job in the database."""

    id: str
    schedule: str
    """The text of the schedule, such as `every 1h`."""
    next_run_at: datetime | None
    """The next time at which the periodic job is due; None: never."""
    last_run_at: datetime | None
    """The due time of the last inserted job; None: no job was inserted."""
    paused_at: datetime | None
    """The time at which the periodic job was paused; None: it is not paused."""
    run_requested_at: datetime | None
    """The time at which an additional run was requested, by `periodic_run` or `run_on_start`. It is
    set until the leader has inserted the job of this run. Until then, further calls of
    `periodic_run` do not change this time. None: no additional run is requested."""


class PeriodicJobsStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the hook `periodic_jobs_start`."""

    jobs: PeriodicJobs
    """The client's periodic jobs. The hook may add and remove periodic jobs. The client keeps these
    changes when it is no longer the leader."""
    states: Mapping[str, PeriodicJobState]
    """The stored states of all periodic jobs of the client's leader domain, by id. Some of these
    periodic jobs may not be registered in this client."""
