"""What the rounds of a run found: a figure for each measure, competitor and round."""

from __future__ import annotations

import statistics
from collections import defaultdict


class Samples:
    """Figures by measure and competitor, one for each round."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[float | None]]] = defaultdict(dict)
        self.reasons: dict[str, str] = {}
        """Why something was not measured, by measure or competitor."""

    def add(self, measure: str, name: str, number: int, value: float | None) -> None:
        """The figure of a round; the first round is 0."""
        rounds = self._found[measure].setdefault(name, [])
        rounds.extend([None] * (number + 1 - len(rounds)))
        rounds[number] = value

    @property
    def measures(self) -> list[str]:
        """Those that have figures, in the order in which they came."""
        return list(self._found)

    def values(self, measure: str, name: str) -> list[float]:
        """The figures that there are."""
        return [one for one in self._found.get(measure, {}).get(name, []) if one is not None]

    def median(self, measure: str, name: str) -> float | None:
        """Over the rounds; None without any."""
        values = self.values(measure, name)
        return statistics.median(values) if values else None

    def spread(self, measure: str, name: str) -> list[float] | None:
        """Least and most; None without any."""
        values = self.values(measure, name)
        return [rounded(min(values)), rounded(max(values))] if values else None

    def ratio(self, measure: str, other: str, of: str = "riverpy") -> float | None:
        """Median of the ratios of single rounds: what slows the machine down slows both."""
        pairs = zip(
            self._found.get(measure, {}).get(of, []),
            self._found.get(measure, {}).get(other, []),
            strict=False,
        )
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return statistics.median(ratios) if ratios else None


def rounded(value: float) -> float:
    """As many digits as mean something."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.3g}")
