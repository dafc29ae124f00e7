"""JobCountCleaner: limits the number of rows with job counts. It adds old counts per minute to the
counts per hour, and deletes old counts per hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.job_counts import (
    PeriodCleanup,
    job_count_clean_periods,
    job_count_list_period_cleanups,
    job_count_table_exists,
)

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

RUN_INTERVAL = 600.0
"""Seconds between two runs."""
PERIODS_PER_STATEMENT_MAX = 20
"""The maximum number of periods (minutes or hours) whose job counts one transaction changes. The
table may have a row for each period and queue of the schema."""


class JobCountCleaner(MaintenanceService):
    """Limits the number of rows with job counts in the whole schema. Two leaders may do this at the
    same time: nothing is counted twice, because the same statement deletes the counts of a minute
    and adds them to the hour."""

    name = "job count cleaner"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[PeriodCleanup] = MaintenanceBatchRunner(
            self,
            "summing counts of jobs",
            self.sum_up_or_delete_counts,
            row_key=lambda period: period[:2],
            row_name=lambda period: period.started_at_text,
            rows_max=PERIODS_PER_STATEMENT_MAX,
        )

    async def run_once(self, scope: StopScope) -> float:
        """Clean the job counts of all periods (minutes and hours) that need it, if the table of
        counts exists. There are three actions: add the counts of an old minute to its hour; delete
        the counts of an old hour; if a period has too many queues, combine the counts of its less
        busy queues in one row."""
        async with self.acquire_read_connection("looking for the table of counts") as connection:
            has_table = await job_count_table_exists(connection, self.schema)
        if has_table:
            await self.batch_runner.read_and_send_pages(self.read_periods_to_clean)
        return self.batch_runner.seconds_until_next_run(RUN_INTERVAL)

    async def read_periods_to_clean(
        self, after: PeriodCleanup | None, limit: int
    ) -> list[PeriodCleanup]:
        """Return at most `limit` periods (minutes or hours) whose counts must be changed, in order.
        The list starts after the period `after`. None: it starts with the first period."""
        async with self.acquire_read_connection("reading periods of counts") as connection:
            return await job_count_list_period_cleanups(
                connection, self.schema, after=after, limit=limit
            )

    async def sum_up_or_delete_counts(self, periods: list[PeriodCleanup]) -> None:
        """Add up or delete the counts of these periods, as the `action` of each `PeriodCleanup`
        says. Nothing changes if another leader has already done this."""
        async with self.batch_runner.open_transaction() as connection:
            await job_count_clean_periods(connection, self.schema, changes=periods)
