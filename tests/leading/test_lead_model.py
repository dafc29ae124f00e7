"""Leader election on a lease, explored like the one on River's row (`test_model.py`)."""

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
    """Events of processes that take part in the election."""

    place, server, process = LeadWorld, LeadServer, LeadProcess


class LeadElection(Election):
    """More faults. No River in Go takes part in the election of a domain."""

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
    """Steps of the database's clock: the lease seems to have expired, or to be from before a change
    of the clock."""

    overlap = TIMING.validity_seconds / min(RATES) + 2 * LATENCY

    @rule(by=st.sampled_from([17, -20]), seconds=some_seconds)
    def clock_of_the_database_is_set(self, by: int, seconds: float) -> None:
        """The database's clock is set forward, past the end of the lease, or far back."""
        self.world.server.set_clock(timedelta(seconds=by, microseconds=1))
        self.world.run(seconds)


class WithoutEpochs(LeadFleet):
    """Statements that compare holder and expiry, but no epoch."""

    server = type("EpochBlindServer", (LeadServer,), {"table": EpochBlind})


class WithoutFence(LeadFleet):
    """A fence without a check."""

    server = type("UnfencedServer", (LeadServer,), {"table": Unfenced})


@pytest.mark.timeout(600)
def test_domain_has_one_leader() -> None:
    """Explore worlds with faults. No two processes, frozen ones included, are leader of a domain at
    once. No services of an old term keep running, and no write of an old term follows one of a
    newer term. Epochs rise. Without faults one process is leader in the end."""
    explore(LeadElection, examples=EXAMPLES // 2, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_two_leaders_after_a_clock_step() -> None:
    """If the database's clock is set past the end of the lease, or far back, the old leader may
    treat its lease as held until its local deadline. But none of its writes follows one of the new
    leader, and then one process is leader."""
    explore(LeadElectionOverSteps, examples=EXAMPLES // 4, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [WithoutEpochs, WithoutFence])
def test_search_finds_what_each_protection_is_for(machine: type[Fleet]) -> None:
    """If statements name no epoch, or writes are not fenced, the search finds two leaders or a late
    write."""
    with pytest.raises(Violation, match=r"lead at once|newer term's"):
        explore(machine, examples=2000, phases=(Phase.generate,))
