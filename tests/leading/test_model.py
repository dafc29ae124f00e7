"""The election, explored: hypothesis drives the real elector through a world of slow clocks, frozen
processes and lost messages, and looks for two who lead.

RIVERPY_TEST_SEED explores elsewhere, RIVERPY_TEST_EXAMPLES further.
"""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
    run_state_machine_as_test,
)
from structlog.testing import capture_logs

from riverpy._leases.timing import LeaseTiming
from tests.leading.model import LATENCY, Fault, Process, Violation, World
from tests.leading.model_database import TIMING, Server
from tests.leading.model_faults import Damage, Slowness, some_delay, some_process, some_seconds

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.leading.model_database import Term

SEED = os.environ.get("RIVERPY_TEST_SEED")
EXAMPLES = int(os.environ.get("RIVERPY_TEST_EXAMPLES", "60"))
RATES = [0.95, 0.97, 1.0, 1.02, 1.05]
"""Of a process's clocks, by the database's. The margin is for a fifteenth."""

some_lateness = st.sampled_from([0.0, 1.5, 8.0])


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    with capture_logs():
        yield


class Fleet(Slowness):
    """What happens to a fleet at any time."""

    place: type[World] = World
    server: type[Server] = Server
    process: type[Process] = Process
    timing = TIMING
    overlap = 0.0

    @initialize(
        rates=st.lists(st.sampled_from(RATES), min_size=2, max_size=3), lateness=some_lateness
    )
    def begins(self, rates: list[float], lateness: float) -> None:
        """The processes start, each with a clock of its own, the first with services that may take
        their time to end."""
        self.world = self.place(
            rates,
            server=self.server,
            process=self.process,
            timing=self.timing,
            overlap=self.overlap,
        )
        self.world.processes[0].services.lateness = lateness
        self.world.run(1.0)

    @rule(number=some_process, request=some_delay, seconds=some_seconds)
    def is_asked_to_resign(self, number: int, request: float | None, seconds: float) -> None:
        """Whoever leads is asked to resign; what one of them sends next is slow, or lost."""
        self.one(number).connection.faults.append(Fault(request))
        self.world.announce("request_resign", "")
        self.world.run(seconds)


class Election(Damage, Fleet):
    """What else happens."""

    @rule(number=some_process, lateness=some_lateness)
    def ends_services_late(self, number: int, lateness: float) -> None:
        """The services of a term go on after they were told to end, longer than the grace or
        not."""
        self.one(number).services.lateness = lateness

    @rule(number=some_process, seconds=some_seconds)
    def cannot_start_services(self, number: int, seconds: float) -> None:
        """The services of a term cannot start."""
        self.one(number).give_up()
        self.world.run(seconds)

    @rule(seconds=st.sampled_from([1, 7, 20]))
    def clock_of_the_database_is_set_back(self, seconds: int) -> None:
        """The database's clock is set back."""
        self.world.server.set_clock(timedelta(seconds=-seconds, microseconds=3))

    @rule(is_resigning=st.booleans(), seconds=some_seconds)
    def rival_acts(self, is_resigning: bool, seconds: float) -> None:
        """A River in Go bids, renews or resigns."""
        if is_resigning:
            self.world.rival.resign()
        else:
            self.world.rival.elect()
        self.world.run(seconds)

    def teardown(self) -> None:
        """When nothing is wrong any more, somebody leads."""
        try:
            if hasattr(self, "world") and self.world.violation is None:
                self.world.expect_leader()
        finally:
            super().teardown()


class ElectionOverLostRows(Election):
    """And the database forgets who leads, or believes that the lease has run out."""

    overlap = TIMING.validity / min(RATES) + 2 * LATENCY

    @rule(seconds=some_seconds)
    def database_crashes(self, seconds: float) -> None:
        """The database restarts uncleanly, which empties an unlogged table."""
        self.world.server.crash()
        self.world.run(seconds)

    @rule(seconds=some_seconds)
    def clock_of_the_database_is_set_forward(self, seconds: float) -> None:
        """The database's clock is set forward, past the end of the lease."""
        self.world.server.set_clock(timedelta(seconds=17, microseconds=1))
        self.world.run(seconds)


class WholeLease(LeaseTiming, frozen=True):
    """The local deadline without a margin."""

    @property
    def validity(self) -> float:
        """All of the lease."""
        return self.ttl


class WithoutMargin(Fleet):
    """The local deadline is the end of the lease."""

    timing = WholeLease(TIMING.ttl, TIMING.interval)


class TermBlindServer(Server):
    """A database that asks who, and not for which term."""

    def is_row_of(self, term: Term) -> bool:
        """Whether the row is that of the same process."""
        return self.row is not None and self.row.term.leader_id == term.leader_id


class WithoutTerms(Fleet):
    """Renewals and resignations name no term."""

    server = TermBlindServer


class SuspendBlindProcess(Process):
    """A process that measures trust by a clock that stands still in suspension."""

    def boottime(self) -> float:
        """Seconds by the other clock."""
        return self.monotonic()


class BlindToSuspension(Fleet):
    """The local deadline is measured by a clock that stops in suspension."""

    process = SuspendBlindProcess


def explore(machine: type[Fleet], *, examples: int, phases: tuple[Phase, ...]) -> None:
    """Search for a violation."""
    if SEED is not None:
        hypothesis.seed(int(SEED))(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=SEED is None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)  # a counterexample is made short, which takes time
