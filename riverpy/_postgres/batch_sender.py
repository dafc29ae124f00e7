"""BatchSender: sends many rows with few statements, and finds the rows that make statements fail.

A statement fails for all its rows if the server refuses one row, or if it takes too long. Then its
rows are sent again in smaller parts, down to single rows. If a statement with a single row fails,
the row is skipped: it is kept in `skipped_rows`, and sent again alone after a delay. A sender
without `skipped_rows` passes the row to the callback `on_row_skipped`, and does not send it again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from riverpy._clock import Backoff
from riverpy._postgres.connection import StatementTimeoutError
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    PostgresError,
    is_connection_loss,
    is_permanent_statement_error,
    is_server_statement_timeout,
)
from riverpy._postgres.skipped_rows import SkippedRows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable

FAST_BATCH_TIME_FRACTION = 1 / 4
"""If a full batch takes less than this fraction of the statement timeout, the size of the next
batch is doubled."""
ROW_BY_ROW_BATCH_SIZE_MAX = 100
"""A failed batch of at most this many rows is sent again row by row."""
ROW_BY_ROW_SELECTION_SIZE_MAX = 10
"""Some statements, for example a claim of jobs, select up to a limit of rows themselves. If one of
these statements fails, and its limit was at most this number, the next statement selects only one
row."""
REPEATED_ERROR_WINDOW = 60.0
"""Two errors of the same kind within this number of seconds count as a repeated error."""
FAILED_BATCHES_BEFORE_PAUSE = 8
"""How many consecutive batches may fail before the sender pauses. After so many failures, probably
all rows are affected, for example by a locked table or a full disk."""
PAUSE_MIN, PAUSE_MAX = timedelta(milliseconds=20), timedelta(seconds=2)
FAILED_BATCHES_BEFORE_RETRY_OF_SKIPPED_ROWS = 3
"""If at least this many consecutive batches have failed and the next one succeeds, all skipped rows
are retried at once."""

RowT = TypeVar("RowT")


class ErrorCause(Enum):
    """The probable cause of an error of a statement."""

    BAD_ROW = "rows"
    """The server refused the statement, so a row is the cause."""
    TIMEOUT = "time"
    """The statement took too long: there are too many rows, or one row is too slow."""
    UNKNOWN = "unknown"
    """The statement was sent. If this kind of error is repeated, a row may be the cause."""
    NOT_SENT = "not sent"
    """No statement was sent, so no row is the cause."""


def find_error_cause(error: Exception) -> ErrorCause:
    """Return the probable cause of a statement's error."""
    if isinstance(error, StatementTimeoutError) or is_server_statement_timeout(error):
        return ErrorCause.TIMEOUT
    if is_permanent_statement_error(error) or isinstance(error, LockNotAvailableError):
        return ErrorCause.BAD_ROW
    return ErrorCause.NOT_SENT if isinstance(error, TimeoutError) else ErrorCause.UNKNOWN


class RepeatedErrorDetector:
    """Decides whether a row may be the cause of a statement's error. For example, a row may have a
    damaged value, or a trigger may fail for the row.

    If an error does not show its cause, a row may be the cause if the error is repeated. Most
    errors with other causes, for example a deadlock or a lost connection, are not repeated.
    """

    def __init__(self) -> None:
        self._last_error_times: dict[str, float] = {}
        """The time of the last error of each kind, in monotonic seconds."""

    def record_and_check_if_caused_by_row(
        self, error: Exception, *, is_retry: bool = False
    ) -> bool:
        """Record the error of a statement. Return whether a row may be the cause. `is_retry`:
        whether the statement had a single row, which had already failed alone before."""
        if not isinstance(error, DATABASE_ERRORS):
            return False
        cause = find_error_cause(error)
        if cause is not ErrorCause.UNKNOWN:
            return cause is not ErrorCause.NOT_SENT
        kind, now = _get_error_kind(error), time.monotonic()
        is_repeated = now - self._last_error_times.get(kind, -math.inf) < REPEATED_ERROR_WINDOW
        self._last_error_times[kind] = now
        return is_repeated or (is_retry and not is_connection_loss(error))


def _get_error_kind(error: Exception) -> str:
    """Return the kind of an error: `connection` for a lost connection, otherwise the SQLSTATE, or
    the name of the error's type if there is no SQLSTATE."""
    if is_connection_loss(error):
        return "connection"
    sqlstate = getattr(error, "sqlstate", None) if isinstance(error, PostgresError) else None
    return sqlstate or type(error).__name__


