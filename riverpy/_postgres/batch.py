"""Batches: how many rows a statement handles, and what happens to the rows that it fails for.

A statement over many rows fails as a whole when one of them is refused, or when all together take
longer than the time limit. So a failed batch is sent again in parts, down to one row. A row that
fails alone is set aside: it is tried again alone, later and later, and delays no other row by more
than its own try.
"""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from riverpy._clock import Backoff
from riverpy._postgres.clients import SetAsideRow
from riverpy._postgres.connection import StatementTimeoutError
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    PostgresError,
    describe,
    is_connection_loss,
    is_refusal,
    is_statement_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable

GROWTH_SHARE = 1 / 4
"""Of the time limit: a full batch that took less makes the next one twice as large."""
SINGLE_ROWS_MAX = 100
"""Rows of a failed batch that are sent again one by one."""
NARROW_ROWS_MAX = 10
"""Rows of a statement that failed, and takes the first that it finds, after which it takes one."""
REPEAT_WINDOW = 60.0
"""Seconds within which the same error counts as repeated."""
FAILURES_MAX = 8
"""Batches that may fail one after the other without a pause. Past that all rows are probably
affected, as by a table that is locked or a disk that is full."""
PAUSE_FIRST, PAUSE_MAX = timedelta(milliseconds=20), timedelta(seconds=2)
RECOVERY_FAILURES = 3
"""Failures one after the other, after which a success makes all rows that are set aside due."""
SET_ASIDE_FIRST = 1.0
SET_ASIDE_MAX = 60.0
"""Seconds until the next try of a row that is set aside: they double with each try."""
LOCKED_MAX = 2.0
"""The same for a row that is locked: that ends soon, mostly."""
RETRY_REST = 4
"""Seconds without such a try for each that one took: rows that are set aside and slow leave four
fifths of the time to others."""

Row = TypeVar("Row")


class Cause(Enum):
    """What an error says about the rows of its statement."""

    ROWS = "rows"
    """The server refused the statement for what it says or does: a row is the cause."""
    TIME = "time"
    """The statement took too long: the rows may be too many, or one of them too slow."""
    UNKNOWN = "unknown"
    """A row may be the cause if the same error comes again, for the statement was sent."""
    NOT_SENT = "not sent"
    """No statement was sent: it says nothing."""


def cause_of(error: Exception) -> Cause:
    """Classify an error of a statement that handles rows."""
    if isinstance(error, StatementTimeoutError) or is_statement_timeout(error):
        return Cause.TIME
    if is_refusal(error) or isinstance(error, LockNotAvailableError):
        return Cause.ROWS
    return Cause.NOT_SENT if isinstance(error, TimeoutError) else Cause.UNKNOWN


