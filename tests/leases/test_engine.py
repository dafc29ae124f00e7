"""The engine of a process's leases, with leases and a time that do as told."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import ClientStateError, LeaseLostError, MemoryLeases, StopCause
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.timing import LeaseTiming
from riverpy._log_events import (
    LEASE_ACQUIRED_TOO_LATE,
    LEASE_ACQUISITION_FAILED,
    LEASE_ENGINE_FAILED,
    LEASE_RELEASE_FAILED,
    LEASE_RENEWAL_FAILED,
    LEASE_RENEWAL_RESTORED,
    LEASE_WORK_STOP_TIMED_OUT,
    PROCESS_PAUSED,
    WORK_RAN_PAST_ITS_LEASE,
)
from tests._time import VirtualTimer, settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from riverpy import Lease
    from riverpy._postgres.leases import LeaseAnswer

pytestmark = pytest.mark.usefixtures("log")

TIMING = LeaseTiming(ttl=15.0, interval=5.0)
VALIDITY, GRACE = TIMING.validity, TIMING.grace
TTL = timedelta(seconds=15)


@pytest.fixture
def timer() -> VirtualTimer:
    """Time that moves when told."""
    return VirtualTimer()


class Store(MemoryLeases):
    """Leases in memory. It records calls, and fails as a test says."""

    prefix = "s:"

    def __init__(self, timer: VirtualTimer) -> None:
        super().__init__(timer=timer)
        self.timer = timer
        self.calls: list[tuple[str, Any, float]] = []
        self.faults: deque[Exception | float] = deque()
        """What meets the next calls: an error, or seconds that the answer takes."""
        self.locked: set[str] = set()
        """Names whose rows somebody keeps locked."""
        self.is_down = False
        self.is_closed = False

    def asked(self, verb: str, what: Any = None) -> list[float]:
        """When it was asked this."""
        return [at for called, about, at in self.calls if called == verb and what in {None, about}]

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAnswer | None:
        await self._meet("acquire", name, timeout)
        bid = await super().acquire(name, holder, ttl, timeout=timeout)
        await self._answer(timeout)
        return bid

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        terms = list(terms)
        await self._meet("renew", len(terms), timeout)
        free = [term for term in terms if term[0] not in self.locked]
        answers = await super().renew(holder, free, timeout=timeout)
        await self._answer(timeout)
        return answers | {name: False for name, _ in terms if name in self.locked}

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        await self._meet("release", name, timeout)
        return await super().release(name, epoch, holder, timeout=timeout)

    async def close(self) -> None:
        self.is_closed = True

    async def _meet(self, verb: str, what: Any, timeout: float) -> None:
        assert timeout > 0
        self.calls.append((verb, what, self.timer.boottime()))
        await asyncio.sleep(0)
        if self.is_down or (self.faults and isinstance(self.faults[0], Exception)):
            fault = self.faults.popleft() if self.faults else None
            raise fault if isinstance(fault, Exception) else ConnectionRefusedError("down")

    async def _answer(self, timeout: float) -> None:
        if self.faults:
            seconds = self.faults.popleft()
            assert isinstance(seconds, float)
            await self.timer.sleep(min(seconds, timeout))
            if seconds > timeout:
                raise TimeoutError("no answer")


@pytest.fixture
def store(timer: VirtualTimer) -> Store:
    """The leases."""
    return Store(timer)


def _engine(store: Store, holder: str = "a", **options: Any) -> LeaseEngine:
    return LeaseEngine(store, holder=holder, timing=TIMING, timer=store.timer, **options)


@pytest.fixture
async def engine(store: Store) -> AsyncGenerator[LeaseEngine]:
    """A engine that is open."""
    async with _engine(store) as engine:
        yield engine


async def _seat(store: Store, name: str = "x", holder: str = "b") -> LeaseAnswer:
    """Let another process have a lease."""
    bid = await MemoryLeases.acquire(store, name, holder, TTL, timeout=1)
    assert bid is not None
    return bid


class Block:
    """A block under a lease, in a task of its own."""

    def __init__(self, engine: LeaseEngine, name: str = "x", **options: Any) -> None:
        self.engine, self.name, self.options = engine, name, options
        self.lease: Lease | None = None
        self.ended_at: float | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.may_end = asyncio.Event()
        self.ends_late: float = 0.0
        """Seconds that it goes on after it was cancelled."""

    async def run(self) -> None:
        timer = self.engine.timer
        try:
            async with self.engine.hold(self.name, **self.options) as self.lease:
                try:
                    await self.may_end.wait()
                except anyio.get_cancelled_exc_class():
                    self.is_cancelled = True
                    self.ended_at = timer.boottime()
                    with anyio.CancelScope(shield=True):
                        await timer.sleep(self.ends_late)
                    raise
        except Exception as error:
            self.error = error


# -- renewing


async def test_one_statement_for_all(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """25 leases are renewed by one statement an interval, and stay held."""
    async with anyio.create_task_group() as tasks:
        blocks = [Block(engine, f"name-{number}") for number in range(25)]
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(20)
        assert len(engine.held.leases) == 25
        store.calls.clear()
        await timer.advance(100)
        assert [what for verb, what, _ in store.calls if verb == "renew"] == [25] * 20
        assert len(store.calls) == 20
        assert all(block.lease is not None and block.lease.is_held for block in blocks)
        for block in blocks:
            block.may_end.set()
    assert engine.held.leases == []


async def test_first_renewal_is_in_time(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A lease whose grant was answered late is renewed an interval after it was asked for."""
    store.faults.append(4.0)
    block, began = Block(engine), timer.boottime()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(6)
        assert store.asked("renew") == [began + 5]
        block.may_end.set()


