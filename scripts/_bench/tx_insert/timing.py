"""Measures transactions in turns, and compares those of one turn: a slow machine slows them
alike."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from scripts._bench.tx_insert.names import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP = 30
"""Transactions of each kind before the measurement. psycopg prepares a statement at its sixth
use."""


class Result(NamedTuple):
    """The result of one program."""

    us: dict[str, float]
    """Microseconds by name: of the transaction without a job, and what each insert adds."""
    reasons: dict[str, str]
    """Why an insert could not be measured, by name."""


class Timings:
    """The seconds of the transactions by name, one for each turn."""

    def __init__(self, names: list[str]) -> None:
        self.reasons: dict[str, str] = {}
        self._seconds: dict[str, list[float]] = {name: [] for name in names}

    def run_turns(self, transactions: int) -> Iterator[str]:
        """Yield the name of each transaction to run. Another name is first in each turn."""
        for number in range(-WARM_UP, transactions):
            names = list(self._seconds)
            first = number % len(names)
            yield from names[first:] + names[:first]
            if number == -1:
                for found in self._seconds.values():
                    found.clear()

    def add(self, name: str, seconds: float) -> None:
        """Store the time of one transaction."""
        self._seconds[name].append(seconds)

    def leave_out(self, name: str, error: BaseException) -> None:
        """Leave out a name from the next turn on, with the reason."""
        self._seconds.pop(name, None)
        text = next(iter(str(error).splitlines()), "")
        self.reasons[name] = f"{type(error).__name__}: {text[:200]}"

    def result(self) -> Result:
        """Return the medians. What an insert adds is the median of its differences to the
        transaction without a job in the same turn."""
        alone = self._seconds[ALONE]
        us = {ALONE: statistics.median(alone) * 1e6}
        for name, found in self._seconds.items():
            if name != ALONE:
                differences = map(float.__sub__, found, alone)
                us[name] = statistics.median(differences) * 1e6
        return Result(us, self.reasons)