class StatementErrors:
    """The errors of one kind of statement, to find those that come again and again.

    Most errors pass, as a deadlock or a lost connection does. One that comes again although the
    statement could be sent, so on a connection that works or was made again, may be the fault of a
    row, as a damaged value or a trigger whose own server is away.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        """When each kind of error came last; monotonic seconds."""

    def may_be_of_rows(self, error: Exception, *, is_retry: bool = False) -> bool:
        """Remember the error. Returns whether a row may be its cause. `is_retry`: it is that of one
        row which failed alone before, maybe long ago."""
        if not isinstance(error, DATABASE_ERRORS):
            return False
        cause = cause_of(error)
        if cause is not Cause.UNKNOWN:
            return cause is not Cause.NOT_SENT
        kind, now = _kind(error), time.monotonic()
        is_repeated = now - self._seen.get(kind, -math.inf) < REPEAT_WINDOW
        self._seen[kind] = now
        return is_repeated or (is_retry and not is_connection_loss(error))


def _kind(error: Exception) -> str:
    """What counts as the same error."""
    if is_connection_loss(error):
        return "connection"
    sqlstate = getattr(error, "sqlstate", None) if isinstance(error, PostgresError) else None
    return sqlstate or type(error).__name__


class BatchSize:
    """How many rows the next statement handles. It remembers what fitted into the time limit."""

    def __init__(self, maximum: int, limit: float) -> None:
        """Make it.

        Args:
            maximum: rows of a statement.
            limit: seconds that a statement may take.
        """
        self.maximum = self.rows = maximum
        self._limit = limit
        self._searched = 0
        """Among how many of the next rows one is that fails its statement."""

    def failed(self, rows: int) -> None:
        """A statement with so many rows failed: the next one has half of them."""
        self.rows = max(rows // 2, 1)

    def narrow(self, rows: int) -> None:
        """A statement failed that takes the first rows that it finds, so many at most: it will find
        the same again. It does not grow before it got past them."""
        self._searched = rows
        self.rows = math.isqrt(rows) if rows > NARROW_ROWS_MAX else 1

    def succeeded(self, rows: int, seconds: float) -> None:
        """A statement with so many rows took so long. A full one that was quick doubles the
        next."""
        self._searched -= rows
        if self._searched > 0:
            return
        if self.rows <= rows and seconds < self._limit * GROWTH_SHARE:
            self.rows = min(self.rows * 2, self.maximum)

    def found(self) -> None:
        """The row that fails is found, or there are no such rows any more."""
        self._searched = 0


class AsideRow(NamedTuple, Generic[Row]):
    """One row that is set aside. Times are monotonic seconds."""

    row: Row
    error: str
    since: float
    tries: int
    """How often it failed alone."""
    due: float
    """When it is tried again."""


def report_rows(
    what: str, rows: Iterable[AsideRow[Row]], name: Callable[[Row], object] = str
) -> list[SetAsideRow]:
    """Those that failed more than once, for people to see: the cause of one failure may have
    passed.

    Args:
        what: is done with the rows.
        rows: that are set aside.
        name: the id of a row.
    """
    return [
        SetAsideRow(what, str(name(aside.row)), aside.error, aside.tries, aside.since)
        for aside in rows
        if aside.tries > 1
    ]


class SetAside(Generic[Row]):
    """Rows that fail alone, by a key of each. Each try that fails doubles the delay until the
    next."""

    def __init__(
        self,
        maximum: int | None = None,
        *,
        first: float | None = None,
        last: float | None = None,
    ) -> None:
        """Make it, empty.

        Args:
            maximum: rows that may be set aside. `is_full` tells the owner to set no more aside:
                these rows, and what comes with them, then wait until one of the others is tried.
                None: the owner limits its rows elsewhere.
            first: seconds until the second try; None: `SET_ASIDE_FIRST`.
            last: seconds between two tries, at most; None: `SET_ASIDE_MAX`.
        """
        self._maximum = math.inf if maximum is None else maximum
        self._first = SET_ASIDE_FIRST if first is None else first
        self._last = SET_ASIDE_MAX if last is None else last
        self._rows: dict[Hashable, AsideRow[Row]] = {}
        self._rest_until = 0.0
        """No row is tried for the third time, or later, before that; monotonic seconds."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    @property
    def is_full(self) -> bool:
        """Whether no more rows are to be set aside."""
        return len(self._rows) >= self._maximum

    @property
    def rows(self) -> list[AsideRow[Row]]:
        """Those that are set aside, the first that was is the first."""
        return list(self._rows.values())

    def failed(self, key: Hashable, row: Row, error: Exception, seconds: float) -> AsideRow[Row]:
        """Set a row aside that failed alone, in a statement that took so many seconds."""
        now = time.monotonic()
        known = self._rows.get(key)
        tries = 1 if known is None else known.tries + 1
        since = now if known is None else known.since
        last = LOCKED_MAX if isinstance(error, LockNotAvailableError) else self._last
        delay = min(self._first * 2.0 ** min(tries - 1, 30), last)
        if known is not None:
            self._rest_until = now + RETRY_REST * seconds
        aside = self._rows[key] = AsideRow(row, describe(error), since, tries, now + delay)
        return aside

    def remove(self, key: Hashable) -> None:
        """Forget a row: it succeeded, or is gone."""
        self._rows.pop(key, None)

    def wake(self) -> None:
        """Make all rows due: what failed them may be over."""
        now = time.monotonic()
        for key, aside in self._rows.items():
            self._rows[key] = aside._replace(due=min(aside.due, now))

    def due(self) -> AsideRow[Row] | None:
        """The row that has been due for longest."""
        first = min(self._rows.values(), key=self._due, default=None)
        return first if first is not None and self._due(first) <= time.monotonic() else None

    @property
    def next_due(self) -> float:
        """When the next row is tried again, in monotonic seconds; infinity if there is none."""
        return min(map(self._due, self._rows.values()), default=math.inf)

    def waiting(self) -> list[Row]:
        """The rows that are not due."""
        now = time.monotonic()
        return [aside.row for aside in self._rows.values() if self._due(aside) > now]

    def _due(self, aside: AsideRow[Row]) -> float:
        return aside.due if aside.tries == 1 else max(aside.due, self._rest_until)