async def test_slow_answers_do_not_stretch_the_trust(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """LeaseValidity counts from the start of the attempt that was granted, not from its answer."""
    store.faults.append(4.0)
    lease, _ = await _while_moving(timer, engine.try_acquire("x"), 4.0)
    assert lease is not None
    assert lease.valid_for == pytest.approx(VALIDITY - 4)
    await timer.advance(VALIDITY - 4 - 0.1)
    assert lease.is_held
    await timer.advance(0.2)
    assert not lease.is_held
    await lease.wait_lost()


async def test_slow_renewals_do_not_stretch_the_trust(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """Nor does the answer to a renewal that was long in coming."""
    lease = await engine.acquire("x")
    await timer.advance(4)
    store.faults.append(2.0)
    await timer.advance(3 + 0.1)
    assert len(store.asked("renew")) == 1
    assert engine.held.renewals == 1
    assert engine.held.renewal_seconds == pytest.approx(2.0)
    assert lease.valid_for == pytest.approx(VALIDITY - 2.1)
    await engine.release(lease)


async def _while_moving(timer: VirtualTimer, call: Any, seconds: float) -> Any:
    """What a call returns while time is moved on."""
    answers: list[Any] = []

    async def run() -> None:
        answers.append(await call)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await timer.advance(seconds)
    return answers[0]


async def test_granted_too_late(store: Store, timer: VirtualTimer, log: list[Any]) -> None:
    """A lease whose grant is heard when there is no time left to act under it is given back."""
    timing = LeaseTiming(ttl=12.0, interval=5.0)
    store.faults.append(5.0)
    engine = LeaseEngine(store, holder="a", timing=timing, timer=timer)
    bound = timing.validity - timing.grace
    assert bound > 5.0  # no answer of an interval is too late, but for a process that stalled

    async def stall() -> None:
        await settle()
        await timer.stall(bound + 0.1)

    async with engine, anyio.create_task_group() as tasks:
        tasks.start_soon(stall)
        assert (await engine.try_acquire("x"))[0] is None
        assert store.asked("release", "x")
        assert any(line["event"] == LEASE_ACQUIRED_TOO_LATE for line in log)


async def test_renewal_after_the_trust(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """Who renews a lease himself, and comes too late, has lost it, though the server would renew
    it still; a release frees it."""
    lease, _ = await engine.try_acquire("x")
    assert lease is not None
    await timer.advance(VALIDITY + 0.1)
    assert not await engine.held.renew(lease)
    assert store.asked("renew") == []
    assert await engine.release(lease)


async def test_renewals_that_fail(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Renewals that fail are tried again, with one warning, and the block is cancelled a grace
    before the trust ends; a lease that may be held is released when the block has ended."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(5)
        renewed_at = store.asked("renew")[-1]
        store.is_down = True
        await timer.advance(20)
        assert block.is_cancelled
        assert block.ended_at == pytest.approx(renewed_at + VALIDITY - GRACE, abs=0.01)
    assert isinstance(block.error, LeaseLostError)
    assert "could not be renewed in time" in str(block.error)
    assert len(store.asked("renew")) > 3
    levels = [line["log_level"] for line in log if line["event"] == LEASE_RENEWAL_FAILED]
    assert levels[0] == "warning"
    assert set(levels[1:]) == {"debug"}
    assert store.asked("release", "x")
    assert engine.held.renewal_failures == len(levels)


async def test_renewals_that_work_again(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """A failed renewal is tried again soon, and the lease goes on."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(4)
        store.faults.append(ConnectionResetError("gone"))
        await timer.advance(3)
        assert len(store.asked("renew")) == 2
        await timer.advance(60)
        assert block.lease is not None
        assert block.lease.is_held
        assert LEASE_RENEWAL_RESTORED in [line["event"] for line in log]
        block.may_end.set()


async def test_renewal_that_is_not_answered(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A renewal that hangs leaves the time for another one."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(4)
        store.faults.append(60.0)
        await timer.advance(60)
        assert block.lease is not None
        assert block.lease.is_held
        block.may_end.set()


async def test_suspended_machine(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """A machine that was suspended for longer than the trust cancels the block within a second of
    its waking, and a thread hears it at once."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await timer.suspend(60)
        assert block.lease is not None
        assert not block.lease.is_held
        assert not block.is_cancelled
        await timer.advance(1)
        assert block.is_cancelled
    assert isinstance(block.error, LeaseLostError)
    assert any(line["event"] == PROCESS_PAUSED for line in log)


async def test_wait_on_a_suspended_machine(engine: LeaseEngine, timer: VirtualTimer) -> None:
    """Who waits for the loss of a lease that he renews himself hears it soon after the waking."""
    lease, _ = await engine.try_acquire("x")
    assert lease is not None
    heard = asyncio.Event()

    async def wait() -> None:
        await lease.wait_lost()
        heard.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await timer.advance(1)
        await timer.suspend(60)
        assert not heard.is_set()
        await timer.advance(1)
        assert heard.is_set()
        tasks.cancel_scope.cancel()


async def test_passed_on_meanwhile(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A lease that another has is over for this process, without the others that it holds, and is
    not released."""
    first, second = Block(engine, "x"), Block(engine, "y")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        tasks.start_soon(second.run)
        await timer.advance(1)
        store._rows["x"].expires_at = 0.0
        await _seat(store)
        await timer.advance(5)
        assert first.is_cancelled
        assert second.lease is not None
        assert second.lease.is_held
        second.may_end.set()
    assert store.asked("release") != []
    assert not store.asked("release", "x")


async def test_locked_row(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """A lease whose row somebody keeps locked is asked for again until its trust ends, with one
    warning; those beside it go on. One whose row is free again in time goes on, too."""
    blocks = [Block(engine, name) for name in "xyz"]
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(4)
        store.locked = {"x", "y"}
        await timer.advance(VALIDITY - GRACE - 4.5)
        store.locked.remove("y")
        await timer.advance(0.4)
        store.calls.clear()
        await timer.advance(60)
        assert [block.is_cancelled for block in blocks] == [True, False, False]
        assert all(block.lease is not None and block.lease.is_held for block in blocks[1:])
        assert len(store.asked("renew")) < 60
        for block in blocks[1:]:
            block.may_end.set()
    assert "could not be renewed in time" in str(blocks[0].error)
    told = [line for line in log if line["event"] == LEASE_RENEWAL_FAILED]
    assert [line["log_level"] for line in told][:2] == ["warning", "debug"]
    assert told[0]["error"].endswith("leases: x, y")


async def test_slow_renewal_beside_a_locked_row(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """The time that is left to a lease whose row is locked bounds no renewal of the others."""
    blocks = [Block(engine, name) for name in "xy"]
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(4)
        store.locked = {"x"}
        await timer.advance(VALIDITY - GRACE - 4.5)
        assert blocks[0].lease is not None
        assert blocks[0].lease.valid_for - GRACE < 1.0
        failures = engine.held.renewal_failures
        store.faults.append(1.0)
        await timer.advance(5)
        assert engine.held.renewal_failures == failures + 1  # of the lock
        for block in blocks:
            block.may_end.set()


# -- standing by


async def test_bids_at_the_expiry(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """Who stands by bids each interval and a jitter, and when the lease of another expires."""
    began = timer.boottime()
    await _seat(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(16)
        bids = store.asked("acquire", "x")
        assert block.lease is not None
        assert all(5 <= later - earlier <= 6 for earlier, later in pairwise(bids[:-1]))
        assert began + 15 < bids[-1] <= began + 15.06
        assert block.lease.waited == pytest.approx(bids[-1] - began)
        block.may_end.set()


def _payload(action: str, name: str = "s:x", holder: str = "b", epoch: int = 1) -> str:
    return json.dumps({"v": 1, "lease": name, "epoch": epoch, "holder": holder, "action": action})


async def test_hears_a_release(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A release of another process is followed by a bid within 50 ms; what concerns others, or this
    process, or is no message, by none."""
    bid = await _seat(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await MemoryLeases.release(store, "x", bid.epoch, "b", timeout=1)
        for payload in (
            _payload("released", "s:y"),
            _payload("released", "x"),
            _payload("released", holder="a"),
            _payload("something"),
            "no message",
        ):
            engine.receive(payload)
        await timer.advance(0.1)
        assert block.lease is None
        heard_at = timer.boottime()
        engine.receive(_payload("released"))
        await timer.advance(0.06)
        assert block.lease is not None
        assert heard_at <= store.asked("acquire")[-1] <= heard_at + 0.05
        block.may_end.set()


async def test_resync(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """After notifications may have been missed it bids."""
    bid = await _seat(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await MemoryLeases.release(store, "x", bid.epoch, "b", timeout=1)
        engine.wake_all()
        await timer.advance(0.06)
        assert block.lease is not None
        block.may_end.set()


async def test_who_holds_more_bids_later(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A bid is put off by 20 ms for each lease that is held, up to half a second."""
    blocks = [Block(engine, f"name-{number}") for number in range(30)]
    delays: list[float] = []
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            began = timer.boottime()
            tasks.start_soon(block.run)
            await timer.advance(0.6)
            delays.append(store.asked("acquire", block.name)[0] - began)
        for block in blocks:
            block.may_end.set()
    assert delays == pytest.approx([min(0.02 * held, 0.5) for held in range(30)])


async def test_max_held(store: Store, timer: VirtualTimer) -> None:
    """No more is held than allowed, also where bids are on their way; the next is had when one is
    given back."""
    async with _engine(store, max_held=2) as engine, anyio.create_task_group() as tasks:
        blocks = [Block(engine, f"name-{number}") for number in range(4)]
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(30)
        held = [block for block in blocks if block.lease is not None]
        assert len(held) == 2
        held[0].may_end.set()
        await timer.advance(1)
        assert len([block for block in blocks if block.lease is not None]) == 3
        for block in blocks:
            block.may_end.set()
        await timer.advance(1)


async def test_time_to_stand_by(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """Who does not want to wait any longer gets a TimeoutError, and at least one bid."""
    await _seat(store)
    for seconds, bids in ((0, 1), (12, 3)):
        store.calls.clear()
        await _seat_again(store)
        block = Block(engine, wait=timedelta(seconds=seconds))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(block.run)
            await timer.advance(seconds + 0.1)
        assert isinstance(block.error, TimeoutError)
        assert len(store.asked("acquire")) >= bids


async def _seat_again(store: Store) -> None:
    row = store._rows["x"]
    assert await MemoryLeases.renew(store, row.holder, [("x", row.epoch)], timeout=1) == {"x": True}


async def test_bids_that_fail(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Bids that fail are tried again at growing delays, no longer than the interval, with one
    warning."""
    store.is_down = True
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(30)
        gaps = [later - earlier for earlier, later in pairwise(store.asked("acquire"))]
        assert gaps[0] < 1.2
        assert 4 < max(gaps) < 6
        store.is_down = False
        await timer.advance(6)
        assert block.lease is not None
        block.may_end.set()
    levels = [
        line["log_level"] for line in log if line["event"].startswith(LEASE_ACQUISITION_FAILED)
    ]
    assert levels[0] == "warning"
    assert set(levels[1:]) == {"debug"}


async def test_outage_is_told_once_for_all_names(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """However many names have no answer to their bids, that is one warning; the next outage is
    another one."""
    blocks = [Block(engine, f"name-{number}") for number in range(20)]
    for block in blocks:
        await MemoryLeases.acquire(store, block.name, "rival", timedelta(hours=1), timeout=1)
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            tasks.start_soon(block.run)
        for outages in (1, 2):
            store.is_down = True
            await timer.advance(20)
            lines = [
                line["log_level"]
                for line in log
                if line["event"].startswith(LEASE_ACQUISITION_FAILED)
            ]
            assert lines.count("warning") == outages
            assert len(lines) >= 20 * outages
            store.is_down = False
            await timer.advance(20)
        tasks.cancel_scope.cancel()


async def test_cancelled_bid(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is won by a bid for which nobody waits any more is given back; a bid that is not
    answered soon after that is given up."""
    for limit, releases in ((30.0, 1), (0.01, 0)):
        monkeypatch.setattr("riverpy._leases.attempt.CANCELLED_ATTEMPT_TIMEOUT", limit)
        store.calls.clear()
        store.faults.append(0.5)
        block, scope, ended = Block(engine), anyio.CancelScope(), anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def run(block: Block, scope: anyio.CancelScope, ended: anyio.Event) -> None:
                with scope:
                    await block.run()
                ended.set()

            tasks.start_soon(run, block, scope, ended)
            await settle()
            assert len(store.asked("acquire")) == 1
            scope.cancel()
            if releases:
                await timer.advance(0.6)
            await ended.wait()
        assert block.lease is None
        assert engine.held.leases == []
        assert len(store.asked("release")) == releases


# -- after the loss


async def test_block_that_goes_on(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """S6: a lease that is lost while its block goes on is neither released nor renewed, and this
    process does not bid for it before the block has ended. The block is told of each 10 s."""
    block, next_block = Block(engine), Block(engine)
    block.ends_late = 100.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await settle()
        tasks.start_soon(next_block.run)
        await timer.advance(1)
        store._rows["x"].expires_at = 0.0
        await timer.advance(5)
        assert block.is_cancelled
        store.calls.clear()
        await timer.advance(90)
        assert store.calls == []
        told = [
            line["seconds"] for line in log if line["event"].startswith(WORK_RAN_PAST_ITS_LEASE)
        ]
        assert told[0] == pytest.approx(GRACE, abs=1.1)
        assert all(10 <= later - earlier <= 11.1 for earlier, later in pairwise(told))
        assert 80 < told[-1] < 96
        await timer.advance(12)
        told = [line for line in log if line["event"].startswith(WORK_RAN_PAST_ITS_LEASE)]
        assert told[-1]["seconds"] < 101
        assert next_block.lease is not None
        next_block.may_end.set()
    assert isinstance(block.error, LeaseLostError)


async def test_lease_that_is_ended(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A lease that is ended from outside is not renewed, and freed by its release if it has not
    lapsed."""
    lease = await engine.acquire("x")
    assert engine.held.leases == [lease]
    assert lease.end("what is done under it goes on", cause=StopCause.CLIENT_STOP)
    assert not lease.end("the first reason counts")
    told: list[str] = []
    lease.when_ended(lambda: told.append("late"))
    assert told == ["late"]
    assert not lease.is_held
    assert lease.cause is StopCause.CLIENT_STOP
    await timer.advance(12)
    assert store.asked("renew") == store.asked("release") == []
    assert await engine.release(lease)
    assert engine.held.leases == []


async def test_asked_to_resign(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A request that names this term ends it; this process gives others an interval's time to bid.
    One that names another term does nothing."""
    block, next_block = Block(engine), Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        assert block.lease is not None
        engine.receive(_payload("resign_requested", holder="a", epoch=block.lease.epoch - 1))
        await settle()
        assert not block.is_cancelled
        engine.receive(_payload("resign_requested", holder="a", epoch=block.lease.epoch))
        asked_at = timer.boottime()
        await settle()
        assert block.is_cancelled
        tasks.start_soon(next_block.run)
        await timer.advance(10)
        assert len(store.asked("release", "x")) == 1
        assert store.asked("acquire")[1] == pytest.approx(asked_at + 5, abs=0.1)
        next_block.may_end.set()


async def test_release_that_fails(store: Store, engine: LeaseEngine, log: list[Any]) -> None:
    """A release that fails frees nothing, says so, and masks no error of the block."""
    with pytest.raises(ZeroDivisionError):
        await _fail_inside(store, engine)
    assert LEASE_RELEASE_FAILED in [line["event"] for line in log]
    assert engine.held.leases == []


async def _fail_inside(store: Store, engine: LeaseEngine) -> None:
    async with engine.hold("x"):
        store.is_down = True
        raise ZeroDivisionError


async def test_block_that_ends_after_the_loss(engine: LeaseEngine) -> None:
    """A block that ends without a wait after its lease was lost does not seem to have succeeded."""

    async def lose() -> None:
        async with engine.hold("x") as lease:
            lease.end("a test says so")

    with pytest.raises(LeaseLostError, match="a test says so"):
        await lose()


async def test_cancelled_by_others_too(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A block that somebody cancels while its lease is lost is cancelled: no error takes the place
    of that. A task that goes on after the loss is not cancelled any more."""
    outcomes: list[str] = []
    waiting, may_go = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        try:
            async with engine.hold("x") as lease:
                try:
                    await may_go.wait()
                finally:
                    lease.end("a test says so")
                    waiting.set()
                    await timer.sleep(1)
        except LeaseLostError:
            outcomes.append("lost")
        await timer.sleep(1)
        outcomes.append("went on")

    scope = anyio.CancelScope()

    async def run_in_scope() -> None:
        with scope:
            await run()
        outcomes.append("cancelled" if scope.cancelled_caught else "not cancelled")

    for is_cancelled in (True, False):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_in_scope)
            await settle()
            if is_cancelled:
                scope.cancel()
            else:
                may_go.set()
            await waiting.wait()
            await timer.advance(2)
        waiting.clear()
        scope = anyio.CancelScope()
    assert outcomes == ["cancelled", "lost", "went on", "not cancelled"]


async def test_effect_that_uses_the_leases(store: Store) -> None:
    """What happens at a commit in memory may use the leases."""
    await _seat(store)
    async with store.transaction() as transaction:
        transaction.on_commit(store.forget)
    assert (await _seat(store)).is_granted


# -- the end


async def test_task_of_the_engine(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """The engine has a task while it keeps anything, and none afterwards; the next lease is
    tended again."""
    for _ in range(2):
        async with engine.hold("x") as lease:
            task = engine.held._task
            assert task is not None
            await timer.advance(30)
            assert lease.is_held
        await settle()
        assert task.done()
        assert timer.sleepers == 0


async def test_close(store: Store, timer: VirtualTimer) -> None:
    """Closing ends what is held, releases it and joins all; who stands by is told."""
    engine = _engine(store)
    await _seat(store, "y")
    block, standing = Block(engine, "x"), Block(engine, "y")
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        tasks.start_soon(standing.run)
        await timer.advance(1)
        task = engine.held._task
        tasks.start_soon(engine.close)
        await timer.advance(0.1)
    assert block.is_cancelled
    assert isinstance(block.error, LeaseLostError)
    assert isinstance(standing.error, ClientStateError)
    assert store.asked("release", "x")
    assert store.is_closed
    assert task is not None
    assert task.done()


async def test_close_during_a_bid(store: Store, timer: VirtualTimer) -> None:
    """What is granted to a engine that is being closed is given back before its store is closed."""
    engine = _engine(store)
    store.faults.append(1.0)
    block = Block(engine)
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        await settle()
        tasks.start_soon(engine.close)
        await settle()
        assert not store.is_closed
        await timer.advance(1.1)
        assert store.is_closed
    assert isinstance(block.error, ClientStateError)
    assert len(store.asked("release", "x")) == 1
    assert engine.held.leases == []


async def test_close_during_a_bid_that_is_not_answered(
    store: Store, timer: VirtualTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is closed when every bid has ended, also those that nobody stands by with: they are
    given up soon, and raise."""
    monkeypatch.setattr("riverpy._leases.attempt.CANCELLED_ATTEMPT_TIMEOUT", 0.01)
    engine = _engine(store)
    ended: list[str] = []

    async def bid() -> None:
        with pytest.raises(TimeoutError, match="closed before the answer came"):
            await engine.try_acquire("y")
        assert not store.is_closed
        ended.append("y")

    block = Block(engine)
    async with anyio.create_task_group() as tasks, engine:
        store.faults.extend((3.0, 3.0))
        tasks.start_soon(bid)
        tasks.start_soon(block.run)
        await settle()
        await engine.close()
        assert ended == ["y"]
        with pytest.raises(ClientStateError):
            await engine.try_acquire("z")
    assert isinstance(block.error, ClientStateError)


async def test_close_during_a_renewal(store: Store, timer: VirtualTimer, log: list[Any]) -> None:
    """A renewal that is under way ends with the engine, and nothing is said of it."""
    engine = _engine(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        await timer.advance(1)
        store.faults.append(4.0)
        await timer.advance(5)
        assert store.asked("renew")
        task = engine.held._task
        assert task is not None
        await engine.close()
        assert task.done()
    await timer.advance(10)
    assert LEASE_RENEWAL_FAILED not in [line["event"] for line in log]


async def test_close_with_a_block_that_goes_on(
    store: Store, timer: VirtualTimer, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits no longer than its bound for a block that goes on, and says that its lease is
    left to lapse."""
    monkeypatch.setattr("riverpy._leases.engine.CLOSE_TIMEOUT", 0.05)
    engine = _engine(store)
    block = Block(engine)
    block.ends_late = 10
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await engine.close()
        assert not store.asked("release")
        events = [line["event"] for line in log if line["log_level"] == "error"]
        assert events == [LEASE_WORK_STOP_TIMED_OUT]
        await timer.advance(10)


async def test_engine_that_fails(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """A fault of the engine's own ends what it holds: a lease that nobody watches is not held."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        store.faults.append(ZeroDivisionError("a fault"))
        await timer.advance(5)
    assert isinstance(block.error, LeaseLostError)
    assert "a fault has ended its renewal" in str(block.error)
    assert [line["log_level"] for line in log if line["event"] == LEASE_ENGINE_FAILED] == ["error"]
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(6)
        assert block.lease is not None
        assert block.lease.is_held
        block.may_end.set()
