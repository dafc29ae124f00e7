"""SkippedRows: rows that riverpy skips for a while.

A row is skipped when a statement with only this row has failed. It is tried again later, in a
statement of its own, so that it does not make other rows fail. The delay doubles after each
failure.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from riverpy._postgres.driver import LockNotAvailableError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

RETRY_DELAY_MIN = 1.0
RETRY_DELAY_MAX = 60.0
"""The default of the longest delay between two tries, in seconds. The first delay is
`RETRY_DELAY_MIN`."""
LOCKED_ROW_RETRY_DELAY_MAX = 2.0
"""The longest delay for a locked row, in seconds. Most locks end soon."""
RETRY_PAUSE_FACTOR = 4
"""After a failed retry, retries pause for this multiple of the time that the retry took. With 4,
retries of slow rows take at most a fifth of the time."""

RowT = TypeVar("RowT")


class SkippedRowReport(NamedTuple):
    """A skipped row, in the form in which the client reports it to operators."""

    statement_purpose: str
    """The purpose of the statement, for example `result` or `claim`."""
    row_name: str
    """The id of the job, or the key of another row."""
    error: str
    failure_count: int
    first_failed_at: float
    """When a statement with only this row first failed, in the client's monotonic seconds."""


class SkippedRow(NamedTuple, Generic[RowT]):
    """One skipped row. Times are monotonic seconds."""

    row: RowT
    error: str
    first_failed_at: float
    """When a statement with only this row first failed."""
    failure_count: int
    """How often a statement with only this row has failed."""
    next_retry_at: float
    """The time of the next try."""


class SkippedRows(Generic[RowT]):
    """The skipped rows of one kind of statement, each under a key."""

    def __init__(
        self,
        row_count_max: int | None = None,
        *,
        retry_delay_min: float | None = None,
        retry_delay_max: float | None = None,
        read_clock: Callable[[], float] | None = None,
    ) -> None:
        """Create the object without rows.

        Args:
            row_count_max: `is_full` is True from this number of rows. None: no limit.
            retry_delay_min: seconds until the second try. None: `RETRY_DELAY_MIN`.
            retry_delay_max: the longest delay in seconds. None: `RETRY_DELAY_MAX`.
            read_clock: returns the time, in seconds. None: monotonic time.
        """
        self._read_clock = read_clock
        self._row_count_max = math.inf if row_count_max is None else row_count_max
        self._retry_delay_min = RETRY_DELAY_MIN if retry_delay_min is None else retry_delay_min
        self._retry_delay_max = RETRY_DELAY_MAX if retry_delay_max is None else retry_delay_max
        self._rows_by_key: dict[Hashable, SkippedRow[RowT]] = {}
        self._retries_paused_until = 0.0
        """Before this time, in monotonic seconds, only rows that have failed exactly once are
        retried."""

    def __len__(self) -> int:
        return len(self._rows_by_key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows_by_key

    @property
    def is_full(self) -> bool:
        """Whether no more rows should be skipped."""
        return len(self._rows_by_key) >= self._row_count_max

    @property
    def rows(self) -> list[SkippedRow[RowT]]:
        """All skipped rows, in the order in which they first failed."""
        return list(self._rows_by_key.values())

    def add_failure(
        self, key: Hashable, row: RowT, error: Exception, statement_seconds: float
    ) -> SkippedRow[RowT]:
        """Record that a statement with only this row has failed after `statement_seconds`. The row
        is skipped until its next try. Call this for the first failure and for each later one."""
        now = self._current_time()
        known = self._rows_by_key.get(key)
        tries = 1 if known is None else known.failure_count + 1
        since = now if known is None else known.first_failed_at
        longest = (
            LOCKED_ROW_RETRY_DELAY_MAX
            if isinstance(error, LockNotAvailableError)
            else self._retry_delay_max
        )
        delay = min(self._retry_delay_min * 2.0 ** min(tries - 1, 30), longest)
        if known is not None:
            self._retries_paused_until = now + RETRY_PAUSE_FACTOR * statement_seconds
        entry = self._rows_by_key[key] = SkippedRow(
            row, describe_error(error), since, tries, now + delay
        )
        return entry

    def seconds_until_retry(self, key: Hashable) -> float:
        """Return the seconds until the next try of a row. Return 0 if the row may be tried now, or
        is not skipped."""
        entry = self._rows_by_key.get(key)
        return (
            0.0 if entry is None else max(self._get_retry_time(entry) - self._current_time(), 0.0)
        )

    def remove_row(self, key: Hashable) -> None:
        """Remove a row, because a statement with it succeeded or the row no longer exists."""
        self._rows_by_key.pop(key, None)

    def make_all_rows_due(self) -> None:
        """Let all rows be tried now, because the cause of their failures may be gone."""
        now = self._current_time()
        for key, entry in self._rows_by_key.items():
            self._rows_by_key[key] = entry._replace(next_retry_at=min(entry.next_retry_at, now))

    def first_due_row(self) -> SkippedRow[RowT] | None:
        """Return the row whose next try has been due for longest, or None if no try is due."""
        first = min(self._rows_by_key.values(), key=self._get_retry_time, default=None)
        is_due = first is not None and self._get_retry_time(first) <= self._current_time()
        return first if is_due else None

    @property
    def next_retry_at(self) -> float:
        """When the next try of a row is due, in monotonic seconds. Infinity: there is no row."""
        return min(map(self._get_retry_time, self._rows_by_key.values()), default=math.inf)

    def _current_time(self) -> float:
        return time.monotonic() if self._read_clock is None else self._read_clock()

    def _get_retry_time(self, row: SkippedRow[RowT]) -> float:
        paused_until = 0.0 if row.failure_count == 1 else self._retries_paused_until
        return max(row.next_retry_at, paused_until)


def make_skipped_row_reports(
    statement_purpose: str,
    rows: Iterable[SkippedRow[RowT]],
    row_name: Callable[[RowT], object] = str,
) -> list[SkippedRowReport]:
    """Return reports on the rows that failed more than once, for operators. `statement_purpose` is
    the purpose of the statement. `row_name` returns the id of a row."""
    return [
        SkippedRowReport(
            statement_purpose,
            str(row_name(entry.row)),
            entry.error,
            entry.failure_count,
            entry.first_failed_at,
        )
        for entry in rows
        if entry.failure_count > 1
    ]
