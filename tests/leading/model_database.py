"""A model of the database in the simulated world: the row of `river_leader`, with the same
decisions as the statements, and a River in Go."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from riverpy._leases.timing import LeaseTiming
from riverpy._postgres.leases import (
    LeaseAcquireResult,
    acquired_at_from_epoch,
    epoch_from_acquired_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leases.lease import Lease
    from tests.leading.model import World

TIMING = LeaseTiming(ttl=15.0, attempt_interval=5.0)
"""The default intervals."""
TRANSACTION_LIMIT = 5.0
"""Seconds after which the server ends a fenced transaction."""
_EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
RIVAL = "go"
"""The id of a River in Go."""


class Term(NamedTuple):
    """One term of a leader."""

    leader_id: str
    elected_at: datetime
    epoch: int


@dataclass
class Row:
    """The row of `river_leader`."""

    term: Term
    expires_at: datetime


class Server:
    """The database: its clock, the row of the leader, and its locks. Subclasses leave out a
    condition, to show what the condition is for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._offset = timedelta()
        self.set_back = 0.0
        """Seconds that its clock was set back in all. A lease lasts longer by this time."""
        self.row: Row | None = None
        self.terms: list[Term] = []
        """All terms, in order."""
        self.began: list[float] = []
        """The start of each term in the world's time."""
        self._last_write = -1
        self._fenced: dict[int, Term] = {}
        self._waiting: list[Callable[[], None]] = []
        self._ids = count()

    def now(self) -> datetime:
        """Return the time of the database."""
        return _EPOCH + timedelta(seconds=self._world.now) + self._offset

    def set_clock(self, by: timedelta) -> None:
        """Set the clock forward or back."""
        self._world.say(f"db: its clock is set by {by.total_seconds():g} s")
        self._offset += by
        self.set_back -= min(by.total_seconds(), 0.0)

    def serve(
        self, act: Callable[[datetime], object], answer: Callable[[object], None], *, locks: bool
    ) -> None:
        """Run a statement now, or when no fenced transaction blocks it. Its own time is the time of
        its beginning."""
        began = self.now()
        if locks and self._fenced:
            self._waiting.append(lambda: self.serve_at(began, act, answer))
        else:
            answer(act(began))

    def serve_at(
        self, began: datetime, act: Callable[[datetime], object], answer: Callable[[object], None]
    ) -> None:
        """Run a statement that has waited."""
        if self._fenced:
            self._waiting.append(lambda: self.serve_at(began, act, answer))
        else:
            answer(act(began))

    def term_of(self, lease: Lease) -> Term:
        """The term of a process's lease."""
        return Term(lease.holder, lease.acquired_at, lease.epoch)

    def acquire(
        self, _name: str, leader_id: str, ttl: timedelta, now: datetime
    ) -> LeaseAcquireResult:
        """Acquire a free row, or return the leader."""
        row = self.row
        if row is not None and row.expires_at >= now:
            remaining = (row.expires_at - now).total_seconds()
            return LeaseAcquireResult(
                False, row.term.leader_id, row.term.epoch, row.term.elected_at, remaining
            )
        elected_at = now
        if row is not None:
            elected_at = max(now, row.term.elected_at + timedelta(microseconds=1))
        term = Term(leader_id, elected_at, epoch_from_acquired_at(elected_at))
        self.row = Row(term, now + ttl)
        self.terms.append(term)
        self.began.append(self._world.now)
        self._world.say(f"db: {leader_id} is elected")
        return LeaseAcquireResult(True, leader_id, term.epoch, elected_at, None)

    def renew(self, holder: str, terms: list[tuple[str, int]], now: datetime) -> dict[str, bool]:
        """Extend a held term."""
        ((name, epoch),) = terms
        row = self.row
        if row is None or not self.is_row_of(_term(holder, epoch)) or row.expires_at < now:
            return {}
        row.expires_at = now + TIMING.ttl_timedelta
        return {name: True}

    release_locks = True
    """Whether a release waits for fenced transactions."""

    def release(self, _name: str, epoch: int, holder: str, _now: datetime) -> bool:
        """End a term."""
        term = _term(holder, epoch)
        if self.row is None or not self.is_row_of(term):
            return False
        if self.row.term != term:
            self._world.say(f"db: {term.leader_id} ends a term that is not the one it resigned")
        self._world.say(f"db: {term.leader_id} resigns")
        self.row = None
        self._world.announce("resigned", term.leader_id)
        return True

    def is_row_of(self, term: Term) -> bool:
        """Whether the row belongs to this term."""
        return self.row is not None and self.row.term == term

    def fence(self, _name: str, epoch: int, now: datetime) -> int | None:
        """Begin a transaction that commits only under a term."""
        if self.row is None or self.row.term.epoch != epoch or self.row.expires_at < now:
            return None
        transaction = next(self._ids)
        self._fenced[transaction] = self.row.term
        self._world.later(TRANSACTION_LIMIT, partial(self.commit, transaction, write=False))
        return transaction

    def commit(self, transaction: int, _now: datetime | None = None, *, write: bool = True) -> bool:
        """End a fenced transaction, if the server has not ended it."""
        term = self._fenced.pop(transaction, None)
        if term is None:
            return False
        if write:
            number = self.terms.index(term)
            self._world.expect(
                number >= self._last_write, f"{term.leader_id} wrote for a term after a newer one"
            )
            self._last_write = number
        if not self._fenced:
            waiting, self._waiting = self._waiting, []
            for serve in waiting:
                serve()
        return True

    def crash(self) -> None:
        """Restart without a clean shutdown. The table is unlogged, so it is empty."""
        self._world.say("db: restarts, the row is gone")
        self.row = None
        self._fenced.clear()
        self._waiting.clear()


def _term(leader_id: str, epoch: int) -> Term:
    return Term(leader_id, acquired_at_from_epoch(epoch), epoch)


class Rival:
    """A River in Go that takes part in the election. Its leader always stops in time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._trusted_until = 0.0
        self._term: Term | None = None

    @property
    def term(self) -> Term | None:
        """The term that it treats as held."""
        return self._term if self._world.now < self._trusted_until else None

    def elect(self) -> None:
        """Delete an expired row, and insert its own row if there is none. Or renew."""
        server, now = self._world.server, self._world.server.now()
        server.serve(self._elect, lambda _: None, locks=True)
        if self._term is not None and server.renew(RIVAL, [("", self._term.epoch)], now):
            self._trusted_until = self._world.now + TIMING.validity_seconds

    def _elect(self, now: datetime) -> None:
        server = self._world.server
        if server.row is not None and server.row.expires_at < now:
            server.row = None
        if server.row is None and server.now() - now < timedelta(seconds=1):
            answer = server.acquire("", RIVAL, TIMING.ttl_timedelta, now)
            self._term = _term(RIVAL, answer.epoch)
            self._trusted_until = self._world.now + TIMING.validity_seconds

    def resign(self) -> None:
        """Notify that it resigns if it is the leader, and delete the row."""
        term, self._term = self._term, None
        if term is not None:
            server = self._world.server
            act = partial(server.release, "", term.epoch, RIVAL)
            server.serve(act, lambda _: None, locks=True)
