"""A model of the table of leases, which decides and locks like the statements of
`sql/queries/riverpy_lease.sql`.

`tests/leases/test_lease_table.py` compares it with PostgreSQL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.leases import LeaseAcquireResult

if TYPE_CHECKING:
    from collections.abc import Iterable

RELEASED = datetime.min.replace(tzinfo=UTC)
"""Represents the `-infinity` of a released lease."""


class LeaseTerm(NamedTuple):
    """One term of a lease. The epoch is first, because a newer term has a higher one."""

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
        """Whether an attempt can acquire the lease."""
        return self.expires_at < now or self.expires_at > clock + 2 * self.ttl


class Locked(Exception):
    """The statement must wait for a fenced transaction."""


class LeaseTable:
    """The rows, and their locks by fenced transactions.

    Each call is one statement: `now` is the start of its transaction, `clock` the time at which it
    runs. Subclasses leave out a condition, to show what the condition is for.
    """

    def __init__(self) -> None:
        self.rows: dict[str, LeaseRow] = {}
        self.fences: Counter[str] = Counter()
        """The number of open transactions that hold the key share lock of each row."""
        self.terms: list[LeaseTerm] = []
        """All granted terms, in order."""

    def acquire(
        self,
        name: str,
        holder: str,
        ttl: timedelta,
        now: datetime,
        *,
        clock: datetime,
        has_waited: bool = False,
    ) -> LeaseAcquireResult | None:
        """Try to acquire a lease.

        Raises:

        Locked: the lease is free, but fenced.
        """
        row = self.rows.get(name)
        is_denied = row is not None and not row.is_free(now, clock)
        if row is not None and is_denied and not has_waited:
            remaining = (row.expires_at - now).total_seconds()
            return LeaseAcquireResult(False, row.holder, row.epoch, row.acquired_at, remaining)
        if self.fences[name]:  # one that has waited locks the newest version before it looks
            raise Locked
        if is_denied:  # what it read before it waited does not tell who has won
            return None
        epoch = self.next_epoch(row, clock)
        self.rows[name] = LeaseRow(epoch, holder, ttl, now, now + ttl)
        self.terms.append(LeaseTerm(name, epoch, holder))
        return LeaseAcquireResult(True, holder, epoch, now, None)

    def next_epoch(self, row: LeaseRow | None, clock: datetime) -> int:
        """Return the epoch of the next term."""
        by_clock = int(clock.timestamp() * 1_000_000)
        return by_clock if row is None else max(row.epoch + 1, by_clock)

    def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], now: datetime
    ) -> dict[str, bool]:
        """Extend terms. Returns the names of the renewed leases, each with True, because a fence
        does not block renewals."""
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
        """Lock the row of a held term. Call `unfence` when the transaction ends."""
        row = self.rows.get(name)
        if row is None or not self.is_fenceable(row, epoch, clock, has_snapshot=has_snapshot):
            return False
        self.fences[name] += 1
        return True

    def is_fenceable(
        self, row: LeaseRow, epoch: int, clock: datetime, *, has_snapshot: bool
    ) -> bool:
        """Whether a fenced transaction may continue with this row."""
        return row.epoch == epoch and (has_snapshot or row.expires_at >= clock)

    def unfence(self, name: str) -> None:
        """Unlock the row when a fenced transaction ends."""
        self.fences[name] -= 1
