"""PeriodicServiceRunner: inserts the due jobs of periodic jobs as a leader does, while a test moves
the times of the rows.

The server's clock cannot be changed, so a test moves the rows into the past. A moved time is at
another time of day than its schedule says. Therefore schedules and unique periods are computed with
the time that the test has reached: the server's time plus all moves so far.
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
from riverpy.schedules import next_time
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
"""The maximum number of passes of a service. One pass inserts or moves the due jobs."""


class TestTime:
    """The clock of a test: how far it is ahead of the server's clock."""

    def __init__(self, offset: timedelta) -> None:
        self.offset = offset


class _NoWaitTimer(Timer):
    """A timer that does not wait, because a test decides when time passes."""

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run."""
        await anyio.lowlevel.checkpoint()


class _AlwaysHeldFence:
    """A leader's fence that lets all transactions commit, because a test has no leader."""

    transaction_timeout = timedelta(seconds=30)

    def expect_held(self) -> None:
        """Do nothing: in a test, leadership is never lost."""

    def transaction(
        self, connection: InlineConnection, purpose: str
    ) -> AbstractAsyncContextManager[Connection]:
        """Return a transaction on the connection, without a check of leadership."""
        return connection.acquire(purpose, self.transaction_timeout.total_seconds())


class _TestTimeSchedule:
    """A schedule that runs on the time of the test."""

    def __init__(self, schedule: PeriodicSchedule, time: TestTime) -> None:
        self._schedule, self._time = schedule, time

    def next(self, after: datetime, /) -> datetime | None:
        """Return the first time of the schedule after `after`."""
        slot = next_time(self._schedule, after + self._time.offset)
        return None if slot is None else slot - self._time.offset


class _TestTimeInserter:
    """Inserts periodic jobs. Their unique periods are computed with the time of the test."""

    def __init__(self, inserter: Inserter, time: TestTime) -> None:
        self._inserter, self._time = inserter, time
        self.offset_by_job_id: dict[int, timedelta] = {}
        """By job id: how far the time of the test was ahead of the server's time at the insert."""

    def prepare_periodic_job(
        self, args: Args, opts: InsertOpts, *, due_at: datetime
    ) -> PreparedJob:
        """Check and encode a periodic job, as `Inserter.prepare_periodic_job`."""
        job = self._inserter.prepare_periodic_job(args, opts, due_at=due_at + self._time.offset)
        if opts.scheduled_at is None and job.row.state == JobState.AVAILABLE:
            job = job._replace(row=job.row._replace(scheduled_at=due_at.isoformat()))
        return job

    async def insert_prepared_jobs(self, jobs: list[PreparedJob], *, tx: Any) -> list[InsertResult]:
        """Insert the jobs, as `Inserter.insert_prepared_jobs`."""
        results = await self._inserter.insert_prepared_jobs(jobs, tx=tx)
        for result in results:
            if not result.unique_skipped_as_duplicate:
                self.offset_by_job_id[result.job.id] = self._time.offset
        return results


class PeriodicServiceRunner:
    """Runs single passes of the services that insert periodic jobs and make due jobs available."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        open_transaction: TransactionOpener,
        inserter: Inserter,
        periodic_jobs: Iterable[PeriodicJob],
        time: TestTime,
    ) -> None:
        """`time` is the time of the test. The caller changes it."""
        connection = InlineConnection("maintenance", open_transaction)

        async def read_queue_scope() -> QueueScope:
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
        """The ids of the periodic jobs in the database."""

    @property
    def offset_by_job_id(self) -> dict[int, timedelta]:
        """By job id: how far the time of the test was ahead of the server's time at the insert."""
        return self._inserter.offset_by_job_id

    async def insert_due_jobs(self) -> None:
        """Register the periodic jobs, and insert the jobs that are due.

        Raises:
            ConfigError: a periodic job has failed, or has too many due times.
        """
        for _ in range(PASSES_MAX):
            seconds = await self._enqueuer.run_once(self._scope)
            if errors := self._enqueuer.error_by_row_id:
                row_id, error = next(iter(errors.items()))
                raise ConfigError(f"the periodic job {row_id!r} cannot insert its job: {error}")
            if seconds != 0.0:
                return
        raise ConfigError(f"slots are still due after {PASSES_MAX} passes over the periodic jobs")

    async def make_due_jobs_available(self) -> None:
        """Make scheduled and retryable jobs available if they are due."""
        await self._scheduler.run_once(self._scope)


def _make_test_time_job(job: PeriodicJob, time: TestTime) -> PeriodicJob:
    """Return the periodic job with a schedule in the time of the test. `run_on_start` is changed so
    that it inserts one job in the whole test, although each move of the time begins a new term."""
    moved = copy.copy(job)
    moved.schedule = _TestTimeSchedule(job.schedule, time)
    if moved.run_on_start == "each_term":
        moved.run_on_start = "first_registration"
    return moved
