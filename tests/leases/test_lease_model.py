"""Leases, explored: hypothesis drives the real engines of leases, and users who write through the
fence, through a world of slow clocks, frozen processes and lost messages.

RIVERPY_TEST_SEED explores elsewhere, RIVERPY_TEST_EXAMPLES further.
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
    """What happens to those who want leases at any time."""

    server: type[LeaseServer] = LeaseServer
    timing = TIMING
    overlap = 0.0

    @initialize(rates=st.lists(st.sampled_from(RATES), min_size=2, max_size=3))
    def begins(self, rates: list[float]) -> None:
        """The processes start, each with a clock of its own."""
        self.world = LeaseWorld(rates, server=self.server, timing=self.timing, overlap=self.overlap)
        self.world.server.keep()
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
    """What else happens."""

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
    """And a standby takes over that has not heard the last commits, or the database believes that
    a lease has run out, or was granted before its clock was set back."""

    overlap = TIMING.validity / min(RATES) + 2 * LATENCY

    @rule()
    def standby_is_as_far(self) -> None:
        """A standby has heard all."""
        self.world.server.keep()

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
    """A fence lets everything go on, and keeps nobody waiting."""

    def fence(self, _name: str, _epoch: int, **_: object) -> bool:
        """Go on."""
        return True

    def unfence(self, _name: str) -> None:
        """Nothing was locked."""


class LookedAt(LeaseTable):
    """A fence that looks at the row and does not lock it."""

    def unfence(self, _name: str) -> None:
        """Nothing was locked."""

    def fence(self, name: str, epoch: int, **more: object) -> bool:
        """Look."""
        is_held = super().fence(name, epoch, **more)
        self.fences.clear()
        return is_held


class ReleasingAny(LeaseTable):
    """A release compares no epoch."""

    def is_releasable(self, row: LeaseRow, _epoch: int, holder: str, now: datetime) -> bool:
        """Whether it is the holder's."""
        return super().is_releasable(row, row.epoch, holder, now)


class EpochBlind(ReleasingAny):
    """Holder and expiry are compared, and no epoch."""

    def is_renewable(self, row: LeaseRow, _epoch: int, holder: str, now: datetime) -> bool:
        """Whether it is the holder's."""
        return super().is_renewable(row, row.epoch, holder, now)

    def is_fenceable(self, row: LeaseRow, epoch: int, clock: datetime, **more: object) -> bool:
        """Whether it is that of the holder of the epoch."""
        holders = {term.epoch: term.holder for term in self.terms}
        return holders[epoch] == row.holder and super().is_fenceable(row, row.epoch, clock, **more)


class RenewingExpired(LeaseTable):
    """A renewal does not look whether the term is over."""

    def is_renewable(self, row: LeaseRow, epoch: int, holder: str, _now: datetime) -> bool:
        """Whether it is that of the term."""
        return row.epoch == epoch and row.holder == holder


def _server(decides: type[LeaseTable]) -> type[LeaseServer]:
    return type(f"{decides.__name__}Server", (LeaseServer,), {"table": decides})


def _without(decides: type[LeaseTable]) -> type[Holders]:
    return type(f"Holders{decides.__name__}", (Holders,), {"server": _server(decides)})


class WithoutMargin(Holders):
    """The local deadline is the end of the lease."""

    timing = WholeLease(TIMING.ttl, TIMING.interval)


WITHOUT = {
    "the fence": (_without(Unfenced), "came after a newer term's"),
    "the margin": (WithoutMargin, "at once"),
    "epochs": (_without(EpochBlind), "at once|came after a newer term's"),
}


# --- the tests


@pytest.mark.timeout(600)  # a counterexample is made short, which takes time
def test_one_holds_and_no_old_term_writes_after_a_new() -> None:
    """In no world that was explored do two processes hold a lease at once, frozen ones counted, or
    one epoch; epochs rise; no write through the fence follows one of a newer term; none bids or
    releases while what it did under an old term goes on; and when nothing is wrong any more, every
    lease is held."""
    explore(Leases, examples=EXAMPLES // 2, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(600)
def test_fence_holds_over_lost_commits() -> None:
    """If a standby takes over that has not heard of the last commits, or the database's clock is
    set forward past the end of a lease, or back by more than its time, its old holder may believe
    on until its trust ends, but epochs rise and nothing that it writes comes after a write of the
    new one."""
    explore(LeasesOverLostCommits, examples=EXAMPLES // 4, phases=(Phase.generate, Phase.shrink))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", WITHOUT)
def test_search_finds_what_each_protection_is_for(what: str) -> None:
    """A search finds two who hold a lease, or a late write, if one of the protections is
    missing."""
    machine, found = WITHOUT[what]
    with pytest.raises(Violation, match=found):
        explore(machine, examples=2000, phases=(Phase.generate,))


def test_release_names_its_epoch() -> None:
    """A release that is 23 s on its way, while its holder was granted the lease again: it ends
    nothing, but would end the new term if it named the holder alone, and another be granted the
    lease beside it."""

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
    """A renewal that arrives after the release of its lease: it renews nothing, but would keep the
    lease from everybody if it did not ask whether the term is over."""

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
    """A holder with a slow clock that is frozen until its lease has passed on: with a margin it
    does not believe any more, and without one it would."""

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
    """A user that is frozen between its fence and its commit until its lease has run out: the next
    holder waits for it; without the lock, or without the fence, its write would come after one of
    the next."""

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
    for decides in (LookedAt, Unfenced):
        with pytest.raises(Violation, match="came after a newer term's"):
            tell(_server(decides))


def test_thawed_writer_is_refused() -> None:
    """A user that is frozen between its fence and its commit until another has written: the server
    has ended its transaction, and what it writes on is refused."""
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
