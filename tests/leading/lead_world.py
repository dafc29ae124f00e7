"""A simulated world in which a leader is elected on a lease, as in a domain.

It uses the processes of `tests/leading/model.py` with the table of leases.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from tests.leading.model import LATENCY, Fault, Process, World
from tests.leading.model_database import Term
from tests.leases.lease_world import LeaseServer

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from riverpy._postgres.leases import LeaseAcquireResult

LEAD = "d:emails"


class LeadServer(LeaseServer):
    """The database. It records the terms of the leader."""

    def acquire(
        self, name: str, holder: str, ttl: timedelta, now: datetime, *, has_waited: bool
    ) -> LeaseAcquireResult | None:
        """Try to become leader."""
        answer = super().acquire(name, holder, ttl, now, has_waited=has_waited)
        if answer is not None and answer.is_granted:
            self.terms.append(Term(answer.holder, answer.acquired_at, answer.epoch))
            self.began.append(self._world.now)
        return answer


class LeadProcess(Process):
    """A process that takes part in the election."""

    def receive(self, payload: str) -> None:
        """Receive a notification, if the network delivers it."""
        if self.state != "dead" and self.connection.usual == Fault():
            self.loop.call_soon(self.engine.receive_notification, payload)


class LeadWorld(World):
    """All processes, the database, and the true time."""

    lease_name = LEAD
    writes = 0

    def announce(self, action: str, _leader_id: str) -> None:
        """Request that the leader resigns."""
        if action == "request_resign" and self.server.terms:
            self._notify("resign_requested", self.server.terms[-1].epoch, "")

    def announce_release(self, _name: str, epoch: int, holder: str) -> None:
        """Notify all processes that the network reaches."""
        self._notify("released", epoch, holder)

    def _notify(self, action: str, epoch: int, holder: str) -> None:
        message = {"v": 1, "lease": LEAD, "epoch": epoch, "holder": holder, "action": action}
        for process in self.processes:
            self.later(LATENCY, partial(process.receive, json.dumps(message)))
