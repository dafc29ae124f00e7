"""MaintenanceBatchRunner: sends rows to the database in batches, for a maintenance service. A row
is for example the id of a job to delete. Each batch is one transaction, with as many rows as its
time limit allows. The transaction fails if the leader's term (the client's time as leader) has
ended.

If the database refuses a row, or the row takes longer than the time limit, the runner skips the
row. Later, the runner sends the row again in a batch of its own, so that it does not delay other
rows.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from riverpy._log_events import MAINTENANCE_RUN_CUT_SHORT, ROW_RECOVERED, ROW_SET_ASIDE
from riverpy._postgres.batch_sender import AdaptiveBatchSize, BatchSender, BatchStatement
from riverpy._postgres.driver import describe_error
from riverpy._postgres.skipped_rows import SkippedRows, make_skipped_row_reports

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable
    from contextlib import AbstractAsyncContextManager

    from riverpy._maintenance.base import MaintenanceService
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection

BATCH_ROWS_MAX = 10_000
"""The largest number of rows in one statement."""
BATCH_PAUSE_MIN = 0.05
BATCH_PAUSE_MAX = 5.0
"""The longest pause between two batches, in seconds. `BATCH_PAUSE_MIN` is the shortest. During a
pause, the database has time for the workers. A pause is never longer than the time that the last
batch took."""
SKIPPED_ROWS_MAX = 1_000
"""The maximum number of skipped rows. If there are more, the oldest one is forgotten, and a later
run reads that row again."""
ROW_RETRY_DELAY_MIN = 5.0
ROW_RETRY_DELAY_MAX = 300.0
"""The longest delay before a skipped row is retried, in seconds. The first delay is
`ROW_RETRY_DELAY_MIN`; the delay doubles with each failure."""
RUN_INTERVAL_MIN = 1.0
"""The shortest time between two runs, in seconds."""
PAGE_ROWS_MIN = 100
"""Each read asks for at least this number of rows, even if the next batch takes fewer."""
CONSECUTIVE_FAILURES_MAX = 1_000
"""After this number of consecutive failed statements, a run ends. The next run handles the
remaining rows."""

Row = TypeVar("Row")


class MaintenanceBatchRunner(Generic[Row]):
    """Sends the rows of one maintenance service in batches, during one term. The function
    `send_rows` of the service executes the statement for each batch."""

    def __init__(
        self,
        service: MaintenanceService,
        purpose: str,
        send_rows: Callable[[list[Row]], Awaitable[None]],
        *,
        row_key: Callable[[Row], Hashable],
        row_name: Callable[[Row], int | str] | None = None,
        connection: DedicatedConnection | None = None,
        rows_max: int | None = None,
    ) -> None:
        """Create the batch runner of one service.

        Args:
            service: the maintenance service that owns the runner.
            purpose: the purpose of the statement, for logs and error texts.
            send_rows: a function that handles one batch of rows. If it changes rows, it does so in
                a transaction of `open_transaction`. If it raises an error, no row was handled.
            row_key: a function that returns the key of a row.
            row_name: a function that returns the name of a row for the log. None: the key is the
                name.
            connection: the connection for the transactions. None: the connection for short
                statements.
            rows_max: the largest number of rows in one statement. None: `BATCH_ROWS_MAX`.
        """
        self._context, self._log = service.context, service.log
        self._purpose, self._row_name = purpose, row_name or row_key
        self._connection = connection or self._context.connection
        self._send_rows = send_rows
        self.skipped_rows: SkippedRows[Row] = SkippedRows(
            SKIPPED_ROWS_MAX,
            retry_delay_min=ROW_RETRY_DELAY_MIN,
            retry_delay_max=ROW_RETRY_DELAY_MAX,
        )
        self._batch_sender = BatchSender(
            BatchStatement(self._send_and_count_failures, get_row_id=row_key),
            batch_size=AdaptiveBatchSize(
                rows_max or BATCH_ROWS_MAX, self._context.fence.transaction_timeout.total_seconds()
            ),
            skipped_rows=self.skipped_rows,
            on_row_skipped=self._log_skipped_row,
            on_row_recovered=self._log_recovered_row,
            failures_before_pause=CONSECUTIVE_FAILURES_MAX,
        )
        self._queue_scope: object = None
        self._consecutive_failures = 0
        """The number of consecutive failed statements."""
        self._limited_log = self._log.with_rate_limit()
        service.skipped_row_reporters.append(
            lambda: make_skipped_row_reports(purpose, self.skipped_rows.rows, self._row_name)
        )

    def seconds_until_next_run(self, interval: float) -> float:
        """Return the seconds until the next run: `interval`, or less if a skipped row must be
        retried earlier."""
        return min(
            interval, max(self.skipped_rows.next_retry_at - time.monotonic(), RUN_INTERVAL_MIN)
        )

    @property
    def next_batch_rows_max(self) -> int:
        """The largest number of rows of the next statement."""
        return self._batch_sender.batch_size.row_count

    def set_queue_scope(self, queue_scope: object) -> None:
        """Set the queues to maintain. If they have changed, forget the skipped rows, because
        another leader may maintain their queues now."""
        if queue_scope != self._queue_scope:
            self._queue_scope = queue_scope
            for entry in self.skipped_rows.rows:
                self._batch_sender.forget_skipped_row(entry.row)

    async def send_in_batches(self, rows: Iterable[Row]) -> bool:
        """Send these rows, and the skipped rows whose retry is due. If one of `rows` is in the list
        of skipped rows, this row is sent only if its retry is due. Return False if the run should
        end, because too many consecutive statements have failed.

        Raises:
            FencedOutError: the term has ended.
            Exception: one of DATABASE_ERRORS, if no row has caused the error.
        """
        # Discard unsent rows of an earlier run that failed. This run reads these rows again.
        self._batch_sender.discard_unsent_rows()
        for row in rows:
            self._batch_sender.add_row(row)
        while self._batch_sender.can_send_now:
            began = self._context.timer.seconds_since_boot()
            await self._batch_sender.send_batch()
            if self._consecutive_failures >= CONSECUTIVE_FAILURES_MAX:
                self._consecutive_failures = 0
                self._batch_sender.discard_unsent_rows()
                self._log.warning(
                    MAINTENANCE_RUN_CUT_SHORT,
                    effect="the remaining rows wait for the next pass",
                    purpose=self._purpose,
                )
                return False
            await self.pause_after_statement_that_took(
                self._context.timer.seconds_since_boot() - began
            )
        return True

    async def read_and_send_pages(
        self, read_page: Callable[[Row | None, int], Awaitable[list[Row]]]
    ) -> bool:
        """Read rows page by page, and send each page in batches. `read_page` receives the last row
        of the previous page (None at the start) and the page size. Return False if the run should
        end; see `send_in_batches`."""
        after: Row | None = None
        while True:
            limit = max(self.next_batch_rows_max, PAGE_ROWS_MIN)
            page = await read_page(after, limit)
            if not await self.send_in_batches(page):
                return False
            if len(page) < limit:
                return True
            after = page[-1]

    async def pause_after_statement_that_took(self, seconds: float) -> None:
        """Wait after a statement that took this many seconds, so that the database has time for the
        workers."""
        first, last = min(seconds, BATCH_PAUSE_MIN), min(seconds, BATCH_PAUSE_MAX)
        await self._context.timer.sleep(random.uniform(first, last))  # noqa: S311 (no secret)

    def open_transaction(self) -> AbstractAsyncContextManager[Connection]:
        """Return a context manager for a transaction that fails if the term has ended; see
        `TermFence.transaction`."""
        return self._context.fence.transaction(self._connection, self._purpose)

    async def _send_and_count_failures(self, rows: list[Row]) -> None:
        self._consecutive_failures += 1
        await self._send_rows(rows)
        self._consecutive_failures = 0

    def _log_skipped_row(self, row: Row, error: Exception) -> None:
        self._limited_log.warning(
            ROW_SET_ASIDE,
            purpose=self._purpose,
            row=self._row_name(row),
            error=describe_error(error),
        )
        if len(self.skipped_rows) > SKIPPED_ROWS_MAX:
            self._batch_sender.forget_skipped_row(self.skipped_rows.rows[0].row)

    def _log_recovered_row(self, row: Row) -> None:
        self._log.info(ROW_RECOVERED, purpose=self._purpose, row=self._row_name(row))
