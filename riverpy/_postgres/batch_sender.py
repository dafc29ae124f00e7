"""BatchSender: runs a statement over many rows, and finds the rows that make the statement fail.

A statement fails for all its rows if the server refuses one row, or if it takes too long. Then its
rows are sent again in smaller parts, down to single rows. A row that fails alone is set aside:
after a delay it is sent again, alone. Or it is not sent again, but only reported to the sender's
owner.
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
    is_refusal,
    is_statement_timeout,
)
from riverpy._postgres.set_aside import SetAsideRows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable

GROWTH_TIME_SHARE_MAX = 1 / 4
"""If a full batch takes less than this fraction of the time limit, the size of the next batch is
doubled."""
SINGLE_ROWS_MAX = 100
"""A failed batch of at most this many rows is sent again row by row."""
SHRINK_TO_ONE_ROWS_MAX = 10
"""After a failed statement over at most this many rows, the next statement has one row. This
applies to statements that select their rows themselves."""
REPEAT_WINDOW = 60.0
"""Two errors of the same kind within this number of seconds count as a repeated error."""
FAILURES_MAX = 8
"""How many batches may fail one after the other before the sender pauses. After so many failures,
probably all rows are affected, for example by a locked table or a full disk."""
PAUSE_MIN, PAUSE_MAX = timedelta(milliseconds=20), timedelta(seconds=2)
RECOVERY_FAILURES = 3
"""If at least this many batches failed before a successful one, all rows that are set aside become
due."""

Row = TypeVar("Row")


class Cause(Enum):
    """Whether an error of a statement is caused by the statement's rows."""

    ROWS = "rows"
    """The server refused the statement, so a row is the cause."""
    TIME = "time"
    """The statement took too long: there are too many rows, or one row is too slow."""
    UNKNOWN = "unknown"
    """The statement was sent. A row may be the cause if an error of this kind is repeated."""
    NOT_SENT = "not sent"
    """No statement was sent, so no row is the cause."""


def cause_of(error: Exception) -> Cause:
    """Return the probable cause of a statement's error."""
    if isinstance(error, StatementTimeoutError) or is_statement_timeout(error):
        return Cause.TIME
    if is_refusal(error) or isinstance(error, LockNotAvailableError):
        return Cause.ROWS
    return Cause.NOT_SENT if isinstance(error, TimeoutError) else Cause.UNKNOWN


class StatementErrors:
    """The recent errors of one kind of statement, to find repeated errors.

    Most errors are not repeated, for example a deadlock or a lost connection. A repeated error may
    be caused by a row, for example by a damaged value or a trigger that fails.
    """

    def __init__(self) -> None:
        self._last_at: dict[str, float] = {}
        """The time of the last error of each kind, in monotonic seconds."""

    def may_be_row_error(self, error: Exception, *, is_retry: bool = False) -> bool:
        """Record the error, and return whether a row may be the cause. `is_retry`: the statement
        had only one row, which has failed alone before."""
        if not isinstance(error, DATABASE_ERRORS):
            return False
        cause = cause_of(error)
        if cause is not Cause.UNKNOWN:
            return cause is not Cause.NOT_SENT
        kind, now = _error_kind(error), time.monotonic()
        is_repeated = now - self._last_at.get(kind, -math.inf) < REPEAT_WINDOW
        self._last_at[kind] = now
        return is_repeated or (is_retry and not is_connection_loss(error))


def _error_kind(error: Exception) -> str:
    """Return the kind of an error. Two errors of one kind count as a repeated error."""
    if is_connection_loss(error):
        return "connection"
    sqlstate = getattr(error, "sqlstate", None) if isinstance(error, PostgresError) else None
    return sqlstate or type(error).__name__


