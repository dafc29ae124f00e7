"""The election for a lead that is a lease, explored as that for River's (`test_model.py`)."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from structlog.testing import capture_logs

from tests.leading.lead_world import LeadProcess, LeadServer, LeadWorld
from tests.leading.model import LATENCY, Violation
from tests.leading.model_database import TIMING
from tests.leading.model_faults import some_seconds
from tests.leading.test_model import (
    EXAMPLES,
    RATES,
    Election,
    Fleet,
    explore,
)
from tests.leases.test_lease_model import EpochBlind, Unfenced

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    with capture_logs():
        yield


class LeadFleet(Fleet):
    """What happens at any time to those who stand for it."""

    place, server, process = LeadWorld, LeadServer, LeadProcess


class LeadElection(Election):
    """What else happens. No River in Go stands for a domain's lead."""

    place, server, process = LeadWorld, LeadServer, LeadProcess
    rival_acts = None

    @precondition(lambda self: self.world.server.set_back < TIMING.ttl / 2)
    @rule(seconds=st.sampled_from([1, 7]))
    def clock_of_the_database_is_set_back(self, seconds: int) -> None:
        """The database's clock is set back, by less than the time of a lease in all."""
        self.world.server.set_clock(timedelta(seconds=-seconds, microseconds=3))

    @rule(seconds=some_seconds)
    def database_crashes(self, seconds: float) -> None:
        """The database restarts uncleanly, which keeps a logged table."""
        self.world.server.crash()
        self.world.run(seconds)


class LeadElectionOverSteps(LeadElection):
    """And the database believes that the lease has run out, or that it is one of before its clock
    was set back."""

    overlap = TIMING.validity / min(RATES) + 2 * LATENCY

    @rule(by=st.sampled_from([17, -20]), seconds=some_seconds)
    def clock_of_the_database_is_set(self, by: int, seconds: float) -> None:
        """The database's clock is set forward, past the end of the lease, or far back."""
        self.world.server.set_clock(timedelta(seconds=by, microseconds=1))
        self.world.run(seconds)


class WithoutEpochs(LeadFleet):
    """Holder and expiry are compared, and no epoch."""

    server = type("EpochBlindServer", (LeadServer,), {"table": EpochBlind})


class WithoutFence(LeadFleet):
    """A fence lets everything go on."""

    server = type("UnfencedServer", (LeadServer,), {"table": Unfenced})


@pytest.mark.timeout(600)
def test_nobody_leads_a_domain_beside_another() -> None:
    """In no world that was explored do two processes lead a domain at once, frozen ones counted,
    nor do services of an old term run on, nor does a write of one follow one of a newer; epochs
    rise; and when nothing is wrong any more, somebody leads."""
    explore(LeadElection, examples=EXAMPLES // 2, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_stepped_clock_lets_two_lead_for_no_longer_than_the_trust() -> None:
    """If the database's clock is set past the end of the lease, or back by more than its time, the
    old leader may believe on until its trust ends, but nothing that it writes comes after a write
    of the new one; and then somebody leads."""
    explore(LeadElectionOverSteps, examples=EXAMPLES // 4, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [WithoutEpochs, WithoutFence])
def test_search_finds_what_each_protection_is_for(machine: type[Fleet]) -> None:
    """A search finds two who lead a domain, or a late write, if renewals, resignations and fences
    name no epoch, or if writes are not fenced."""
    with pytest.raises(Violation, match=r"lead at once|newer term's"):
        explore(machine, examples=2000, phases=(Phase.generate,))
