"""QueueScope: the queues that a leader maintains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from riverpy._postgres.sql_files import QueueFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILTER_MAX = 100
"""The largest number of queues in one statement, which scans an index once for each queue."""


@dataclass(frozen=True)
class AllQueues:
    """Every queue."""

    def __contains__(self, queue: str) -> bool:
        return True

    def without(self, queues: Iterable[str]) -> QueueScope:
        """All of these queues except some."""
        return AllQueuesExcept(frozenset(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter((), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """None, once: one statement without a filter."""
        return (None,)


@dataclass(frozen=True)
class OnlyQueues:
    """The given queues. An empty set means no queue, never all."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue in self.queues

    def without(self, queues: Iterable[str]) -> QueueScope:
        """All of these queues except some."""
        return OnlyQueues(self.queues.difference(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=True)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One filter for each `FILTER_MAX` queues, and no filter for no queue."""
        names = sorted(self.queues)
        return [
            QueueFilter(tuple(names[first : first + FILTER_MAX]), is_only=True)
            for first in range(0, len(names), FILTER_MAX)
        ]


@dataclass(frozen=True)
class AllQueuesExcept:
    """Every queue except the given ones. An empty set has the same filters as `AllQueues`."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue not in self.queues

    def without(self, queues: Iterable[str]) -> QueueScope:
        """All of these queues except some."""
        return AllQueuesExcept(self.queues.union(queues))

    def whole(self) -> QueueFilter:
        """One filter for all of them."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One filter, because several would overlap."""
        return (self.whole(),) if self.queues else AllQueues().filters()


QueueScope: TypeAlias = AllQueues | OnlyQueues | AllQueuesExcept
NOTHING = OnlyQueues(frozenset())


async def everything() -> QueueScope:
    """Return all queues: the scope of a leader if there are no other domains."""
    return AllQueues()
