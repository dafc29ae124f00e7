"""PeriodicEnqueuer: inserts what is due by the schedules of this client's periodic jobs.

The server's clock says what is due, and the row of a periodic job which slot is next. That is moved
on in the transaction that inserts the slot's job, if it is where it was seen: no slot is inserted
twice, and none is lost. What fails keeps its slot, and is tried again on its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from riverpy._clock import Backoff
from riverpy._lifecycle import awaiting_only_exceptions
from riverpy._log_events import (
    MISSED_PERIODIC_SLOTS_DROPPED,
    PERIODIC_JOB_INSERT_FAILED,
    PERIODIC_JOB_INSERTED_AGAIN,
    PERIODIC_JOB_REGISTRATION_FAILED,
    PERIODIC_JOBS_DISABLED,
    PERIODIC_SLOT_SKIPPED,
    UNUSED_PERIODIC_JOBS_DELETED,
)
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._maintenance.due_slots import due_slots
from riverpy._names import DEFAULT_DOMAIN
from riverpy._plugins import Plugins
from riverpy._postgres.batch import BatchSize, StatementErrors, split
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy._postgres.periodic import (
    MISSING,
    PeriodicAdvance,
    PeriodicRegistration,
    PeriodicRow,
    periodic_advance,
    periodic_delete_unused,
    periodic_due,
    periodic_exists,
    periodic_list,
    periodic_mark_used,
    periodic_now,
    periodic_register,
    periodic_set_ran,
    periodic_unused,
)
from riverpy.errors import InsertError, TransactionError
from riverpy.periodic import PeriodicJobsStart
from riverpy.schedules import next_time

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from datetime import datetime

    from riverpy._insert.inserter import Inserter
    from riverpy._insert.row import PreparedJob
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext
    from riverpy._postgres.driver import Connection
    from riverpy.insert_opts import InsertResult
    from riverpy.job import JobRow
    from riverpy.periodic import PeriodicJob, PeriodicJobs, PeriodicJobState

LOOK_INTERVAL = 5.0
"""Seconds between two looks at the table, if nothing is due earlier."""
LOCKED_RETRY = 1.0
"""Seconds until a row is tried again that another transaction has locked or changed."""
MISSING_RETRY = 60.0
"""Seconds between two looks for the table, while it is missing."""
STATEMENT_TIMEOUT = 5.0
"""Seconds for what is read."""
HOOK_TIMEOUT = 30.0
"""Seconds that the hooks `periodic_jobs_start` may take together."""
BATCH = 100
"""Periodic jobs whose slots are inserted in one transaction."""
ROWS_MOST = 1000
"""Jobs after which a transaction takes no further periodic job."""
PLAN_TIME = 0.05
"""Seconds of planning after which what is planned is inserted, and others have their turn."""
KEEP_INTERVAL = 3600.0
"""Seconds between two marks on the rows that they are in use."""
FORGET_AFTER = timedelta(days=30)
"""How long the row is kept of a periodic job that no leader has had."""
SKIP_ADVICE = (
    "the finished job keeps the unique key: leave completed out of UniqueOpts(by_state=…), so that "
    "a job is inserted whenever none is waiting or running"
)
_RETRY_FIRST = timedelta(seconds=1)
_RETRY_MOST = timedelta(seconds=30)
"""The delay after a failure of one periodic job doubles up to this."""


class Run(NamedTuple):
    """A job to insert."""

    slot: datetime
    """Or when the run was requested."""
    job: PreparedJob


class Firing(NamedTuple):
    """What is to be done for one periodic job."""

    advance: PeriodicAdvance
    runs: list[Run]
    failed: Exception | None = None
    """Why it does not come further."""


class NewJob(NamedTuple):
    """A periodic job to register."""

    row: PeriodicRegistration
    job: PeriodicJob


class _Failure:
    """A periodic job that fails."""

    def __init__(self) -> None:
        self.until = 0.0
        """When it is tried again, by boottime."""
        self._backoff = Backoff(_RETRY_FIRST, _RETRY_MOST)

    def hold(self, now: float) -> float:
        """It failed once more. Returns the seconds until it is tried again."""
        delay = self._backoff.next()
        self.until = now + delay
        return delay


class PeriodicEnqueuer(MaintenanceService):
    """Inserts periodic jobs."""

    name = "periodic enqueuer"

    def __init__(self, context: TermContext, jobs: PeriodicJobs, inserter: Inserter) -> None:
        """Make it, for one term.

        Args:
            context: what it shares with the term's other services.
            jobs: the client's.
            inserter: the client's.
        """
        super().__init__(context)
        self._jobs, self._inserter = jobs, inserter
        config = context.config
        self._suffix = "" if config.domain == DEFAULT_DOMAIN else f"@{config.domain}"
        self._hooks = Plugins(config.plugins, config.hooks).periodic_jobs_start
        jobs.wake = self.stir
        self._registered: dict[str, PeriodicJob] = {}
        """By the id of the row, which names the domain too: two domains may each have one of the
        same id."""
        self._failures: dict[str, _Failure] = {}
        self._skipped: set[str] = set()
        """Ids of rows of which a lost slot was reported."""
        self._size = BatchSize(BATCH, context.fence.limit.total_seconds())
        self._errors = StatementErrors()
        self._registering: Batches[NewJob] = Batches(
            self, "registering periodic jobs", self._register_rows, key=lambda new: new.row.id
        )
        self._keeping: Batches[str] = Batches(
            self, "keeping periodic jobs", self._keep_rows, key=lambda row_id: row_id
        )
        self._forgetting: Batches[str] = Batches(
            self, "forgetting periodic jobs", self._forget_rows, key=lambda row_id: row_id
        )
        self._is_there = False
        self._is_missing_said = False
        self._kept_at: float | None = None

    async def prepare(self) -> None:
        """Call the hooks and register what there is.

        Raises:
            Exception: a hook failed, or they took longer than 30 s, or the table of periodic jobs
                cannot be read.
        """
        await self._find_table()
        if self._hooks:
            states = await self._states() if self._is_there else {}
            start = PeriodicJobsStart(jobs=self._jobs, states=states)
            reason = f"the hook periodic_jobs_start took longer than {HOOK_TIMEOUT:g} s"
            with (
                anyio.fail_after(HOOK_TIMEOUT, reason=reason),
                awaiting_only_exceptions("the hook periodic_jobs_start"),
            ):
                for hook in self._hooks:
                    await hook.periodic_jobs_start(start)
        if self._is_there:
            try:
                await self._register()
            except DATABASE_ERRORS as error:  # each pass begins with it
                self.log.debug(PERIODIC_JOB_REGISTRATION_FAILED, error=describe(error))

    async def run_once(self, scope: StopScope) -> float:
        """Insert what is due; returns the seconds until there is something to do."""
        if not await self._find_table():
            return MISSING_RETRY
        await self._register()
        await self._keep()
        if not self._registered:
            return LOOK_INTERVAL
        looks = await self._look()
        moved = 0
        for firings in self._slices(looks):
            moved += await self._fire_all(firings)
            await anyio.lowlevel.checkpoint()
        return 0.0 if moved else self._seconds_until_next(looks)

    # -- the table

    async def _find_table(self) -> bool:
        if not self._is_there:
            async with self.context.connection.use(
                "looking for the table of periodic jobs", STATEMENT_TIMEOUT
            ) as connection:
                self._is_there = await periodic_exists(connection, self.context.schema)
        if not self._is_there and self._jobs and not self._is_missing_said:
            self._is_missing_said = True
            self.log.error(
                PERIODIC_JOBS_DISABLED, reason=MISSING, periodic_job_ids=[j.id for j in self._jobs]
            )
        return self._is_there

    async def _states(self) -> dict[str, PeriodicJobState]:
        async with self.context.connection.use(
            "reading the periodic jobs", STATEMENT_TIMEOUT
        ) as connection:
            states = await periodic_list(connection, self.context.schema)
        own: dict[str, PeriodicJobState] = {}
        for state in states:
            job_id, _, domain = state.id.partition("@")
            if (domain or DEFAULT_DOMAIN) == self.context.config.domain:
                own[job_id] = msgspec.structs.replace(state, id=job_id)
        return own

    def _row_id(self, job_id: str) -> str:
        return job_id + self._suffix

    async def _register(self) -> None:
        """Bring rows and registry together, after either has changed."""
        self._registered = {
            row_id: job for row_id, job in self._registered.items() if self._jobs.get(job.id) is job
        }
        new = {
            row_id: job
            for job in self._jobs
            if (row_id := self._row_id(job.id)) not in self._registered
            and not self._is_held(row_id)
        }
        if not new:
            return
        purpose = "registering periodic jobs"
        async with self.context.connection.use(purpose, STATEMENT_TIMEOUT) as connection:
            now = await periodic_now(connection)
        await self._registering.handle(
            NewJob(registration, job)
            for job in new.values()
            if (registration := self._registration(job, now)) is not None
        )

    async def _register_rows(self, new: list[NewJob]) -> None:
        jobs = {row.id: job for row, job in new}
        when = {row_id: job.run_on_start for row_id, job in jobs.items()}
        async with self._registering.transaction() as connection:
            done = await periodic_register(
                connection,
                self.context.schema,
                [row for row, _ in new],
                first=[
                    one for one, job in jobs.items() if job.run_on_start == "first_registration"
                ],
                each=[row_id for row_id, run in when.items() if run == "each_term"],
            )
        self._registered.update({row_id: jobs[row_id] for row_id in done})

    def _registration(self, job: PeriodicJob, now: datetime) -> PeriodicRegistration | None:
        try:
            row_id = self._row_id(job.id)
            return PeriodicRegistration(row_id, job.schedule_text, next_time(job.schedule, now))
        except Exception as error:
            self._hold(self._row_id(job.id), error)
            return None

    async def _keep(self) -> None:
        now = self.context.timer.boottime()
        if self._kept_at is not None and now - self._kept_at < KEEP_INTERVAL:
            return
        await self._keeping.handle(list(self._registered))
        await self._forgetting.handle_pages(self._read_unused)
        self._kept_at = now

    async def _keep_rows(self, ids: list[str]) -> None:
        async with self._keeping.transaction() as connection:
            await periodic_mark_used(connection, self.context.schema, ids)

    async def _read_unused(self, after: str | None, limit: int) -> list[str]:
        purpose = "looking for unused periodic jobs"
        async with self.context.connection.use(purpose, STATEMENT_TIMEOUT) as connection:
            return await periodic_unused(
                connection,
                self.context.schema,
                used=list(self._registered),
                age=FORGET_AFTER,
                after=after or "",
                limit=limit,
            )

    async def _forget_rows(self, ids: list[str]) -> None:
        async with self._forgetting.transaction() as connection:
            forgotten = await periodic_delete_unused(
                connection, self.context.schema, ids=ids, age=FORGET_AFTER
            )
        if forgotten:
            self.log.info(UNUSED_PERIODIC_JOBS_DELETED, periodic_job_ids=sorted(forgotten))

    async def _look(self) -> list[PeriodicRow]:
        async with self.context.connection.use(
            "looking for due periodic jobs", STATEMENT_TIMEOUT
        ) as connection:
            return await periodic_due(connection, self.context.schema, list(self._registered))

    def _seconds_until_next(self, looks: Sequence[PeriodicRow]) -> float:
        now = self.context.timer.boottime()
        seconds = [LOOK_INTERVAL]
        for look in looks:
            if self._is_held(look.id):
                seconds.append(self._failures[look.id].until - now)
            elif look.run_requested_at is not None:
                seconds.append(LOCKED_RETRY)
            elif look.due_in is not None:
                seconds.append(look.due_in if look.due_in > 0 else LOCKED_RETRY)
        return min(seconds)

    # -- one periodic job

    def _slices(self, looks: Sequence[PeriodicRow]) -> Generator[list[Firing]]:
        """What is to be done, in parts that keep neither the event loop nor a transaction long.
        What has failed before comes last."""
        firings: list[Firing] = []
        began = self.context.timer.boottime()
        for look in sorted(looks, key=lambda look: look.id in self._failures):
            firing = self._plan(look)
            if firing is not None:
                firings.append(firing)
            rows = sum(len(firing.runs) for firing in firings)
            is_long = self.context.timer.boottime() - began >= PLAN_TIME
            if is_long or rows >= ROWS_MOST or len(firings) >= BATCH:
                yield firings
                firings, began = [], self.context.timer.boottime()
        if firings:
            yield firings

    def _plan(self, look: PeriodicRow) -> Firing | None:
        """What is to be done for it now, as its user's code says."""
        job, slot = self._registered[look.id], look.next_run_at
        if self._is_held(look.id):
            return None
        try:
            if look.run_requested_at is not None:
                firing = self._requested(job, look, look.run_requested_at)
            elif slot is not None and slot <= look.read_at:
                firing = self._due(job, look, slot)
            else:
                return None
        except Exception as error:
            self._hold(look.id, error)
            return None
        if firing.failed is not None and firing.advance.next_run_at == look.next_run_at:
            self._hold(look.id, firing.failed)
            return None
        return firing

    def _requested(self, job: PeriodicJob, look: PeriodicRow, at: datetime) -> Firing:
        """The run that somebody asked for; its slots wait for the next pass."""
        prepared = self._prepare(job, at)
        runs = [] if prepared is None else [Run(at, prepared)]
        return Firing(_advance(look, look.next_run_at), runs)

    def _due(self, job: PeriodicJob, look: PeriodicRow, first: datetime) -> Firing:
        """Its slots, up to the first whose job cannot be made."""
        due = due_slots(job.schedule, job.missed, first, look.read_at)
        if look.is_paused:
            return Firing(_advance(look, due.following), [])
        if due.passed_over:
            self.log.warning(MISSED_PERIODIC_SLOTS_DROPPED, periodic_job_id=job.id)
        runs: list[Run] = []
        for slot in due.slots:
            if look.resumed_at is not None and slot <= look.resumed_at:
                continue
            try:
                prepared = self._prepare(job, slot)
            except Exception as error:
                return Firing(_advance(look, slot), runs, error)
            if prepared is not None:
                runs.append(Run(slot, prepared))
        return Firing(_advance(look, due.following), runs)

    def _prepare(self, job: PeriodicJob, due_at: datetime) -> PreparedJob | None:
        run = job.construct()
        if run is None:
            return None
        args, opts = run
        metadata = {**(opts.metadata or {}), "periodic": True, "river:periodic_job_id": job.id}
        opts = msgspec.structs.replace(opts, metadata=metadata)
        return self._inserter.prepare_due(args, opts, due_at=due_at)

    def _is_held(self, job_id: str) -> bool:
        failure = self._failures.get(job_id)
        return failure is not None and failure.until > self.context.timer.boottime()

    def _hold(self, job_id: str, error: Exception) -> None:
        """It failed: leave it alone for a while. That is said at error once, until it works again,
        with the traceback of code of the user's."""
        is_first = job_id not in self._failures
        failure = self._failures.setdefault(job_id, _Failure())
        delay = failure.hold(self.context.timer.boottime())
        say = self.log.error if is_first else self.log.debug
        say(
            PERIODIC_JOB_INSERT_FAILED,
            periodic_job_id=job_id,
            error=describe(error),
            retry_in=round(delay, 3),
            exc_info=error if is_first and not isinstance(error, DATABASE_ERRORS) else None,
        )

    # -- the transactions

    async def _fire_all(self, firings: Sequence[Firing]) -> int:
        """Returns how many were moved on. One that failed before comes last and alone."""
        alone = [firing for firing in firings if firing.advance.id in self._failures]
        moved = await self._fire([firing for firing in firings if firing not in alone])
        for firing in alone:
            moved += await self._fire([firing])
        return moved

    async def _fire(self, firings: list[Firing]) -> int:
        """In transactions as large as their time limit allows. One that fails is found by splitting
        its batch, and held."""
        moved, parts = 0, [firings]
        while parts:
            rows = parts.pop()
            batch, rest = rows[: self._size.rows], rows[self._size.rows :]
            if not batch:
                continue
            parts.append(rest)
            began = self.context.timer.boottime()
            try:
                done = await self._transact(batch)
            except (*DATABASE_ERRORS, InsertError) as error:
                if not isinstance(error, InsertError) and not self._errors.may_be_of_rows(error):
                    raise
                if len(batch) == 1:
                    self._hold(batch[0].advance.id, error)
                else:
                    self._size.failed(len(batch))
                    parts += split(batch)
            else:
                self._size.succeeded(len(batch), self.context.timer.boottime() - began)
                moved += len(done)
                for firing in batch:
                    if firing.advance.id in done:
                        self._fired(firing)
        return moved

    async def _transact(self, firings: Sequence[Firing]) -> set[str]:
        async with self.context.fence.transaction(
            self.context.connection, "inserting periodic jobs"
        ) as connection:
            done = await periodic_advance(
                connection, self.context.schema, [firing.advance for firing in firings]
            )
            runs = [
                (firing.advance.id, run)
                for firing in firings
                if firing.advance.id in done
                for run in firing.runs
            ]
            results = await self._insert([run.job for _, run in runs], connection) if runs else []
            inserted = {
                row_id: run.slot
                for (row_id, run), result in zip(runs, results, strict=True)
                if not result.unique_skipped_as_duplicate
            }
            if inserted:
                await periodic_set_ran(connection, self.context.schema, inserted)
        for (row_id, run), result in zip(runs, results, strict=True):
            if result.unique_skipped_as_duplicate:
                self._say_skipped(row_id, run.slot, result.job)
        return done

    def _say_skipped(self, row_id: str, slot: datetime, existing: JobRow) -> None:
        """Log that a slot is a duplicate: once as a warning if the existing job has finished and is
        of an earlier slot, since each slot is lost then until the row of that job is deleted."""
        job = self._registered[row_id]
        is_lost = existing.finalized_at is not None and _has_slot(job, existing.scheduled_at, slot)
        say = self.log.debug
        if is_lost and row_id not in self._skipped:
            self._skipped.add(row_id)
            say = self.log.warning
        say(
            PERIODIC_SLOT_SKIPPED,
            periodic_job_id=job.id,
            slot=slot.isoformat(),
            job_id=existing.id,
            state=existing.state.value,
            advice=SKIP_ADVICE if is_lost else None,
        )

    async def _insert(self, jobs: list[PreparedJob], connection: Connection) -> list[InsertResult]:
        try:
            return await self._inserter.insert_prepared(jobs, tx=connection)
        except TransactionError as error:  # meant for whoever brings a connection: it is lost
            raise ConnectionError(describe(error.__cause__ or error)) from error

    def _fired(self, firing: Firing) -> None:
        if firing.failed is not None:
            self._hold(firing.advance.id, firing.failed)
        elif self._failures.pop(firing.advance.id, None) is not None:
            self.log.info(PERIODIC_JOB_INSERTED_AGAIN, periodic_job_id=firing.advance.id)


def _advance(look: PeriodicRow, next_run_at: datetime | None) -> PeriodicAdvance:
    return PeriodicAdvance(
        look.id, look.next_run_at, look.run_requested_at, look.is_paused, next_run_at
    )


def _has_slot(job: PeriodicJob, after: datetime, until: datetime) -> bool:
    """Whether the schedule has a slot in this time."""
    try:
        following = next_time(job.schedule, after)
    except Exception:  # code of the user's, about a time that it was not asked for before
        return False
    return following is not None and following <= until
