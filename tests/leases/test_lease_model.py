"""Leases in a simulated world: hypothesis drives the real lease engine, and users that write
through the fence.

The world has slow clocks, frozen processes and lost messages. RIVERPY_TEST_SEED sets another seed,
RIVERPY_TEST_EXAMPLES the number of examples.
"""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from structlog.testing import capture_logs

from tests.leading.model import LATENCY, Fault, Violation
from tests.leading.model_database import TIMING
from tests.leading.model_faults import Damage, Slowness, some_delay, some_process, some_seconds
from tests.leading.test_model import EXAMPLES, RATES, WholeLease, explore
from tests.leases.lease_world import NAMES, LeaseServer, LeaseWorld
from tests.leases.model_leases import LeaseTable

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime

    from riverpy._leases.timing import LeaseTiming
    from tests.leases.model_leases import LeaseRow

some_hold = st.sampled_from([0.0, 0.7, 3.0, 12.0])
some_lateness = st.sampled_from([0.0, 1.5, 8.0, 40.0])
some_name = st.sampled_from(NAMES)


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    with capture_logs():
        yield


class Holders(Slowness):
    """Events of processes that use leases."""

    server: type[LeaseServer] = LeaseServer
    timing = TIMING
    overlap = 0.0

    @initialize(rates=st.lists(st.sampled_from(RATES), min_size=2, max_size=3))
    def begins(self, rates: list[float]) -> None:
        """The processes start, each with a clock of its own."""
        self.world = LeaseWorld(rates, server=self.server, timing=self.timing, overlap=self.overlap)
        self.world.server.copy_to_standby()
        self.world.run(1.0)

    @rule(number=some_process, hold=some_hold, lateness=some_lateness)
    def writes_slowly(self, number: int, hold: float, lateness: float) -> None:
        """Transactions stay open after their fence; writers go on after the end of the term."""
        process = self.one(number)
        process.hold, process.lateness = hold, lateness

    @rule(number=some_process, request=some_delay, seconds=some_seconds)
    def lets_go(self, number: int, request: float | None, seconds: float) -> None:
        """A block ends, and its lease is released, which may be slow, or lost."""
        process = self.one(number)
        process.connection.faults.append(Fault(request))
        process.let_go()
        self.world.run(seconds)


class Leases(Damage, Holders):
    """More faults."""

    @rule(name=some_name, seconds=some_seconds)
    def is_asked_for(self, name: str, seconds: float) -> None:
        """Somebody asks whoever holds a lease to give it up."""
        self.world.announce_wish(name)
        self.world.run(seconds)

    @precondition(lambda self: self.clock_may_be_set_back())
    @rule(seconds=st.sampled_from([1, 7]))
    def clock_of_the_database_is_set_back(self, seconds: int) -> None:
        """The database's clock is set back, by less than the time of a lease in all."""
        self.world.server.set_clock(timedelta(seconds=-seconds, microseconds=3))

    @rule(seconds=some_seconds)
    def database_crashes(self, seconds: float) -> None:
        """The database restarts uncleanly."""
        self.world.server.crash()
        self.world.run(seconds)

    def clock_may_be_set_back(self) -> bool:
        """Not by so much that a lease seems to be one of before, nor where the rows are lost from
        which epochs rise."""
        server = self.world.server
        return server.set_back < TIMING.ttl / 2 and not server.has_lost_commits

    def teardown(self) -> None:
        """When nothing is wrong any more, every lease is held."""
        try:
            if hasattr(self, "world") and self.world.violation is None:
                self.world.expect_holders()
        finally:
            super().teardown()