class AdaptiveBatchSize:
    """Chooses how many rows the next statement has: more after fast statements, fewer after
    failures."""

    def __init__(self, row_count_max: int, statement_timeout: float) -> None:
        """Start with `row_count_max` rows. `statement_timeout` is in seconds."""
        self.row_count_max = self.row_count = row_count_max
        self._statement_timeout = statement_timeout
        self._suspect_row_count = 0
        """One of this many next rows has probably made a statement fail. While the number is above
        0, the size does not grow. `shrink_after_failed_selection` sets the number."""

    @property
    def is_at_maximum(self) -> bool:
        """Whether the next statement may have the maximum number of rows."""
        return self.row_count >= self.row_count_max

    def set_maximum(self, row_count_max: int) -> None:
        """Change the maximum number of rows. If the size was reduced after a failure, this call
        does not increase it."""
        self.row_count = row_count_max if self.is_at_maximum else min(self.row_count, row_count_max)
        self.row_count_max = row_count_max

    def grow_to_maximum(self) -> None:
        """Let the next statement have the maximum number of rows."""
        self.row_count = self.row_count_max

    def shrink(self, failed_row_count: int) -> None:
        """Reduce the size after a failed statement with `failed_row_count` rows: the next statement
        has half of them."""
        self.row_count = max(failed_row_count // 2, 1)

    def shrink_after_failed_selection(self, failed_row_count: int) -> None:
        """Reduce the size after the failure of a statement that selected up to `failed_row_count`
        rows itself. The next statements select the same rows first, so they may fail too. The size
        grows again only after `failed_row_count` rows were sent, or after `allow_growth`."""
        self._suspect_row_count = failed_row_count
        self.row_count = (
            math.isqrt(failed_row_count) if failed_row_count > ROW_BY_ROW_SELECTION_SIZE_MAX else 1
        )

    def grow_if_fast(self, sent_row_count: int, seconds: float) -> None:
        """Double the size after a successful statement, if the batch was full and fast."""
        self._suspect_row_count -= sent_row_count
        if self._suspect_row_count > 0:
            return
        if (
            self.row_count <= sent_row_count
            and seconds < self._statement_timeout * FAST_BATCH_TIME_FRACTION
        ):
            self.row_count = min(self.row_count * 2, self.row_count_max)

    def allow_growth(self) -> None:
        """Let the size grow again, because the failing row was found or no longer exists."""
        self._suspect_row_count = 0


@dataclass(frozen=True)
class BatchStatement(Generic[RowT]):
    """A statement that a BatchSender sends, with functions that describe its rows."""

    send: Callable[[list[RowT]], Awaitable[None]]
    """Sends the statement. If the function raises an error, the statement has changed no row."""
    get_row_id: Callable[[RowT], Hashable]
    """Returns the id of a row. One statement never has two rows with the same id."""
    get_skipped_row_key: Callable[[RowT], Hashable] | None = None
    """Returns the key under which `skipped_rows` keeps a failed row for a retry. If this attribute
    is None, the key is the row's id."""
    count_rows_that_fit: Callable[[list[RowT]], int] = len
    """Returns how many of these rows, from the first one on, fit into one statement."""
    is_row_error: Callable[[Exception], bool] | None = None
    """Returns whether a row may be the cause of an error. If this attribute is None, the sender
    uses its RepeatedErrorDetector."""
    row_by_row_batch_size_max: int = ROW_BY_ROW_BATCH_SIZE_MAX
    """A failed batch of at most this many rows is sent again row by row."""


def _do_nothing(*_args: object) -> None:
    pass


class BatchSender(Generic[RowT]):
    """Sends rows to the database, one statement after the other. A row that fails in a statement of
    its own is kept for a retry.

    New rows, parts of failed batches, and rows that are kept for a retry take turns.
    """

    def __init__(
        self,
        statement: BatchStatement[RowT],
        *,
        batch_size: AdaptiveBatchSize,
        skipped_rows: SkippedRows[RowT] | None,
        on_row_skipped: Callable[[RowT, Exception], None] = _do_nothing,
        on_row_recovered: Callable[[RowT], None] = _do_nothing,
        on_batch_too_slow: Callable[[int, Exception], None] = _do_nothing,
        failures_before_pause: int = FAILED_BATCHES_BEFORE_PAUSE,
    ) -> None:
        """Create a sender without rows.

        Args:
            statement: the statement to send.
            batch_size: the size of batches.
            skipped_rows: keeps each row that fails in a statement of its own, until a retry
                succeeds. None: a row that fails in a statement of its own is not sent again.
            on_row_skipped: called once for each row that fails in a statement of its own: at the
                first failure if the server refuses the row, otherwise at the second failure (for
                example if the row is too slow). If `skipped_rows` is None, it is always called at
                the first failure.
            on_row_recovered: called when a row that was passed to `on_row_skipped` is sent
                successfully.
            on_batch_too_slow: called with the new batch size and the error when a batch took too
                long.
            failures_before_pause: how many consecutive batches may fail before the sender pauses.
        """
        self._statement = statement
        self._get_row_id, self._get_skipped_row_key = (
            statement.get_row_id,
            statement.get_skipped_row_key or statement.get_row_id,
        )
        self.batch_size = batch_size
        self.skipped_rows: SkippedRows[RowT] = (
            SkippedRows() if skipped_rows is None else skipped_rows
        )
        self._should_keep_failed_rows = skipped_rows is not None
        self._on_row_skipped, self._on_row_recovered, self._on_batch_too_slow = (
            on_row_skipped,
            on_row_recovered,
            on_batch_too_slow,
        )
        self._failures_before_pause = failures_before_pause
        self._backoff = Backoff(PAUSE_MIN, PAUSE_MAX)
        self._error_detector = RepeatedErrorDetector()
        self._reported_row_keys: set[Hashable] = set()
        """The keys of the rows that were passed to `on_row_skipped`."""
        self._new_rows: list[RowT] = []
        self._failed_batch_parts: deque[list[RowT]] = deque()
        self._rows_being_sent: list[RowT] = []
        self._failure_count = 0
        """How many batches have failed since the last success. Failed retries of single rows are
        not counted."""
        self._paused_until = 0.0
        """The end of the pause, in monotonic seconds. A pause stops new rows and failed parts, but
        not retries of single rows."""
        self._last_batch_had_new_rows = False
        """Whether the last statement sent new rows. If so, the next statement sends other rows, if
        there are any."""

    @property
    def unsent_rows(self) -> list[RowT]:
        """All rows that were not sent successfully yet."""
        parts = [row for part in self._failed_batch_parts for row in part]
        return [
            *self._rows_being_sent,
            *parts,
            *self._new_rows,
            *(entry.row for entry in self.skipped_rows.rows),
        ]

    @property
    def next_send_at(self) -> float:
        """The monotonic time at which the next row can be sent. Infinity: no row waits."""
        has_rows = self._new_rows or self._failed_batch_parts
        return min(self._paused_until if has_rows else math.inf, self.skipped_rows.next_retry_at)

    @property
    def can_send_now(self) -> bool:
        """Whether a row can be sent now."""
        return self.next_send_at <= time.monotonic()

    def __len__(self) -> int:
        """Count the waiting rows, without the rows of a running statement."""
        return (
            len(self._new_rows) + sum(map(len, self._failed_batch_parts)) + len(self.skipped_rows)
        )

    @property
    def has_due_rows(self) -> bool:
        """Whether there is a new row, a part of a failed batch, or a skipped row whose retry is
        due. A pause of the sender changes nothing."""
        return bool(self._new_rows or self._failed_batch_parts or self.can_send_now)

    def add_row(self, row: RowT) -> None:
        """Add a row to be sent. Do nothing if the row is already kept for a retry."""
        if not self.skipped_rows or self._get_skipped_row_key(row) not in self.skipped_rows:
            self._new_rows.append(row)

    def add_missing_rows(self, rows: Iterable[RowT]) -> None:
        """Add the rows that are not in the sender yet, after all rows that are in it. A row that is
        in the sender already keeps its place."""
        waiting = set(map(self._get_row_id, self.unsent_rows))
        for row in rows:
            if self._get_row_id(row) not in waiting:
                self._new_rows.append(row)

    def forget_skipped_row(self, row: RowT) -> None:
        """Remove a row that is kept for a retry. It is not sent again."""
        key = self._get_skipped_row_key(row)
        self.skipped_rows.remove_row(key)
        self._reported_row_keys.discard(key)

    def discard_unsent_rows(self) -> None:
        """Remove the rows that wait to be sent, except rows that are kept for a retry."""
        self._new_rows.clear()
        self._failed_batch_parts.clear()

    async def send_batch(self) -> None:
        """Send one statement, if there is a row for it.

        Raises:
            Exception: an error that no row has caused, for example a lost connection. The next
                calls send the rows again.
        """
        rows = self._rows_being_sent = self._take_next_rows()
        if not rows:
            return
        is_retry = (
            len(rows) == 1
            and bool(self.skipped_rows)
            and self._get_skipped_row_key(rows[0]) in self.skipped_rows
        )
        began = time.monotonic()
        try:
            await self._statement.send(rows)
        except BaseException as error:
            self._failure_count += not is_retry
            if not isinstance(error, Exception) or not self._is_row_error(error, is_retry):
                if not is_retry:
                    self._failed_batch_parts.append(rows)
                raise
            if self._failure_count > self._failures_before_pause:
                self._paused_until = time.monotonic() + self._backoff.next_delay()
            self._split_or_skip_failed_rows(rows, error, time.monotonic() - began)
        else:
            self._record_success(rows, time.monotonic() - began, is_retry=is_retry)
        finally:
            self._rows_being_sent = []

    async def send_all_due_rows(self, timeout: float = math.inf) -> bool:
        """Send all rows that are due. Return False if `timeout` seconds were not enough. Raise the
        errors of `send_batch`."""
        until = time.monotonic() + timeout
        while self._new_rows or self._failed_batch_parts or self.can_send_now:
            if time.monotonic() >= until:
                return not self._new_rows and not self._failed_batch_parts
            await anyio.sleep(max(self.next_send_at - time.monotonic(), 0.0))
            await self.send_batch()
        return True

    def _is_row_error(self, error: Exception, is_retry: bool) -> bool:
        if self._statement.is_row_error is not None:
            return self._statement.is_row_error(error)
        return self._error_detector.record_and_check_if_caused_by_row(error, is_retry=is_retry)

    def _take_next_rows(self) -> list[RowT]:
        """Return the rows of the next statement: new rows, a part of a failed batch, or one skipped
        row whose retry is due. New rows and parts are removed from their lists. A skipped row stays
        in `skipped_rows`."""
        is_paused = time.monotonic() < self._paused_until
        parts, new = not is_paused and self._failed_batch_parts, not is_paused and self._new_rows
        retry = None if parts else self.skipped_rows.first_due_row()
        if new and not (self._last_batch_had_new_rows and (parts or retry)):
            self._last_batch_had_new_rows = True
            return self._take_new_rows()
        self._last_batch_had_new_rows = False
        if parts:
            return self._take_failed_batch_part()
        return [] if retry is None else [retry.row]

    def _take_new_rows(self) -> list[RowT]:
        count = self._statement.count_rows_that_fit(self._new_rows[: self.batch_size.row_count])
        batch, self._new_rows = self._new_rows[:count], self._new_rows[count:]
        firsts: dict[Hashable, RowT] = {}
        for row in batch:
            firsts.setdefault(self._get_row_id(row), row)
        if len(firsts) < len(batch):
            self._new_rows[:0] = [row for row in batch if firsts[self._get_row_id(row)] is not row]
        return list(firsts.values())

    def _take_failed_batch_part(self) -> list[RowT]:
        part = self._failed_batch_parts.popleft()
        count = self._statement.count_rows_that_fit(part[: self.batch_size.row_count])
        if count < len(part):
            self._failed_batch_parts.appendleft(part[count:])
        return part[:count]

    def _split_or_skip_failed_rows(
        self, rows: list[RowT], error: Exception, seconds: float
    ) -> None:
        """Split a failed batch into smaller parts. Skip a row that failed in its own statement."""
        if len(rows) > 1:
            self.batch_size.shrink(len(rows))
            self._failed_batch_parts.extend(
                split_batch(rows, self._statement.row_by_row_batch_size_max)
            )
            if find_error_cause(error) is ErrorCause.TIMEOUT:
                self._on_batch_too_slow(self.batch_size.row_count, error)
            return
        row, key = rows[0], self._get_skipped_row_key(rows[0])
        if not self._should_keep_failed_rows:
            self._on_row_skipped(row, error)
            return
        tries = self.skipped_rows.add_failure(key, row, error, seconds).failure_count
        if key not in self._reported_row_keys and (
            tries > 1 or find_error_cause(error) is ErrorCause.BAD_ROW
        ):
            self._reported_row_keys.add(key)
            self._on_row_skipped(row, error)

    def _record_success(self, rows: list[RowT], seconds: float, *, is_retry: bool) -> None:
        if is_retry:
            key = self._get_skipped_row_key(rows[0])
            self.skipped_rows.remove_row(key)
            if key in self._reported_row_keys:
                self._reported_row_keys.discard(key)
                self._on_row_recovered(rows[0])
        else:
            self.batch_size.grow_if_fast(len(rows), seconds)
        if is_retry or self._failure_count >= FAILED_BATCHES_BEFORE_RETRY_OF_SKIPPED_ROWS:
            self.skipped_rows.make_all_rows_due()
        if self._failure_count:
            self._failure_count, self._paused_until = 0, 0.0
            self._backoff.reset()


def split_batch(
    rows: list[RowT], row_by_row_batch_size_max: int = ROW_BY_ROW_BATCH_SIZE_MAX
) -> list[list[RowT]]:
    """Split a failed batch of N rows into parts of about sqrt(N) rows. If N is at most
    `row_by_row_batch_size_max`, split the batch into single rows. With the default of 100, two
    splits are enough to send each row of a batch of up to 10,000 rows alone."""
    size = math.isqrt(len(rows)) if len(rows) > row_by_row_batch_size_max else 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]
