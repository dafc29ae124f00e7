"""JobExpirer: cancels waiting jobs that have expired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log_events import EXPIRED_JOBS_CANCELLED
from riverpy._maintenance.base import READ_STATEMENT_TIMEOUT, MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.job_maintenance import job_cancel_expired, job_list_expired
from riverpy.job import JobState

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.sql_files import QueueFilter

RUN_INTERVAL_MIN = 600.0
"""The shortest time between two runs, in seconds."""
RUN_INTERVAL_PER_READ_SECOND = 50.0
"""The time between two runs is at least this number of seconds for each second that the longest
read took. So a read takes at most two per cent of the time."""
PAGE_ROWS_MAX = 50_000
"""The largest number of jobs that one read returns."""


class JobExpirer(MaintenanceService):
    """Cancels waiting jobs that have expired, in batches. If the database refuses to change a job,
    the expirer skips the job and retries it later in a statement of its own. Workers also cancel an
    expired job when they claim it."""

    name = "job expirer"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[int] = MaintenanceBatchRunner(
            self, "cancelling expired jobs", self._cancel_expired_jobs, row_key=int
        )
        self._unchanged_job_ids: set[int] = set()
        """The ids of jobs that this run could not change, because they are locked or no longer
        wait."""
        self._cancelled_job_count = 0
        self._longest_read_seconds = 0.0
        """The duration of the longest read of this run, in seconds."""

    async def run_once(self, scope: StopScope) -> float:
        """Cancel all waiting jobs that have expired."""
        self._unchanged_job_ids, self._cancelled_job_count = set(), 0
        self._longest_read_seconds = 0.0
        queues = await self.context.read_queue_scope()
        self.batch_runner.set_queue_scope(queues)
        try:
            for within in queues.make_statement_filters():
                if not await self._cancel_expired_jobs_in_queues(within):
                    break
            await self.batch_runner.send_in_batches(())  # sends skipped rows whose retry is due
        finally:
            if self._cancelled_job_count:
                self.log.info(EXPIRED_JOBS_CANCELLED, count=self._cancelled_job_count)
        interval = max(RUN_INTERVAL_MIN, self._longest_read_seconds * RUN_INTERVAL_PER_READ_SECOND)
        return self.batch_runner.seconds_until_next_run(interval)

    async def _cancel_expired_jobs_in_queues(self, queue_filter: QueueFilter | None) -> bool:
        """Cancel the expired jobs of these queues. Return False if the run should end, because too
        many consecutive statements have failed."""
        while True:
            ids = await self._read_expired_job_ids(queue_filter)
            if not await self.batch_runner.send_in_batches(ids):
                return False
            if len(ids) < PAGE_ROWS_MAX:
                return True

    async def _read_expired_job_ids(self, queue_filter: QueueFilter | None) -> list[int]:
        self.context.fence.expect_held()
        skipped_ids = [entry.row for entry in self.batch_runner.skipped_rows.rows]
        began = self.context.timer.seconds_since_boot()
        async with self.context.long_statement_connection.acquire(
            "looking for expired jobs", READ_STATEMENT_TIMEOUT
        ) as connection:
            ids = await job_list_expired(
                connection,
                self.schema,
                queue_filter=queue_filter,
                skipped_ids=[*self._unchanged_job_ids, *skipped_ids],
                limit=PAGE_ROWS_MAX,
            )
        took = self.context.timer.seconds_since_boot() - began
        self._longest_read_seconds = max(self._longest_read_seconds, took)
        return ids

    async def _cancel_expired_jobs(self, ids: list[int]) -> None:
        async with self.batch_runner.open_transaction() as connection:
            cancelled = await job_cancel_expired(connection, self.schema, ids)
        self._unchanged_job_ids.update(set(ids) - cancelled)
        self._cancelled_job_count += len(cancelled)
        await self.publish_ended_jobs(dict.fromkeys(cancelled, JobState.CANCELLED.value))