class BatchSender(Generic[Row]):
    """Sends rows by one statement after the other until each is sent or set aside.

    New rows, the parts of batches that failed, and rows that are set aside take turns, so none of
    them holds up the others.
    """

    def __init__(
        self,
        send: Callable[[list[Row]], Awaitable[None]],
        *,
        size: BatchSize,
        aside: SetAside[Row],
        row_id: Callable[[Row], Hashable],
        key: Callable[[Row], Hashable] | None = None,
        fitting: Callable[[list[Row]], int] = len,
        set_aside: Callable[[Row, Exception], None],
        recovered: Callable[[Row], None] = lambda _row: None,
        too_slow: Callable[[int, Exception], None] = lambda _rows, _error: None,
        failures_max: int = FAILURES_MAX,
    ) -> None:
        """Make it.

        Args:
            send: sends one statement. An error means that none of the rows is done.
            size: of the statements.
            aside: where rows wait that fail alone.
            row_id: the id of a row. Two rows with one id never share a statement.
            key: what a row is known by while it is set aside; by default its id.
            fitting: how many of the first of these rows one statement can carry.
            set_aside: called once for each row that is set aside, with the error: for a row that is
                refused at once, for another when it fails alone for the second time.
            recovered: called for each row that `set_aside` was called for, once it is sent.
            too_slow: called with the new size, and the error, when a batch took too long.
            failures_max: batches that may fail one after the other without a pause.
        """
        self._send, self._row_id, self._key = send, row_id, key or row_id
        self.size, self.aside = size, aside
        self._fitting, self._set_aside = fitting, set_aside
        self._recovered, self._too_slow = recovered, too_slow
        self._failures_max = failures_max
        self._backoff = Backoff(PAUSE_FIRST, PAUSE_MAX)
        self._errors = StatementErrors()
        self._named: set[Hashable] = set()
        """The rows that `set_aside` was called for."""
        self._new: list[Row] = []
        self._parts: deque[list[Row]] = deque()
        self._sending: list[Row] = []
        self._failures = 0
        """Batches that failed one after the other, without the tries of rows that are set aside."""
        self._pause_until = 0.0
        """No row is sent before that, except for those that are set aside; monotonic seconds."""
        self._was_new = False
        """Whether the last batch was one of new rows."""

    @property
    def rows(self) -> list[Row]:
        """All rows that are not sent yet."""
        parts = [row for part in self._parts for row in part]
        return [*self._sending, *parts, *self._new, *(one.row for one in self.aside.rows)]

    @property
    def next_due(self) -> float:
        """When a row can be sent, in monotonic seconds; infinity if there is none."""
        waits = self._new or self._parts
        return min(self._pause_until if waits else math.inf, self.aside.next_due)

    @property
    def is_ready(self) -> bool:
        """Whether a row can be sent now."""
        return self.next_due <= time.monotonic()

    def __len__(self) -> int:
        """How many rows wait, without those of a statement that runs."""
        return len(self._new) + sum(map(len, self._parts)) + len(self.aside)

    @property
    def is_empty(self) -> bool:
        """Whether no row waits to be sent now."""
        return not (self._new or self._parts or self.is_ready)

    def add(self, row: Row) -> None:
        """Take a row to be sent. One that is set aside stays so."""
        if not self.aside or self._key(row) not in self.aside:
            self._new.append(row)

    def add_missing(self, rows: Iterable[Row]) -> None:
        """Take the rows that do not wait already, behind those that do. So rows that are sent again
        and again all have their turn, also where there is never time for all."""
        waiting = set(map(self._row_id, self.rows))
        for row in rows:
            if self._row_id(row) not in waiting:
                self._new.append(row)

    def forget(self, row: Row) -> None:
        """Forget a row that is set aside."""
        key = self._key(row)
        self.aside.remove(key)
        self._named.discard(key)

    def discard(self) -> None:
        """Forget the rows that are not sent, but not those that are set aside."""
        self._new.clear()
        self._parts.clear()

    async def step(self) -> None:
        """Send one statement, if there is a row for it.

        Raises:
            Exception: the error of a statement that says nothing about its rows, as when the server
                is away. They stay, and the next steps send them again.
        """
        rows = self._sending = self._take()
        if not rows:
            return
        is_retry = len(rows) == 1 and bool(self.aside) and self._key(rows[0]) in self.aside
        began = time.monotonic()
        try:
            await self._send(rows)
        except BaseException as error:
            self._failures += not is_retry
            if not isinstance(error, Exception) or not self._errors.may_be_of_rows(
                error, is_retry=is_retry
            ):
                if not is_retry:
                    self._parts.append(rows)
                raise
            if self._failures > self._failures_max:
                self._pause_until = time.monotonic() + self._backoff.next()
            self._failed(rows, error, time.monotonic() - began)
        else:
            self._succeeded(rows, time.monotonic() - began, is_retry=is_retry)
        finally:
            self._sending = []

    async def send_all(self, within: float = math.inf) -> bool:
        """Send all rows but those that are set aside and not due. Returns False if there are more
        after `within` seconds.

        Raises:
            Exception: as `step`.
        """
        until = time.monotonic() + within
        while self._new or self._parts or self.is_ready:
            if time.monotonic() >= until:
                return not self._new and not self._parts
            await anyio.sleep(max(self.next_due - time.monotonic(), 0.0))
            await self.step()
        return True

    def _take(self) -> list[Row]:
        """Take the rows of the next statement. One that is set aside goes alone, when no part
        waits."""
        is_paused = time.monotonic() < self._pause_until
        parts, new = not is_paused and self._parts, not is_paused and self._new
        retry = None if parts else self.aside.due()
        if new and not (self._was_new and (parts or retry)):
            self._was_new = True
            return self._take_new()
        self._was_new = False
        if parts:
            return self._take_part()
        return [] if retry is None else [retry.row]

    def _take_new(self) -> list[Row]:
        count = self._fitting(self._new[: self.size.rows])
        batch, self._new = self._new[:count], self._new[count:]
        firsts: dict[Hashable, Row] = {}
        for row in batch:
            firsts.setdefault(self._row_id(row), row)
        if len(firsts) < len(batch):
            self._new[:0] = [row for row in batch if firsts[self._row_id(row)] is not row]
        return list(firsts.values())

    def _take_part(self) -> list[Row]:
        part = self._parts.popleft()
        count = self._fitting(part[: self.size.rows])
        if count < len(part):
            self._parts.appendleft(part[count:])
        return part[:count]

    def _failed(self, rows: list[Row], error: Exception, seconds: float) -> None:
        if len(rows) > 1:
            self.size.failed(len(rows))
            self._parts.extend(split(rows))
            if cause_of(error) is Cause.TIME:
                self._too_slow(self.size.rows, error)
            return
        row, key = rows[0], self._key(rows[0])
        tries = self.aside.failed(key, row, error, seconds).tries
        if key not in self._named and (tries > 1 or cause_of(error) is Cause.ROWS):
            self._named.add(key)
            self._set_aside(row, error)

    def _succeeded(self, rows: list[Row], seconds: float, *, is_retry: bool) -> None:
        if is_retry:
            key = self._key(rows[0])
            self.aside.remove(key)
            if key in self._named:
                self._named.discard(key)
                self._recovered(rows[0])
        else:
            self.size.succeeded(len(rows), seconds)
        if is_retry or self._failures >= RECOVERY_FAILURES:
            self.aside.wake()
        if self._failures:
            self._failures, self._pause_until = 0, 0.0
            self._backoff.reset()


def split(rows: list[Row]) -> list[list[Row]]:
    """Split a batch that failed: many rows into about as many parts as each part has rows, few into
    single ones. So a row that fails each statement is alone after two more failures at most."""
    size = math.isqrt(len(rows)) if len(rows) > SINGLE_ROWS_MAX else 1
    return [rows[start : start + size] for start in range(0, len(rows), size)]
