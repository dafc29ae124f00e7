"""The table of leases in the world in which leases are explored: decided, and locked, as the
statements of `sql/queries/riverpy_lease.sql` decide and lock.

`tests/leases/test_lease_table.py` gives the same statements to PostgreSQL, and compares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.leases import LeaseAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable

RELEASED = datetime.min.replace(tzinfo=UTC)
"""Stands for the `-infinity` of a lease that was released."""


class LeaseTerm(NamedTuple):
    """One term of a lease: who was given it comes after, for a newer one has a higher epoch."""

    name: str
    epoch: int
    holder: str


@dataclass
class LeaseRow:
    """A row of `riverpy_lease`."""

    epoch: int
    holder: str
    ttl: timedelta
    acquired_at: datetime
    expires_at: datetime

    def is_free(self, now: datetime, clock: datetime) -> bool:
        """Whether a bid takes it."""
        return self.expires_at < now or self.expires_at > clock + 2 * self.ttl


class Locked(Exception):
    """The statement must wait for a fenced transaction."""


class LeaseTable:
    """The rows, and which of them transactions have fenced. Each call is one statement; `now` is
    when its transaction began, `clock` when it runs.

    A subclass that decides otherwise shows what a predicate is for.
    """

    def __init__(self) -> None:
        self.rows: dict[str, LeaseRow] = {}
        self.fences: Counter[str] = Counter()
        """How many open transactions hold the key share lock of a row."""
        self.terms: list[LeaseTerm] = []
        """All that were given, in order."""

    def acquire(
        self,
        name: str,
        holder: str,
        ttl: timedelta,
        now: datetime,
        *,
        clock: datetime,
        has_waited: bool = False,
    ) -> LeaseAnswer | None:
        """Bid.

        Raises:
            Locked: the lease is free, but fenced.
        """
        row = self.rows.get(name)
        is_denied = row is not None and not row.is_free(now, clock)
        if row is not None and is_denied and not has_waited:
            remaining = (row.expires_at - now).total_seconds()
            return LeaseAnswer(False, row.holder, row.epoch, row.acquired_at, remaining)
        if self.fences[name]:  # one that has waited locks the newest version before it looks
            raise Locked
        if is_denied:  # what it read before it waited does not tell who has won
            return None
        epoch = self.next_epoch(row, clock)
        self.rows[name] = LeaseRow(epoch, holder, ttl, now, now + ttl)
        self.terms.append(LeaseTerm(name, epoch, holder))
        return LeaseAnswer(True, holder, epoch, now, None)

    def next_epoch(self, row: LeaseRow | None, clock: datetime) -> int:
        """Of the term that a bid begins."""
        by_clock = int(clock.timestamp() * 1_000_000)
        return by_clock if row is None else max(row.epoch + 1, by_clock)

    def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], now: datetime
    ) -> dict[str, bool]:
        """Extend terms; returns the names of those that go on, each with True: a fence locks no row
        that would be renewed."""
        renewed: dict[str, bool] = {}
        for name, epoch in terms:
            row = self.rows.get(name)
            if row is not None and self.is_renewable(row, epoch, holder, now):
                row.expires_at = now + row.ttl
                renewed[name] = True
        return renewed

    def is_renewable(self, row: LeaseRow, epoch: int, holder: str, now: datetime) -> bool:
        """Whether a renewal extends the row."""
        return row.epoch == epoch and row.holder == holder and row.expires_at >= now

    def release(self, name: str, epoch: int, holder: str, now: datetime) -> bool:
        """End a term."""
        row = self.rows.get(name)
        if row is None or not self.is_releasable(row, epoch, holder, now):
            return False
        row.expires_at = RELEASED
        return True

    def is_releasable(self, row: LeaseRow, epoch: int, holder: str, now: datetime) -> bool:
        """Whether a release ends the term of the row."""
        return row.epoch == epoch and row.holder == holder and row.expires_at >= now

    def fence(self, name: str, epoch: int, *, clock: datetime, has_snapshot: bool = False) -> bool:
        """Lock the row of a term that is held; `unfence` when the transaction ends."""
        row = self.rows.get(name)
        if row is None or not self.is_fenceable(row, epoch, clock, has_snapshot=has_snapshot):
            return False
        self.fences[name] += 1
        return True

    def is_fenceable(
        self, row: LeaseRow, epoch: int, clock: datetime, *, has_snapshot: bool
    ) -> bool:
        """Whether a transaction goes on by this row."""
        return row.epoch == epoch and (has_snapshot or row.expires_at >= clock)

    def unfence(self, name: str) -> None:
        """A transaction that had fenced the row has ended."""
        self.fences[name] -= 1
