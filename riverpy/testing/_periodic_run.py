"""PeriodicServiceRunner: inserts the due jobs of periodic jobs for `riverpy.testing.advance`, as a
leader does.

A test cannot change the server's clock, so `advance` moves the times in the rows into the past
instead. Then these times no longer match schedules with a fixed time of day. Therefore the
schedules and the periods of `UniqueOpts.by_period` are computed with the time of the test: the
server's time plus all moves so far.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio.lowlevel

from riverpy._clock import Timer
from riverpy._leading.queue_scope import ALL_QUEUES, QueueScope
from riverpy._leading.term_context import TermContext
from riverpy._lifecycle import StopScope
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.periodic_enqueuer import PeriodicEnqueuer
from riverpy._names import DEFAULT_DOMAIN
from riverpy.errors import ConfigError
from riverpy.job import JobState
from riverpy.periodic import PeriodicJobs
from riverpy.schedules import find_next_due_time
from riverpy.testing._inline_connection import InlineConnection

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from riverpy._insert.inserter import Args, Inserter
    from riverpy._insert.row import PreparedJob
    from riverpy._leading.term_fence import TermFence
    from riverpy._postgres.driver import Connection
    from riverpy.config import Config
    from riverpy.insert_opts import InsertOpts, InsertResult
    from riverpy.periodic import PeriodicJob
    from riverpy.schedules import PeriodicSchedule
    from riverpy.testing._inline_connection import TransactionOpener
    from riverpy.worker import Workers

PASSES_MAX = 1_000
"""The maximum number of passes in one call of `insert_due_jobs`. One pass inserts the jobs that are
due."""


class TestTime:
    """The time of a test: the server's time plus `offset`, which `advance` increases."""

    def __init__(self, offset: timedelta) -> None:
        self.offset = offset


class _NoWaitTimer(Timer):
    """A timer that does not wait, because a test decides when time passes."""

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run, and return at once."""
        await anyio.lowlevel.checkpoint()


class _AlwaysHeldFence:
    """A replacement for the leader's `TermFence`, which lets transactions commit only during the
    leader's term. This replacement lets all transactions commit, because a test has no leader."""

    transaction_timeout = timedelta(seconds=30)

    def expect_held(self) -> None:
        """Do nothing, because leadership is never lost in a test."""

    def transaction(
        self, connection: InlineConnection, purpose: str
    ) -> AbstractAsyncContextManager[Connection]:
        """Open a transaction on the connection, without a check that the client is leader."""
        return connection.acquire(purpose, self.transaction_timeout.total_seconds())


class _TestTimeSchedule:
    """A schedule for a test in which `advance` has moved the time. It wraps another schedule, which
    receives and returns times of the test (see `TestTime`). This class itself receives and returns
    server times, and converts between the two."""

    def __init__(self, schedule: PeriodicSchedule, time: TestTime) -> None:
        self._schedule, self._time = schedule, time

    def next(self, after: datetime, /) -> datetime | None:
        """Return the first due time after `after`. Both are in server time."""
        due_at = find_next_due_time(self._schedule, after + self._time.offset)
        return None if due_at is None else due_at - self._time.offset


class _TestTimeInserter:
    """Inserts the jobs of periodic jobs. If a job is unique by period, the period is computed with
    the time of the test."""

    def __init__(self, inserter: Inserter, time: TestTime) -> None:
        self._inserter, self._time = inserter, time
        self.offset_by_job_id: dict[int, timedelta] = {}
        """For each job id: the value of `TestTime.offset` when the job was inserted."""

    def prepare_periodic_job(
        self, args: Args, opts: InsertOpts, *, due_at: datetime
    ) -> PreparedJob:
        """Check and encode a job, as `Inserter.prepare_periodic_job` does."""
        job = self._inserter.prepare_periodic_job(args, opts, due_at=due_at + self._time.offset)
        if opts.scheduled_at is None and job.row.state == JobState.AVAILABLE:
            job = job._replace(row=job.row._replace(scheduled_at=due_at.isoformat()))
        return job

    async def insert_prepared_jobs(self, jobs: list[PreparedJob], *, tx: Any) -> list[InsertResult]:
        """Insert the jobs, as `Inserter.insert_prepared_jobs` does, and record the offset of the
        test's time for each inserted job."""
        results = await self._inserter.insert_prepared_jobs(jobs, tx=tx)
        for result in results:
            if not result.unique_skipped_as_duplicate:
                self.offset_by_job_id[result.job.id] = self._time.offset
        return results


class PeriodicServiceRunner:
    """Runs the leader's services that insert periodic jobs and make scheduled jobs available. Each
    method runs one of these services for the jobs that are due now."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        open_transaction: TransactionOpener,
        inserter: Inserter,
        periodic_jobs: Iterable[PeriodicJob],
        time: TestTime,
    ) -> None:
        """Create the services. `time` is the time of the test, which the caller changes."""
        connection = InlineConnection("maintenance", open_transaction)

        async def read_queue_scope() -> QueueScope:
            """Return all queues, because a test has no leader domains."""
            return ALL_QUEUES

        context = TermContext(
            fence=cast("TermFence", _AlwaysHeldFence()),
            config=config,
            workers=workers,
            connection=connection,
            long_statement_connection=connection,
            timer=_NoWaitTimer(),
            open_direct_connection=None,
            read_queue_scope=read_queue_scope,
        )
        jobs = [_make_test_time_job(job, time) for job in periodic_jobs]
        self._inserter = _TestTimeInserter(inserter, time)
        self._enqueuer = PeriodicEnqueuer(
            context, PeriodicJobs(jobs, lambda: None), cast("Inserter", self._inserter)
        )
        self._scheduler = JobScheduler(context)
        self._scope = StopScope()
        suffix = "" if config.domain == DEFAULT_DOMAIN else f"@{config.domain}"
        self.row_ids = [f"{job.id}{suffix}" for job in jobs]
        """The ids under which the database stores the periodic jobs."""

    @property
    def offset_by_job_id(self) -> dict[int, timedelta]:
        """For each job id: the value of `TestTime.offset` when the job was inserted."""
        return self._inserter.offset_by_job_id

    async def insert_due_jobs(self) -> None:
        """Register the periodic jobs, and insert the jobs that are due.

        Raises:
            ConfigError: a periodic job cannot insert its job, or jobs are still due after
                `PASSES_MAX` passes.
        """
        for _ in range(PASSES_MAX):
            seconds = await self._enqueuer.run_once(self._scope)
            if errors := self._enqueuer.error_by_row_id:
                row_id, error = next(iter(errors.items()))
                raise ConfigError(f"the periodic job {row_id!r} cannot insert its job: {error}")
            if seconds != 0.0:
                return
        raise ConfigError(f"periodic jobs are still due after {PASSES_MAX} passes over them")

    async def make_due_jobs_available(self) -> None:
        """Make scheduled and retryable jobs available if they are due."""
        await self._scheduler.run_once(self._scope)


def _make_test_time_job(job: PeriodicJob, time: TestTime) -> PeriodicJob:
    """Return a copy of the periodic job whose schedule uses the time of the test.

    The copy inserts the job of `run_on_start` only once in the test. Otherwise it would insert one
    in each call of `advance`, because each call begins a new term of the leader."""
    moved = copy.copy(job)
    moved.schedule = _TestTimeSchedule(job.schedule, time)
    if moved.run_on_start == "each_term":
        moved.run_on_start = "first_registration"
    return moved
