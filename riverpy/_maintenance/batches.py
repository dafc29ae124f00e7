"""Batches: handles rows for a maintenance service. A transaction has as many rows as its time limit
allows, and fails if the leader's term (its time as leader) has ended.

A row that the database refuses, or that takes longer than the limit, is set aside: the row is
retried later, alone, and delays no other row.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from riverpy._log_events import MAINTENANCE_RUN_CUT_SHORT, ROW_RECOVERED, ROW_SET_ASIDE
from riverpy._postgres.batch_sender import BatchSender, BatchSize, BatchStatement
from riverpy._postgres.driver import describe_error
from riverpy._postgres.skipped_rows import SkippedRows, report_skipped_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable
    from contextlib import AbstractAsyncContextManager

    from riverpy._maintenance.base import MaintenanceService
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection

BATCH_SIZE = 10_000
"""The largest number of rows in one statement."""
PAUSE_MIN = 0.05
PAUSE_MAX = 5.0
"""The shortest and the longest pause between two batches, in seconds. The pause gives the database
time for the workers. A pause is never longer than the time that the batch before it took."""
SET_ASIDE_ROWS_MAX = 1_000
"""The largest number of rows that are set aside. At this limit the oldest row is forgotten, and a
later pass reads that row again."""
SET_ASIDE_DELAY_MIN = 5.0
SET_ASIDE_DELAY_MAX = 300.0
"""The shortest and the longest delay before a row that is set aside is retried, in seconds. The
delay doubles with each failure."""
PASS_DELAY_MIN = 1.0
"""The shortest time between two passes, in seconds."""
PAGE_SIZE_MIN = 100
"""The smallest page, in rows. A statement may handle fewer rows than a page has."""
FAILURES_MAX = 1_000
"""The number of consecutive failed statements that ends a pass. The remaining rows wait for the
next pass."""

Row = TypeVar("Row")


class Batches(Generic[Row]):
    """Handles rows with one kind of statement, for one service in one term."""

    def __init__(
        self,
        service: MaintenanceService,
        purpose: str,
        send: Callable[[list[Row]], Awaitable[None]],
        *,
        key: Callable[[Row], Hashable],
        name: Callable[[Row], int | str] | None = None,
        connection: DedicatedConnection | None = None,
        size: int | None = None,
    ) -> None:
        """Create the batches of one service.

        Args:
            service: the maintenance service that owns the batches.
            purpose: the purpose of the statement, for logs and error texts.
            send: handles rows in a `transaction`. An error means that no row was handled.
            key: returns the key of a row.
            name: returns the name of a row for the log. None: the key of the row.
            connection: runs the transactions. None: the connection for short statements.
            size: the largest number of rows in one statement. None: `BATCH_SIZE`.
        """
        self._context, self._log = service.context, service.log
        self._purpose, self._row_name = purpose, name or key
        self._connection = connection or self._context.connection
        self._send_rows = send
        self.set_aside_rows: SkippedRows[Row] = SkippedRows(
            SET_ASIDE_ROWS_MAX,
            retry_delay_min=SET_ASIDE_DELAY_MIN,
            retry_delay_max=SET_ASIDE_DELAY_MAX,
        )
        self._sender = BatchSender(
            BatchStatement(self._count_and_send, row_id=key),
            batch_size=BatchSize(
                size or BATCH_SIZE, self._context.fence.transaction_timeout.total_seconds()
            ),
            skipped_rows=self.set_aside_rows,
            on_row_skipped=self._log_set_aside,
            on_row_recovered=self._log_recovered,
            failures_before_pause=FAILURES_MAX,
        )
        self._scope: object = None
        self._failed_statements = 0
        """The number of consecutive failed statements."""
        self._limited_log = self._log.with_rate_limit()
        service.set_aside_reporters.append(
            lambda: report_skipped_rows(purpose, self.set_aside_rows.rows, self._row_name)
        )

    def delay(self, interval: float) -> float:
        """Return the seconds until the next pass: `interval`, or the shorter time until a row that
        is set aside must be retried."""
        return min(
            interval, max(self.set_aside_rows.next_retry_at - time.monotonic(), PASS_DELAY_MIN)
        )

    @property
    def row_limit(self) -> int:
        """The largest number of rows of the next statement."""
        return self._sender.batch_size.rows

    def begin_pass(self, scope: object) -> None:
        """Begin a pass. If `scope` (the queues to maintain) has changed, forget the rows that are
        set aside, because another leader may maintain them now."""
        if scope != self._scope:
            self._scope = scope
            for entry in self.set_aside_rows.rows:
                self._sender.forget_skipped_row(entry.row)

    async def handle_rows(self, rows: Iterable[Row]) -> bool:
        """Handle rows, except for those that are set aside and not due. Return False if too many
        consecutive statements have failed, and the pass should end.

        Raises:
            FencedOutError: the term has ended.
            Exception: one of DATABASE_ERRORS that no row has caused.
        """
        # A pass that failed may have left rows. This pass reads them again.
        self._sender.discard_unsent_rows()
        for row in rows:
            self._sender.add_row(row)
        while self._sender.can_send_now:
            began = self._context.timer.seconds_since_boot()
            await self._sender.send_batch()
            if self._failed_statements >= FAILURES_MAX:
                self._failed_statements = 0
                self._sender.discard_unsent_rows()
                self._log.warning(
                    MAINTENANCE_RUN_CUT_SHORT,
                    effect="the remaining rows wait for the next pass",
                    purpose=self._purpose,
                )
                return False
            await self.pause(self._context.timer.seconds_since_boot() - began)
        return True

    async def handle_pages(self, read: Callable[[Row | None, int], Awaitable[list[Row]]]) -> bool:
        """Read rows page by page, and handle each page; see `handle_rows`. `read` gets the last row
        of the previous page, and the size of a page."""
        after: Row | None = None
        while True:
            limit = max(self.row_limit, PAGE_SIZE_MIN)
            page = await read(after, limit)
            if not await self.handle_rows(page):
                return False
            if len(page) < limit:
                return True
            after = page[-1]

    async def pause(self, seconds: float) -> None:
        """Wait after a statement that took this many seconds, so that the database has time for the
        workers."""
        first, last = min(seconds, PAUSE_MIN), min(seconds, PAUSE_MAX)
        await self._context.timer.sleep(random.uniform(first, last))  # noqa: S311 (no secret)

    def transaction(self) -> AbstractAsyncContextManager[Connection]:
        """Return a transaction that fails if the term has ended; see `TermFence.transaction`."""
        return self._context.fence.transaction(self._connection, self._purpose)

    async def _count_and_send(self, rows: list[Row]) -> None:
        self._failed_statements += 1
        await self._send_rows(rows)
        self._failed_statements = 0

    def _log_set_aside(self, row: Row, error: Exception) -> None:
        self._limited_log.warning(
            ROW_SET_ASIDE,
            purpose=self._purpose,
            row=self._row_name(row),
            error=describe_error(error),
        )
        if len(self.set_aside_rows) > SET_ASIDE_ROWS_MAX:
            self._sender.forget_skipped_row(self.set_aside_rows.rows[0].row)

    def _log_recovered(self, row: Row) -> None:
        self._log.info(ROW_RECOVERED, purpose=self._purpose, row=self._row_name(row))