def test_nobody_leads_beside_another() -> None:
    """In no world that was explored do two processes lead at once, frozen ones counted, nor do
    services of an old term run on or write when another leads; and when nothing is wrong any more,
    somebody leads."""
    explore(Election, examples=EXAMPLES, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_lost_row_lets_two_lead_for_no_longer_than_the_trust() -> None:
    """If the database forgets who leads, or sets its clock forward past the end of the lease, the
    old leader may believe on until its trust ends, but nothing that it writes comes after a write
    of the new one; and then somebody leads."""
    explore(ElectionOverLostRows, examples=EXAMPLES // 3, phases=(Phase.generate, Phase.shrink))


@pytest.mark.parametrize("machine", [WithoutMargin, WithoutTerms, BlindToSuspension])
def test_search_finds_what_each_protection_is_for(machine: type[Fleet]) -> None:
    """A search finds two who lead if trust has no margin, if renewals and resignations name no
    term, or if trust is measured by a clock that stops in suspension."""
    with pytest.raises(Violation, match="lead at once"):
        explore(machine, examples=2000, phases=(Phase.generate,))


def test_margin_is_for_clocks_that_differ() -> None:
    """A leader with a slow clock that is frozen until its lease has passed on: with a margin it
    does not believe any more, and without one it would."""

    def tell(timing: LeaseTiming) -> World:
        with closing(World([0.95, 1.0], timing=timing)) as world:
            world.run(1.0)
            world.processes[0].freeze()
            world.run(15.0)
            return world

    assert_passed_on(tell(TIMING))
    with pytest.raises(Violation, match="a and b lead at once"):
        tell(WithoutMargin.timing)


def test_clock_of_trust_counts_suspension() -> None:
    """A leader whose machine is suspended until its lease has passed on: by a clock that counts
    suspension it does not believe any more, and by another it would."""

    def tell(process: type[Process]) -> World:
        with closing(World([1.0, 1.0], process=process)) as world:
            world.run(1.0)
            world.processes[0].freeze(is_suspended=True)
            world.run(15.0)
            return world

    assert_passed_on(tell(Process))
    with pytest.raises(Violation, match="a and b lead at once"):
        tell(SuspendBlindProcess)


def test_resignation_names_its_term() -> None:
    """A resignation that is 25 s on its way, while the one who resigned was elected again: it ends
    nothing, but would end the new term if it named the process alone, and another be elected beside
    it."""

    def tell(server: type[Server]) -> World:
        with closing(World([1.0, 1.0], server=server)) as world:
            first, second = world.processes
            world.run(1.0)
            second.freeze()
            first.connection.faults.append(Fault(request=25.0))
            world.announce("request_resign", "")
            world.run(19.0)
            second.thaw()
            world.run(8.0)
            return world

    world = tell(Server)
    assert [term.leader_id for term in world.server.terms] == ["a1", "a1"]
    with pytest.raises(Violation, match="a and b lead at once"):
        tell(TermBlindServer)


def test_lost_row_is_noticed_at_the_next_renewal() -> None:
    """If an unlogged table is emptied, a leader that reaches the database believes until its next
    renewal, and no longer."""
    with closing(World([1.0, 1.0], overlap=TIMING.interval)) as world:
        first, second = world.processes
        first.services.pace = 60.0
        world.run(5.5)
        world.server.crash()
        second.resync()
        world.run(1.0)
        assert {name for name, _ in world.leaders()} == {"a", "b"}
        world.run(20.0)
        assert [name for name, _ in world.leaders()] == ["b"]
        assert_passed_on(world)
    assert first.services.told_to_end


@pytest.mark.parametrize("exchange", [0, 1])
def test_slow_answer_lengthens_no_trust(exchange: int) -> None:
    """A leader that is frozen after an answer of 2 s, to its bid or to a renewal, believes no
    longer than after a quick one."""
    with closing(World([1.0, 1.0])) as world:
        first, _ = world.processes
        first.services.pace = 60.0
        first.connection.faults.extend([Fault()] * exchange + [Fault(answer=2.0)])
        world.run(2.1 + exchange * TIMING.interval)
        assert first.lease
        first.freeze()
        world.run(TIMING.ttl)
        assert_passed_on(world)


def test_services_end_before_the_lease_passes_on() -> None:
    """The services of a leader that the database does not hear are told to end so early that they
    have ended, even if that takes most of the grace and the leader's clock is slow, when another
    leads (P20)."""
    with closing(World([0.95, 1.0])) as world:
        first, _ = world.processes
        first.services.lateness = TIMING.grace * 0.9
        world.run(1.0)
        first.cut_off(Fault(request=None))
        world.run(TIMING.ttl)
        assert_passed_on(world)
        assert first.services.told_to_end
        assert not first.services.is_serving


def test_somebody_leads_after_an_outage() -> None:
    """When the database answers again after an hour, somebody leads within two intervals, though
    nobody was told."""
    with closing(World([1.0, 1.0])) as world:
        for process in world.processes:
            process.cut_off(Fault(request=None))
        world.run(3600.0)
        assert not world.leaders()
        for process in world.processes:
            process.heal()
        world.run(2 * TIMING.interval)
        assert len(world.leaders()) == 1


def test_answer_that_comes_too_late_begins_no_term() -> None:
    """A process that was frozen from its bid until the lease that it won has passed on begins no
    term, and ends none of another."""
    with closing(World([1.0, 1.0])) as world:
        first, second = world.processes
        first.connection.faults.append(Fault(answer=0.5))
        world.run(0.1)
        first.freeze()
        world.run(16.0)
        first.thaw()
        world.run(10.0)
        assert_passed_on(world)
        assert world.leaders() == [(second.name, world.server.terms[1])]


def assert_passed_on(world: World) -> None:
    """The lease went from the first process to the second."""
    assert [term.leader_id for term in world.server.terms] == ["a1", "b1"]