class LeasesOverLostCommits(Leases):
    """Faults of the database: a standby takes over without the last commits, or its clock is
    set."""

    overlap = TIMING.validity_seconds / min(RATES) + 2 * LATENCY

    @rule()
    def standby_is_as_far(self) -> None:
        """A standby has heard all."""
        self.world.server.copy_to_standby()

    @precondition(lambda self: not self.world.server.set_back)
    @rule(seconds=some_seconds)
    def standby_takes_over(self, seconds: float) -> None:
        """What was committed since is lost."""
        self.world.server.fail_over()
        self.world.run(seconds)

    @precondition(lambda self: not self.world.server.has_lost_commits)
    @rule(by=st.sampled_from([17, -20]), seconds=some_seconds)
    def clock_of_the_database_is_set(self, by: int, seconds: float) -> None:
        """The database's clock is set forward, past the end of the leases, or far back."""
        self.world.server.set_clock(timedelta(seconds=by, microseconds=1))
        self.world.run(seconds)


# --- without a protection


class Unfenced(LeaseTable):
    """A fence without a check or lock."""

    def fence(self, _name: str, _epoch: int, **_: object) -> bool:
        """Go on."""
        return True

    def unfence(self, _name: str) -> None:
        """Nothing was locked."""


class UnlockedFence(LeaseTable):
    """A fence that reads the row and does not lock it."""

    def unfence(self, _name: str) -> None:
        """Nothing was locked."""

    def fence(self, name: str, epoch: int, **more: object) -> bool:
        """Look."""
        is_held = super().fence(name, epoch, **more)
        self.fences.clear()
        return is_held


class ReleasingAny(LeaseTable):
    """A release that does not compare the epoch."""

    def is_releasable(self, row: LeaseRow, _epoch: int, holder: str, now: datetime) -> bool:
        """Whether it is the holder's."""
        return super().is_releasable(row, row.epoch, holder, now)


class EpochBlind(ReleasingAny):
    """Statements that compare holder and expiry, but no epoch."""

    def is_renewable(self, row: LeaseRow, _epoch: int, holder: str, now: datetime) -> bool:
        """Whether it is the holder's."""
        return super().is_renewable(row, row.epoch, holder, now)

    def is_fenceable(self, row: LeaseRow, epoch: int, clock: datetime, **more: object) -> bool:
        """Whether it is that of the holder of the epoch."""
        holders = {term.epoch: term.holder for term in self.terms}
        return holders[epoch] == row.holder and super().is_fenceable(row, row.epoch, clock, **more)


class RenewingExpired(LeaseTable):
    """A renewal that does not check the expiry."""

    def is_renewable(self, row: LeaseRow, epoch: int, holder: str, _now: datetime) -> bool:
        """Whether it is that of the term."""
        return row.epoch == epoch and row.holder == holder


def _server(decides: type[LeaseTable]) -> type[LeaseServer]:
    return type(f"{decides.__name__}Server", (LeaseServer,), {"table": decides})


def _without(decides: type[LeaseTable]) -> type[Holders]:
    return type(f"Holders{decides.__name__}", (Holders,), {"server": _server(decides)})


class WithoutMargin(Holders):
    """A local deadline without a margin: it is the end of the lease."""

    timing = WholeLease(TIMING.ttl, TIMING.attempt_interval)


WITHOUT = {
    "the fence": (_without(Unfenced), "came after a newer term's"),
    "the margin": (WithoutMargin, "at once"),
    "epochs": (_without(EpochBlind), "at once|came after a newer term's"),
}


# --- the tests


