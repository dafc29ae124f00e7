"""A world in which the real elector stands for a lead that is a lease, as that of a domain is: the
processes of `tests/leading/model.py` before the table of leases."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from riverpy._leading.announcements import hear_lease
from riverpy._leading.lease_store import BID_LOCK_SHARE
from riverpy._leases.validity import Term
from riverpy._postgres.leaders import Bid
from tests.leading.model import LATENCY, Fault, Process, World
from tests.leading.model_database import TIMING
from tests.leases.lease_world import LeaseServer

if TYPE_CHECKING:
    from datetime import datetime, timedelta

LEAD = "d:emails"


class LeadServer(LeaseServer):
    """The database, asked as an elector asks: whose bids wait for nearly as long as it does."""

    lock_limit = TIMING.interval * BID_LOCK_SHARE

    def elect(
        self, leader_id: str, ttl: timedelta, now: datetime, *, has_waited: bool
    ) -> Bid | None:
        """Bid for the lead."""
        bid = self.acquire(LEAD, leader_id, ttl, now, has_waited=has_waited)
        if bid is None:
            return None
        if bid.is_granted:
            self.terms.append(Term(bid.holder, bid.acquired_at, bid.epoch))
            self.began.append(self._world.now)
        return Bid(bid.is_granted, bid.holder, bid.acquired_at, bid.remaining, bid.epoch)

    def renew(self, term: Term, _ttl: timedelta, now: datetime) -> bool:
        """Extend a term by the time that it was given for."""
        return bool(super().renew(term.leader_id, [(LEAD, term.epoch)], now))

    def resign(self, term: Term, now: datetime, *, has_waited: bool) -> bool:
        """End a term."""
        del has_waited  # it waits for nobody
        return self.release(LEAD, term.epoch, term.leader_id, now)

    def fence(self, term: Term, now: datetime) -> int | None:
        """Begin a transaction that commits only under a term."""
        return super().fence(LEAD, term.epoch, now)


class LeadProcess(Process):
    """A process that stands for the lead."""

    def hear(self, payload: str) -> None:
        """Be notified, if that reaches it."""
        if self.state != "dead" and self.connection.usual == Fault():
            self.loop.call_soon(hear_lease, self.elector, LEAD, payload)


class LeadWorld(World):
    """Everything, and its one true time."""

    writes = 0

    def announce(self, action: str, _leader_id: str) -> None:
        """Ask whoever leads to resign."""
        if action == "request_resign" and self.server.terms:
            self._notify("resign_requested", self.server.terms[-1].epoch, "")

    def announce_release(self, _name: str, epoch: int, holder: str) -> None:
        """Notify all who can hear."""
        self._notify("released", epoch, holder)

    def _notify(self, action: str, epoch: int, holder: str) -> None:
        message = {"v": 1, "lease": LEAD, "epoch": epoch, "holder": holder, "action": action}
        for process in self.processes:
            self.later(LATENCY, partial(process.hear, json.dumps(message)))
