"""QueueScope: the queues that a leader maintains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from riverpy._postgres.sql_files import QueueFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

QUEUES_PER_FILTER_MAX = 100
"""The maximum number of queues in one statement. The statement scans an index once for each
queue."""


@dataclass(frozen=True)
class QueueScope:
    """The queues that a leader maintains: only some queues, or all queues except some."""

    queues: frozenset[str] = frozenset()
    is_allow_list: bool = False
    """True: the scope has only `queues`. False: it has all other queues."""

    def __contains__(self, queue: str) -> bool:
        return (queue in self.queues) is self.is_allow_list

    def without_queues(self, queues: Iterable[str]) -> QueueScope:
        """Return a scope that does not have these queues."""
        change = self.queues.difference if self.is_allow_list else self.queues.union
        return QueueScope(change(queues), self.is_allow_list)

    def make_single_filter(self) -> QueueFilter:
        """Return one filter that selects all queues of the scope."""
        return QueueFilter(tuple(sorted(self.queues)), self.is_allow_list)

    def make_statement_filters(self) -> Sequence[QueueFilter | None]:
        """Return filters that together select all queues of the scope. Each filter is for one
        statement. If the scope has only some queues, each filter has at most
        `QUEUES_PER_FILTER_MAX` queues. None in place of a filter means all queues."""
        if not self.is_allow_list:
            return [self.make_single_filter() if self.queues else None]
        names = sorted(self.queues)
        return [
            QueueFilter(tuple(names[first : first + QUEUES_PER_FILTER_MAX]), is_allow_list=True)
            for first in range(0, len(names), QUEUES_PER_FILTER_MAX)
        ]


ALL_QUEUES = QueueScope()
NO_QUEUES = QueueScope(is_allow_list=True)


def only_queues(queues: Iterable[str]) -> QueueScope:
    """Return the scope that has only these queues."""
    return QueueScope(frozenset(queues), is_allow_list=True)


def all_queues_except(queues: Iterable[str]) -> QueueScope:
    """Return the scope of all queues except these."""
    return QueueScope(frozenset(queues))
