"""SkippedRows: rows that riverpy skips for a while.

A row is skipped when a statement for this row alone has failed. The row is tried again later, again
in a statement of its own, so that it does not make other rows fail. The delay doubles after each
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
"""The default maximum delay between two tries of a row, in seconds. The first delay is
`RETRY_DELAY_MIN`."""
LOCKED_ROW_RETRY_DELAY_MAX = 2.0
"""The maximum delay before the next try of a locked row, in seconds. Most locks end soon."""
RETRY_PAUSE_FACTOR = 4
"""The length of the pause after a failed retry, as a multiple of the duration of the retry. With 4,
retries take at most one fifth of the time (1 of 1 + 4), even if each retry is slow. A row that has
failed only once does not wait for the end of the pause."""

RowT = TypeVar("RowT")


class SkippedRowReport(NamedTuple):
    """A skipped row, in the form in which the client reports it to operators."""

    statement_purpose: str
    """The purpose of the statement, for example `result` or `claim`."""
    row_name: str
    """The id of the job. If the row is not a job: the key of the row."""
    error: str
    failure_count: int
    first_failed_at: float
    """When a statement for this row alone first failed, in seconds of the client's monotonic
    clock."""


class SkippedRow(NamedTuple, Generic[RowT]):
    """A row that is skipped until its next try, because a statement for this row alone failed.
    Times are monotonic seconds."""

    row: RowT
    error: str
    first_failed_at: float
    """When a statement for this row alone first failed."""
    failure_count: int
    """The number of times that a statement for this row alone has failed."""
    next_retry_at: float
    """The time of the next try."""


class SkippedRows(Generic[RowT]):
    """The skipped rows of one kind of statement. A key identifies each row, for example the id of a
    job."""

    def __init__(
        self,
        row_count_max: int | None = None,
        *,
        retry_delay_min: float | None = None,
        retry_delay_max: float | None = None,
        read_clock: Callable[[], float] | None = None,
    ) -> None:
        """Create an empty collection.

        Args:
            row_count_max: the number of rows at which `is_full` becomes True. None: no limit.
            retry_delay_min: the delay after the first failure of a row, in seconds. None:
                `RETRY_DELAY_MIN`.
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
        """Whether the limit `row_count_max` is reached. The caller should then skip no further
        rows."""
        return len(self._rows_by_key) >= self._row_count_max

    @property
    def rows(self) -> list[SkippedRow[RowT]]:
        """All skipped rows, in the order in which they first failed."""
        return list(self._rows_by_key.values())

    def add_failure(
        self, key: Hashable, row: RowT, error: Exception, statement_seconds: float
    ) -> SkippedRow[RowT]:
        """Record that a statement for this row alone has failed after `statement_seconds`. The row
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
        """Remove a row, because a statement for this row succeeded or the row no longer exists."""
        self._rows_by_key.pop(key, None)

    def make_all_rows_due(self) -> None:
        """Let all rows be tried now, because the cause of their failures may be gone."""
        now = self._current_time()
        for key, entry in self._rows_by_key.items():
            self._rows_by_key[key] = entry._replace(next_retry_at=min(entry.next_retry_at, now))

    def first_due_row(self) -> SkippedRow[RowT] | None:
        """Return the row whose next try was due first, or None if no try is due now."""
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
    """Return a report for each row that has failed more than once. All reports have the same
    `statement_purpose`. `row_name` returns the id or key of a row."""
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