class BatchSize:
    """How many rows the next statement has. It grows if statements are quick, and shrinks if one
    fails."""

    def __init__(self, maximum: int, limit: float) -> None:
        """Start with `maximum` rows. `limit` is the time limit of a statement in seconds."""
        self.maximum = self.rows = maximum
        self._limit = limit
        self._suspect_rows = 0
        """After `shrink_selection`: the failing row is one of the next rows, up to this number."""

    def shrink(self, rows: int) -> None:
        """Halve the size after a statement over `rows` rows failed."""
        self.rows = max(rows // 2, 1)

    def shrink_selection(self, rows: int) -> None:
        """Shrink the size after a failed statement that selected the first `rows` rows itself. The
        next statement selects the same first rows again. So the size grows again only when all
        these rows are done."""
        self._suspect_rows = rows
        self.rows = math.isqrt(rows) if rows > SHRINK_TO_ONE_ROWS_MAX else 1

    def grow(self, rows: int, seconds: float) -> None:
        """Double the size after a statement succeeded, if the batch was full and quick."""
        self._suspect_rows -= rows
        if self._suspect_rows > 0:
            return
        if self.rows <= rows and seconds < self._limit * GROWTH_TIME_SHARE_MAX:
            self.rows = min(self.rows * 2, self.maximum)

    def allow_growth(self) -> None:
        """Let the size grow again, because the failing row was found or no longer exists."""
        self._suspect_rows = 0


@dataclass(frozen=True)
class BatchStatement(Generic[Row]):
    """A statement for `BatchSender`, with functions about its rows."""

    send: Callable[[list[Row]], Awaitable[None]]
    """Sends the statement. If it raises an error, it has changed no row."""
    row_id: Callable[[Row], Hashable]
    """Returns the id of a row. One statement never has two rows with the same id."""
    key: Callable[[Row], Hashable] | None = None
    """Returns the key under which a row is set aside (kept for a retry). None: the id of the row is
    the key."""
    count_fitting: Callable[[list[Row]], int] = len
    """Returns how many of the given rows fit into one statement."""
    is_row_error: Callable[[Exception], bool] | None = None
    """Returns whether a row may be the cause of an error. None: `StatementErrors` decides."""


def _do_nothing(*_args: object) -> None:
    pass


class BatchSender(Generic[Row]):
    """Sends rows, one statement after the other, until each row is sent, or set aside for a retry.

    New rows, parts of failed batches, and rows that are set aside take turns.
    """

    def __init__(
        self,
        statement: BatchStatement[Row],
        *,
        size: BatchSize,
        set_aside_rows: SetAsideRows[Row] | None,
        on_set_aside: Callable[[Row, Exception], None] = _do_nothing,
        on_recovered: Callable[[Row], None] = _do_nothing,
        on_too_slow: Callable[[int, Exception], None] = _do_nothing,
        failures_max: int = FAILURES_MAX,
    ) -> None:
        """Start without rows.

        Args:
            statement: the statement to send.
            size: the size of batches.
            set_aside_rows: keeps rows that fail alone. None: such a row is not sent again.
            on_set_aside: called once for each row that fails alone: at the first failure if the
                server refused the row, or if `set_aside_rows` is None. Otherwise it is called at
                the second failure.
            on_recovered: called when a row that was passed to `on_set_aside` is sent successfully.
            on_too_slow: called with the new size and the error when a batch took too long.
            failures_max: how many batches may fail one after the other before the sender pauses.
        """
        self._statement = statement
        self._row_id, self._key = statement.row_id, statement.key or statement.row_id
        self.size = size
        self.set_aside_rows: SetAsideRows[Row] = (
            SetAsideRows() if set_aside_rows is None else set_aside_rows
        )
        self._should_keep_failed_rows = set_aside_rows is not None
        self._on_set_aside, self._on_recovered, self._on_too_slow = (
            on_set_aside,
            on_recovered,
            on_too_slow,
        )
        self._failures_max = failures_max
        self._backoff = Backoff(PAUSE_MIN, PAUSE_MAX)
        self._errors = StatementErrors()
        self._reported: set[Hashable] = set()
        """The keys of the rows that were passed to `on_set_aside`."""
        self._new: list[Row] = []
        self._parts: deque[list[Row]] = deque()
        self._sending: list[Row] = []
        self._failures = 0
        """How many batches have failed since the last success. Retries of single rows do not
        count."""
        self._pause_until = 0.0
        """The end of the pause, in monotonic seconds. A pause stops new rows and failed parts, but
        not retries of single rows."""
        self._last_batch_was_new = False
        """Whether the last batch had new rows."""

    @property
    def rows(self) -> list[Row]:
        """All rows that were not sent successfully yet."""
        parts = [row for part in self._parts for row in part]
        return [
            *self._sending,
            *parts,
            *self._new,
            *(entry.row for entry in self.set_aside_rows.entries),
        ]

    @property
    def next_due(self) -> float:
        """The time at which the next row can be sent, in monotonic seconds. Infinity: no row
        waits."""
        has_rows = self._new or self._parts
        return min(self._pause_until if has_rows else math.inf, self.set_aside_rows.next_due)

    @property
    def is_ready(self) -> bool:
        """Whether a row can be sent now."""
        return self.next_due <= time.monotonic()

    def __len__(self) -> int:
        """Count the waiting rows, without the rows of a running statement."""
        return len(self._new) + sum(map(len, self._parts)) + len(self.set_aside_rows)

    @property
    def is_empty(self) -> bool:
        """Whether no row waits to be sent now."""
        return not (self._new or self._parts or self.is_ready)

    def add(self, row: Row) -> None:
        """Add a row to be sent, unless it is set aside."""
        if not self.set_aside_rows or self._key(row) not in self.set_aside_rows:
            self._new.append(row)

    def add_missing(self, rows: Iterable[Row]) -> None:
        """Add the rows that are not waiting yet, after all waiting rows. Repeated calls with the
        same rows do not change their order."""
        waiting = set(map(self._row_id, self.rows))
        for row in rows:
            if self._row_id(row) not in waiting:
                self._new.append(row)

    def forget(self, row: Row) -> None:
        """Forget a row that is set aside."""
        key = self._key(row)
        self.set_aside_rows.remove(key)
        self._reported.discard(key)

    def discard(self) -> None:
        """Forget the rows that were not sent. Rows that are set aside stay."""
        self._new.clear()
        self._parts.clear()

    async def send_batch(self) -> None:
        """Send one statement, if there is a row for it.

        Raises:
            Exception: an error that no row has caused, for example a lost connection. The next
                calls send the rows again.
        """
        rows = self._sending = self._take_rows()
        if not rows:
            return
        is_retry = (
            len(rows) == 1
            and bool(self.set_aside_rows)
            and self._key(rows[0]) in self.set_aside_rows
        )
        began = time.monotonic()
        try:
            await self._statement.send(rows)
        except BaseException as error:
            self._failures += not is_retry
            if not isinstance(error, Exception) or not self._is_row_error(error, is_retry):
                if not is_retry:
                    self._parts.append(rows)
                raise
            if self._failures > self._failures_max:
                self._pause_until = time.monotonic() + self._backoff.next()
            self._handle_failure(rows, error, time.monotonic() - began)
        else:
            self._handle_success(rows, time.monotonic() - began, is_retry=is_retry)
        finally:
            self._sending = []

    async def send_all(self, within: float = math.inf) -> bool:
        """Send all rows that are due. Return False if `within` seconds were not enough. Raise what
        `send_batch` raises."""
        until = time.monotonic() + within
        while self._new or self._parts or self.is_ready:
            if time.monotonic() >= until:
                return not self._new and not self._parts
            await anyio.sleep(max(self.next_due - time.monotonic(), 0.0))
            await self.send_batch()
        return True

    def _is_row_error(self, error: Exception, is_retry: bool) -> bool:
        if self._statement.is_row_error is not None:
            return self._statement.is_row_error(error)
        return self._errors.may_be_row_error(error, is_retry=is_retry)

    def _take_rows(self) -> list[Row]:
        """Remove and return the rows of the next statement: new rows, a part of a failed batch, or
        one row that is set aside."""
        is_paused = time.monotonic() < self._pause_until
        parts, new = not is_paused and self._parts, not is_paused and self._new
        retry = None if parts else self.set_aside_rows.due()
        if new and not (self._last_batch_was_new and (parts or retry)):
            self._last_batch_was_new = True
            return self._take_new_rows()
        self._last_batch_was_new = False
        if parts:
            return self._take_part()
        return [] if retry is None else [retry.row]

    def _take_new_rows(self) -> list[Row]:
        count = self._statement.count_fitting(self._new[: self.size.rows])
        batch, self._new = self._new[:count], self._new[count:]
        firsts: dict[Hashable, Row] = {}
        for row in batch:
            firsts.setdefault(self._row_id(row), row)
        if len(firsts) < len(batch):
            self._new[:0] = [row for row in batch if firsts[self._row_id(row)] is not row]
        return list(firsts.values())

    def _take_part(self) -> list[Row]:
        part = self._parts.popleft()
        count = self._statement.count_fitting(part[: self.size.rows])
        if count < len(part):
            self._parts.appendleft(part[count:])
        return part[:count]

    def _handle_failure(self, rows: list[Row], error: Exception, seconds: float) -> None:
        if len(rows) > 1:
            self.size.shrink(len(rows))
            self._parts.extend(split_batch(rows))
            if cause_of(error) is Cause.TIME:
                self._on_too_slow(self.size.rows, error)
            return
        row, key = rows[0], self._key(rows[0])
        if not self._should_keep_failed_rows:
            self._on_set_aside(row, error)
            return
        tries = self.set_aside_rows.add(key, row, error, seconds).tries
        if key not in self._reported and (tries > 1 or cause_of(error) is Cause.ROWS):
            self._reported.add(key)
            self._on_set_aside(row, error)

    def _handle_success(self, rows: list[Row], seconds: float, *, is_retry: bool) -> None:
        if is_retry:
            key = self._key(rows[0])
            self.set_aside_rows.remove(key)
            if key in self._reported:
                self._reported.discard(key)
                self._on_recovered(rows[0])
        else:
            self.size.grow(len(rows), seconds)
        if is_retry or self._failures >= RECOVERY_FAILURES:
            self.set_aside_rows.make_all_due()
        if self._failures:
            self._failures, self._pause_until = 0, 0.0
            self._backoff.reset()


def split_batch(rows: list[Row]) -> list[list[Row]]:
    """Split a failed batch of N rows into parts of about sqrt(N) rows, or into single rows if N is
    small. After at most two more failures a failing row is alone in a statement."""
    size = math.isqrt(len(rows)) if len(rows) > SINGLE_ROWS_MAX else 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]
