"""QueueScope: the queues that a leader maintains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from riverpy._postgres.queue_filter import QueueFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILTER_MOST = 100
"""The number of queues in one statement that scans an index once for each of them."""


@dataclass(frozen=True)
class All:
    """Every queue."""

    def __contains__(self, queue: str) -> bool:
        return True

    def without(self, queues: Iterable[str]) -> Scope:
        """All of these queues except some."""
        return Except(frozenset(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter((), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One statement without a filter."""
        return (None,)


@dataclass(frozen=True)
class Only:
    """These queues. An empty set means no queue, never all."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue in self.queues

    def without(self, queues: Iterable[str]) -> Scope:
        """All of these queues except some."""
        return Only(self.queues.difference(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=True)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One statement for every `FILTER_MOST` queues, and none for no queue."""
        names = sorted(self.queues)
        return [
            QueueFilter(tuple(names[first : first + FILTER_MOST]), is_only=True)
            for first in range(0, len(names), FILTER_MOST)
        ]


@dataclass(frozen=True)
class Except:
    """Every queue except these. Without an exception it uses the same statement as `All`."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue not in self.queues

    def without(self, queues: Iterable[str]) -> Scope:
        """All of these queues except some."""
        return Except(self.queues.union(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One statement, because several would overlap."""
        return (self.whole(),) if self.queues else All().filters()


Scope: TypeAlias = All | Only | Except
NOTHING = Only(frozenset())


async def everything() -> Scope:
    """Return the scope of a leader without other domains."""
    return All()
