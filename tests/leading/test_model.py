"""Leader election in a simulated world: hypothesis drives the real election and searches for two
leaders.

The world has slow clocks, frozen processes and lost messages. RIVERPY_TEST_SEED sets another seed,
RIVERPY_TEST_EXAMPLES the number of examples.
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
"""The speed of a process's clocks relative to the database's. The margin covers a fifteenth."""

some_lateness = st.sampled_from([0.0, 1.5, 8.0])


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    with capture_logs():
        yield


class Fleet(Slowness):
    """Events of processes that take part in the election."""

    place: type[World] = World
    server: type[Server] = Server
    process: type[Process] = Process
    timing = TIMING
    overlap = 0.0

    @initialize(
        rates=st.lists(st.sampled_from(RATES), min_size=2, max_size=3), lateness=some_lateness
    )
    def begins(self, rates: list[float], lateness: float) -> None:
        """The processes start. Each has its own clock, and the services of the first may stop
        late."""
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
        """The leader is requested to resign. The next exchange of a process is slow or lost."""
        self.one(number).connection.faults.append(Fault(request))
        self.world.announce("request_resign", "")
        self.world.run(seconds)


class Election(Damage, Fleet):
    """More faults."""

    @rule(number=some_process, lateness=some_lateness)
    def ends_services_late(self, number: int, lateness: float) -> None:
        """The services of a term keep running after they were stopped, for more or less than the
        grace period."""
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
        """A River in Go tries to become leader, renews or resigns."""
        if is_resigning:
            self.world.rival.resign()
        else:
            self.world.rival.elect()
        self.world.run(seconds)

    def teardown(self) -> None:
        """Without faults one process is leader in the end."""
        try:
            if hasattr(self, "world") and self.world.violation is None:
                self.world.expect_leader()
        finally:
            super().teardown()


class ElectionOverLostRows(Election):
    """Faults of the database: it loses the row, or its clock is set forward."""

    overlap = TIMING.validity_seconds / min(RATES) + 2 * LATENCY

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
    """A timing without a margin."""

    @property
    def validity_seconds(self) -> float:
        """All of the lease."""
        return self.ttl


class WithoutMargin(Fleet):
    """A local deadline without a margin: it is the end of the lease."""

    timing = WholeLease(TIMING.ttl, TIMING.attempt_interval)


class TermBlindServer(Server):
    """A database that compares the leader id, but not the term."""

    def is_row_of(self, term: Term) -> bool:
        """Whether the row belongs to the same process."""
        return self.row is not None and self.row.term.leader_id == term.leader_id


class WithoutTerms(Fleet):
    """Renewals and resignations that name no term."""

    server = TermBlindServer


class SuspendBlindProcess(Process):
    """A process whose local deadline uses a clock that stops during suspension."""

    def seconds_since_boot(self) -> float:
        """Seconds by the clock that stops during suspension."""
        return self.monotonic()


class BlindToSuspension(Fleet):
    """The local deadline uses a clock that stops during suspension."""

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
def test_one_leader() -> None:
    """Explore worlds with faults. No two processes, frozen ones included, are leader at once. No
    services of an old term run or write when another process is leader. Without faults one process
    is leader in the end."""
    explore(Election, examples=EXAMPLES, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_two_leaders_after_a_lost_row() -> None:
    """If the database loses the row, or its clock is set past the end of the lease, the old leader
    may treat its lease as held until its local deadline. But none of its writes follows one of the
    new leader, and then one process is leader."""
    explore(ElectionOverLostRows, examples=EXAMPLES // 3, phases=(Phase.generate, Phase.shrink))


@pytest.mark.parametrize("machine", [WithoutMargin, WithoutTerms, BlindToSuspension])
def test_search_finds_what_each_protection_is_for(machine: type[Fleet]) -> None:
    """The search finds two leaders if the local deadline has no margin, if renewals and
    resignations name no term, or if the deadline uses a clock that stops during suspension."""
    with pytest.raises(Violation, match="lead at once"):
        explore(machine, examples=2000, phases=(Phase.generate,))


def test_margin_is_for_clocks_that_differ() -> None:
    """A leader with a slow clock is frozen until another process acquired its lease. With the
    margin it does not treat the lease as held, without it it does."""

    def tell(timing: LeaseTiming) -> World:
        with closing(World([0.95, 1.0], timing=timing)) as world:
            world.run(1.0)
            world.processes[0].freeze()
            world.run(15.0)
            return world

    assert_passed_on(tell(TIMING))
    with pytest.raises(Violation, match="a and b lead at once"):
        tell(WithoutMargin.timing)


def test_deadline_counts_suspension() -> None:
    """A leader's machine is suspended until another process acquired its lease. With a clock that
    counts suspension it does not treat the lease as held, with another clock it does."""

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
    """A resignation that arrives 25 s late, after the process was elected again, has no effect. If
    it named only the process, it would end the new term, and another process could be elected
    too."""

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
    """If an unlogged table is emptied, a leader that reaches the database stops being leader at its
    next renewal."""
    with closing(World([1.0, 1.0], overlap=TIMING.attempt_interval)) as world:
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
def test_slow_answer_does_not_extend_validity(exchange: int) -> None:
    """A leader is frozen after an answer of 2 s to its attempt or renewal. Its lease is valid for
    no longer than after a quick answer."""
    with closing(World([1.0, 1.0])) as world:
        first, _ = world.processes
        first.services.pace = 60.0
        first.connection.faults.extend([Fault()] * exchange + [Fault(answer=2.0)])
        world.run(2.1 + exchange * TIMING.attempt_interval)
        assert first.lease
        first.freeze()
        world.run(TIMING.ttl)
        assert_passed_on(world)


def test_services_end_before_the_lease_passes_on() -> None:
    """The services of a leader that cannot reach the database have stopped before another process
    is leader, even if they need most of the grace period and the leader's clock is slow (P20)."""
    with closing(World([0.95, 1.0])) as world:
        first, _ = world.processes
        first.services.lateness = TIMING.grace_seconds * 0.9
        world.run(1.0)
        first.cut_off(Fault(request=None))
        world.run(TIMING.ttl)
        assert_passed_on(world)
        assert first.services.told_to_end
        assert not first.services.is_serving


def test_leader_after_an_outage() -> None:
    """When the database answers again after an hour, one process is leader within two intervals,
    without a notification."""
    with closing(World([1.0, 1.0])) as world:
        for process in world.processes:
            process.cut_off(Fault(request=None))
        world.run(3600.0)
        assert not world.leaders()
        for process in world.processes:
            process.heal()
        world.run(2 * TIMING.attempt_interval)
        assert len(world.leaders()) == 1


def test_answer_that_comes_too_late_begins_no_term() -> None:
    """A process that was frozen from its attempt until another process acquired the lease begins no
    term and ends none of another process."""
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
    """Check that the second process acquired the lease after the first."""
    assert [term.leader_id for term in world.server.terms] == ["a1", "b1"]
