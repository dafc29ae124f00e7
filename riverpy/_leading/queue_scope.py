"""Scope: whose jobs a leader maintains, said by their queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from riverpy._postgres.queue_filter import QueueFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILTER_MOST = 100
"""Names of queues in one statement that enters an index once for each of them."""


@dataclass(frozen=True)
class All:
    """Every queue."""

    def __contains__(self, queue: str) -> bool:
        return True

    def without(self, queues: Iterable[str]) -> Scope:
        """All of this but these."""
        return Except(frozenset(queues))

    def whole(self) -> QueueFilter:
        """In one filter, of whatever length."""
        return QueueFilter((), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One statement, without a filter."""
        return (None,)


@dataclass(frozen=True)
class Only:
    """These queues. Of none, nothing is to be done: it never stands for all."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue in self.queues

    def without(self, queues: Iterable[str]) -> Scope:
        """All of this but these."""
        return Only(self.queues.difference(queues))

    def whole(self) -> QueueFilter:
        """In one filter, of whatever length."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=True)

    def filters(self) -> Sequence[QueueFilter | None]:
        """A statement for each so many of them; none for none."""
        names = sorted(self.queues)
        return [
            QueueFilter(tuple(names[first : first + FILTER_MOST]), is_only=True)
            for first in range(0, len(names), FILTER_MOST)
        ]


@dataclass(frozen=True)
class Except:
    """Every queue but these. Without exception it is the same as `All`, to the statement."""

    queues: frozenset[str]

    def __contains__(self, queue: str) -> bool:
        return queue not in self.queues

    def without(self, queues: Iterable[str]) -> Scope:
        """All of this but these."""
        return Except(self.queues.union(queues))

    def whole(self) -> QueueFilter:
        """In one filter, of whatever length."""
        return QueueFilter(tuple(sorted(self.queues)), is_only=False)

    def filters(self) -> Sequence[QueueFilter | None]:
        """One statement, as parts of what is left out would overlap."""
        return (self.whole(),) if self.queues else All().filters()


Scope: TypeAlias = All | Only | Except
NOTHING = Only(frozenset())


async def everything() -> Scope:
    """The scope of a leader beside whom there is no other, which needs no asking."""
    return All()