@pytest.mark.timeout(600)  # a counterexample is made short, which takes time
def test_one_holds_and_no_old_term_writes_after_a_new() -> None:
    """Explore worlds with faults. No two processes, frozen ones included, hold a lease or an epoch
    at once. Epochs rise. No fenced write follows one of a newer term. No process acquires or
    releases a lease while its work of an old term runs. Without faults every lease is held in the
    end."""
    explore(Leases, examples=EXAMPLES // 2, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_fence_holds_over_lost_commits() -> None:
    """If a standby takes over without the last commits, or the database's clock is set, an old
    holder may treat its lease as held until its local deadline. But epochs rise, and none of its
    writes follows one of the new holder."""
    explore(LeasesOverLostCommits, examples=EXAMPLES // 4, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", WITHOUT)
def test_search_finds_what_each_protection_is_for(what: str) -> None:
    """If one protection is missing, the search finds two holders or a late write."""
    machine, found = WITHOUT[what]
    with pytest.raises(Violation, match=found):
        explore(machine, examples=2000, phases=(Phase.generate,))


def test_release_names_its_epoch() -> None:
    """A release that arrives 23 s late, after its holder acquired the lease again, has no effect.
    If it named only the holder, it would end the new term, and another process could acquire the
    lease too."""

    def tell(server: type[LeaseServer]) -> LeaseWorld:
        with closing(LeaseWorld([1.0, 1.0], server=server)) as world:
            first, second = world.processes
            world.run(1.0)
            second.freeze()
            first.connection.faults.append(Fault(request=23.0))
            first.let_go()
            world.run(19.0)
            second.thaw()
            world.run(8.0)
            assert [name for name, _ in world.holders("one")] == ["a"]
            return world

    tell(LeaseServer)
    with pytest.raises(Violation, match="a and b hold one at once"):
        tell(_server(ReleasingAny))


def test_late_renewal_brings_no_term_back() -> None:
    """A renewal that arrives after the release of its lease has no effect. If it did not check the
    expiry, it would block the lease."""

    def tell(server: type[LeaseServer]) -> LeaseWorld:
        with closing(LeaseWorld([1.0, 1.0], server=server)) as world:
            first, second = world.processes
            world.run(4.9)
            second.freeze()
            first.connection.faults.append(Fault(request=2.0))
            world.run(0.6)
            first.stop()
            world.run(4.0)
            second.thaw()
            world.run(0.5)
            assert all(map(world.holders, NAMES))
            return world

    tell(LeaseServer)
    with pytest.raises(Violation, match="which it had released"):
        tell(_server(RenewingExpired))


def test_margin_is_for_clocks_that_differ() -> None:
    """A holder with a slow clock is frozen until another process acquired its lease. With the
    margin it does not treat the lease as held, without it it does."""

    def tell(timing: LeaseTiming) -> LeaseWorld:
        with closing(LeaseWorld([0.95, 1.0], timing=timing)) as world:
            world.run(1.0)
            world.processes[0].freeze()
            world.run(15.0)
            assert [name for name, _ in world.holders("one")] == ["b"]
            return world

    tell(TIMING)
    with pytest.raises(Violation, match="a and b hold"):
        tell(WithoutMargin.timing)


def test_fence_locks_until_the_commit() -> None:
    """A user is frozen between its fence and its commit until its lease has expired. The next
    holder waits for the commit. Without the lock or the fence, the write would follow one of the
    next holder."""

    def tell(server: type[LeaseServer]) -> None:
        with closing(LeaseWorld([1.0, 1.0], server=server)) as world:
            first, second = world.processes
            first.hold, second.pace = 1.0, 0.2
            world.run(3.0)
            first.freeze()
            world.run(13.0)
            first.thaw()
            world.run(20.0)
            assert world.writes

    tell(LeaseServer)
    for decides in (UnlockedFence, Unfenced):
        with pytest.raises(Violation, match="came after a newer term's"):
            tell(_server(decides))


def test_thawed_writer_is_refused() -> None:
    """A user is frozen between its fence and its commit until another one has written. The server
    has ended its transaction, so its later writes are refused."""
    with closing(LeaseWorld([1.0, 1.0])) as world:
        first, second = world.processes
        first.hold, first.lateness = 1.0, 60.0
        world.run(3.0)
        before = world.writes
        first.freeze()
        world.run(30.0)
        assert [name for name, _ in world.holders("one")] == [second.name]
        second.freeze()
        assert world.writes > before
        before = world.writes
        first.thaw()
        world.run(10.0)
        assert world.writes == before
