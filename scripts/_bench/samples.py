"""The figures of a run by measurement, competitor and round."""

from __future__ import annotations

import statistics
from collections import defaultdict


class Samples:
    """Figures by measurement and competitor, one for each round."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[float | None]]] = defaultdict(dict)
        self.reasons: dict[str, str] = {}
        """Reasons why something was not measured, by measurement or competitor."""

    def add(self, measure: str, name: str, number: int, value: float | None) -> None:
        """Store the figure of a round. The first round is 0."""
        rounds = self._found[measure].setdefault(name, [])
        rounds.extend([None] * (number + 1 - len(rounds)))
        rounds[number] = value

    @property
    def measures(self) -> list[str]:
        """Return the measurements that have figures, in the order in which they were added."""
        return list(self._found)

    def values(self, measure: str, name: str) -> list[float]:
        """Return the figures of a competitor without gaps."""
        return [one for one in self._found.get(measure, {}).get(name, []) if one is not None]

    def median(self, measure: str, name: str) -> float | None:
        """Return the median over the rounds; None without figures."""
        values = self.values(measure, name)
        return statistics.median(values) if values else None

    def spread(self, measure: str, name: str) -> list[float] | None:
        """Return the smallest and the largest figure; None without figures."""
        values = self.values(measure, name)
        return [rounded(min(values)), rounded(max(values))] if values else None

    def ratio(self, measure: str, other: str, of: str = "riverpy") -> float | None:
        """Return the median of the ratios per round. A slow machine changes both figures of a ratio
        alike."""
        pairs = zip(
            self._found.get(measure, {}).get(of, []),
            self._found.get(measure, {}).get(other, []),
            strict=False,
        )
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return statistics.median(ratios) if ratios else None


def rounded(value: float) -> float:
    """Round to the digits that are significant."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.3g}")
