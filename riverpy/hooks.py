"""Hooks: what is called at fixed points in the life of a job and of a client.

A hook is any object with one or more of the methods below, each an `async def` but for
`metric_emit`; `…Func` makes one of a function. `Config(hooks=…)` registers hooks for all jobs,
`hooks: ClassVar[…]` of an args class for its kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from riverpy.insert_opts import JobInsertParams
    from riverpy.job import Job
    from riverpy.periodic import PeriodicJobsStart


class JobGetAvailableCount(msgspec.Struct, frozen=True, kw_only=True):
    """River's metric `job_get_available_count`: how many jobs a claim brought."""

    queue: str
    count: int


class JobGetAvailableDuration(msgspec.Struct, frozen=True, kw_only=True):
    """River's metric `job_get_available_duration`: how long a claim took, the way to the server
    and back included."""

    queue: str
    duration: timedelta


Metric: TypeAlias = JobGetAvailableCount | JobGetAvailableDuration


@runtime_checkable
class HookInsertBegin(Protocol):
    """Called for each job just before it is sent to the database, inside of all middleware."""

    def insert_begin(self, params: JobInsertParams, /) -> Awaitable[None]:
        """May change what is inserted; raising refuses the whole batch."""
        ...


@runtime_checkable
class HookWorkBegin(Protocol):
    """Called when an attempt begins, inside of all middleware, before the args are decoded."""

    def work_begin(self, job: Job[Any], /) -> Awaitable[None]:
        """May set `job.encoded_args`; raising fails the attempt, and nothing else of it is run."""
        ...


@runtime_checkable
class HookWorkEnd(Protocol):
    """Called when the code of a job has ended, inside of all middleware."""

    def work_end(self, job: Job[Any], error: BaseException | None, /) -> Awaitable[bool | None]:
        """Told how it ended, as `__exit__` is: returning True swallows the error, so that the job
        completes; raising replaces it; anything else leaves it.

        Args:
            job: its args are decoded, unless that is what failed.
            error: what the job, or the hook before, raised: also JobSnooze, JobCancel, TimeoutError
                at its timeout, and CancelledError at a cancel or stop, which stands whatever is
                made of it. None: it returned.
        """
        ...


@runtime_checkable
class HookPeriodicJobsStart(Protocol):
    """Called each time this client begins to lead, before the first periodic job is inserted."""

    def periodic_jobs_start(self, start: PeriodicJobsStart, /) -> Awaitable[None]:
        """May add and remove periodic jobs. All such hooks together have 30 s. Raising keeps the
        maintenance from starting; it is tried again."""
        ...


@runtime_checkable
class HookMetricEmit(Protocol):
    """Given what riverpy measures."""

    def metric_emit(self, metric: Metric, /) -> None:
        """Called after each claim, between two claims of its queue: it must not block. An error of
        its own is logged."""
        ...


Hook: TypeAlias = (
    HookInsertBegin | HookWorkBegin | HookWorkEnd | HookPeriodicJobsStart | HookMetricEmit
)


class HookInsertBeginFunc:
    """An `async def` as a HookInsertBegin."""

    def __init__(self, function: Callable[[JobInsertParams], Awaitable[None]]) -> None:
        self.insert_begin = function


class HookWorkBeginFunc:
    """An `async def` as a HookWorkBegin."""

    def __init__(self, function: Callable[[Job[Any]], Awaitable[None]]) -> None:
        self.work_begin = function


class HookWorkEndFunc:
    """An `async def` as a HookWorkEnd."""

    def __init__(
        self, function: Callable[[Job[Any], BaseException | None], Awaitable[bool | None]]
    ) -> None:
        self.work_end = function


class HookPeriodicJobsStartFunc:
    """An `async def` as a HookPeriodicJobsStart."""

    def __init__(self, function: Callable[[PeriodicJobsStart], Awaitable[None]]) -> None:
        self.periodic_jobs_start = function


class HookMetricEmitFunc:
    """A plain function as a HookMetricEmit."""

    def __init__(self, function: Callable[[Metric], None]) -> None:
        self.metric_emit = function
