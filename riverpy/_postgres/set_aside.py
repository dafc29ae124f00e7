"""Rows that are set aside: rows for which a statement fails, even if it has no other row.

Such a row is sent again later, alone, so that it does not make other rows fail. The delay doubles
after each failure.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from riverpy._postgres.driver import LockNotAvailableError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

DELAY_MIN = 1.0
DELAY_MAX = 60.0
"""The default limits of the delay between two tries for a row, in seconds."""
LOCKED_DELAY_MAX = 2.0
"""The longest delay for a locked row, in seconds. Most locks end soon."""
IDLE_FACTOR = 4
"""After a failed retry, retries pause for this multiple of the time that the retry took. With 4,
retries of slow rows take at most a fifth of the time."""

Row = TypeVar("Row")


class SetAsideRow(NamedTuple):
    """A row that is set aside, as reported to the operator."""

    purpose: str
    """The purpose of the statement, for example `result` or `claim`."""
    name: str
    """The id of the job, or the key of another row."""
    error: str
    tries: int
    since: float
    """The time of the first failure for this row alone, in the client's monotonic seconds."""


class SetAsideEntry(NamedTuple, Generic[Row]):
    """One row that is set aside. Times are monotonic seconds."""

    row: Row
    error: str
    since: float
    """The time of the first failure for this row alone."""
    tries: int
    """The number of failures for this row alone."""
    due: float
    """The time of the next try."""


class SetAsideRows(Generic[Row]):
    """Rows that are set aside for a retry, each under a key."""

    def __init__(
        self,
        maximum: int | None = None,
        *,
        delay_min: float | None = None,
        delay_max: float | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """Start without rows.

        Args:
            maximum: at how many rows `is_full` is True. None: no limit.
            delay_min: seconds until the second try. None: `DELAY_MIN`.
            delay_max: the longest delay between two tries in seconds. None: `DELAY_MAX`.
            now: the clock, in seconds. None: monotonic time.
        """
        self._now = now
        self._maximum = math.inf if maximum is None else maximum
        self._delay_min = DELAY_MIN if delay_min is None else delay_min
        self._delay_max = DELAY_MAX if delay_max is None else delay_max
        self._entries: dict[Hashable, SetAsideEntry[Row]] = {}
        self._idle_until = 0.0
        """Before this time, in monotonic seconds, only rows that have failed exactly once are
        retried."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    @property
    def is_full(self) -> bool:
        """Whether no more rows should be set aside."""
        return len(self._entries) >= self._maximum

    @property
    def entries(self) -> list[SetAsideEntry[Row]]:
        """All rows, in the order in which they were set aside."""
        return list(self._entries.values())

    def add(self, key: Hashable, row: Row, error: Exception, seconds: float) -> SetAsideEntry[Row]:
        """Set aside a row whose statement without other rows failed after `seconds`, for the first
        time or again."""
        now = self._current_time()
        known = self._entries.get(key)
        tries = 1 if known is None else known.tries + 1
        since = now if known is None else known.since
        longest = LOCKED_DELAY_MAX if isinstance(error, LockNotAvailableError) else self._delay_max
        delay = min(self._delay_min * 2.0 ** min(tries - 1, 30), longest)
        if known is not None:
            self._idle_until = now + IDLE_FACTOR * seconds
        entry = self._entries[key] = SetAsideEntry(row, describe(error), since, tries, now + delay)
        return entry

    def seconds_left(self, key: Hashable) -> float:
        """Return the seconds until a row is due. 0 if it is due or not set aside."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else max(self._due_at(entry) - self._current_time(), 0.0)

    def remove(self, key: Hashable) -> None:
        """Remove a row, because it was sent or no longer exists."""
        self._entries.pop(key, None)

    def make_all_due(self) -> None:
        """Make all rows due now, because the cause of their failures may be gone."""
        now = self._current_time()
        for key, entry in self._entries.items():
            self._entries[key] = entry._replace(due=min(entry.due, now))

    def due(self) -> SetAsideEntry[Row] | None:
        """Return the row that has been due for longest, if one is due."""
        first = min(self._entries.values(), key=self._due_at, default=None)
        return first if first is not None and self._due_at(first) <= self._current_time() else None

    @property
    def next_due(self) -> float:
        """When the next row is due, in monotonic seconds. Infinity: there is no row."""
        return min(map(self._due_at, self._entries.values()), default=math.inf)

    def _current_time(self) -> float:
        return time.monotonic() if self._now is None else self._now()

    def _due_at(self, entry: SetAsideEntry[Row]) -> float:
        return entry.due if entry.tries == 1 else max(entry.due, self._idle_until)


def report_rows(
    purpose: str, entries: Iterable[SetAsideEntry[Row]], name: Callable[[Row], object] = str
) -> list[SetAsideRow]:
    """Return the rows that failed more than once, for an operator. `purpose` is the purpose of the
    statement, and `name` returns the id of a row."""
    return [
        SetAsideRow(purpose, str(name(entry.row)), entry.error, entry.tries, entry.since)
        for entry in entries
        if entry.tries > 1
    ]
