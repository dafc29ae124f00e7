"""JobScheduler: makes scheduled and retryable jobs available when they are due."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from riverpy._log_events import DUPLICATE_JOBS_DISCARDED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.job_maintenance import job_list_due, job_schedule, job_set_lock_timeout

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.sql_files import QueueFilter

RUN_INTERVAL = 5.0
"""Seconds between two runs."""
SCHEDULE_AHEAD_TIME = timedelta(seconds=RUN_INTERVAL)
"""A run also makes jobs available that become due within this time, i.e. before the next run.
Workers do not claim a job before it is due."""
LOCK_TIMEOUT = timedelta(milliseconds=50)
"""The longest time for which a statement waits for a lock. Such a lock exists, for example, while
another transaction inserts a job with the unique key of a due job."""


class JobScheduler(MaintenanceService):
    """Makes due jobs available, in batches. If the database refuses to change a job, the scheduler
    skips the job and retries it later in a statement of its own."""

    name = "job scheduler"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[int] = MaintenanceBatchRunner(
            self, "making due jobs available", self._make_jobs_available, row_key=int
        )
        self._unchanged_job_ids: list[int] = []
        """The ids of jobs that this run could not change, because they are locked, or another job
        has their unique key."""

    async def run_once(self, scope: StopScope) -> float:
        """Make all due jobs available."""
        self._unchanged_job_ids = []
        queues = await self.context.read_queue_scope()
        self.batch_runner.set_queue_scope(queues)
        for within in queues.make_statement_filters():
            if not await self.batch_runner.read_and_send_pages(
                partial(self._read_due_job_ids, within)
            ):
                break
        return RUN_INTERVAL

    async def _read_due_job_ids(
        self, queue_filter: QueueFilter | None, _after: int | None, limit: int
    ) -> list[int]:
        """Return the ids of the next due jobs. `_after` is not needed: the jobs of earlier pages
        are not read again, because they are no longer due or are skipped."""
        self.context.fence.expect_held()
        skipped_ids = [entry.row for entry in self.batch_runner.skipped_rows.rows]
        async with self.acquire_read_connection("finding due jobs") as connection:
            return await job_list_due(
                connection,
                self.schema,
                queue_filter=queue_filter,
                lookahead=SCHEDULE_AHEAD_TIME,
                skipped_ids=self._unchanged_job_ids + skipped_ids,
                limit=limit,
            )

    async def _make_jobs_available(self, ids: list[int]) -> None:
        async with self.batch_runner.open_transaction() as connection:
            await job_set_lock_timeout(connection, LOCK_TIMEOUT)
            scheduled = await job_schedule(
                connection, self.schema, ids=ids, lookahead=SCHEDULE_AHEAD_TIME
            )
        self._unchanged_job_ids += scheduled.unchanged_job_ids
        if scheduled.discarded_count:
            self.log.info(DUPLICATE_JOBS_DISCARDED, count=scheduled.discarded_count)
