"""LeaseEngine with a fake store and virtual time."""

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
    from riverpy._postgres.leases import LeaseAcquireResult

pytestmark = pytest.mark.usefixtures("log")

TIMING = LeaseTiming(ttl=15.0, attempt_interval=5.0)
VALIDITY, GRACE = TIMING.validity_seconds, TIMING.grace_seconds
TTL = timedelta(seconds=15)


@pytest.fixture
def timer() -> VirtualTimer:
    """Time that a test advances."""
    return VirtualTimer()


class Store(MemoryLeases):
    """Leases in memory. Records calls, and fails as a test configures."""

    lease_name_prefix = "s:"

    def __init__(self, timer: VirtualTimer) -> None:
        super().__init__(timer=timer)
        self.timer = timer
        self.calls: list[tuple[str, Any, float]] = []
        self.faults: deque[Exception | float] = deque()
        """Errors, or seconds of delay, for the next calls."""
        self.locked: set[str] = set()
        """Names whose rows another session keeps locked."""
        self.is_down = False
        self.is_closed = False

    def times_of(self, verb: str, what: Any = None) -> list[float]:
        """Return the times of these calls."""
        return [at for called, about, at in self.calls if called == verb and what in {None, about}]

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        await self._meet("acquire", name, timeout)
        answer = await super().acquire(name, holder, ttl, timeout=timeout)
        await self._answer(timeout)
        return answer

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
        self.calls.append((verb, what, self.timer.seconds_since_boot()))
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
    """The store."""
    return Store(timer)


def _engine(store: Store, holder: str = "a", **options: Any) -> LeaseEngine:
    return LeaseEngine(store, holder=holder, timing=TIMING, timer=store.timer, **options)


@pytest.fixture
async def engine(store: Store) -> AsyncGenerator[LeaseEngine]:
    """An open engine."""
    async with _engine(store) as engine:
        yield engine


async def _acquire_elsewhere(
    store: Store, name: str = "x", holder: str = "b"
) -> LeaseAcquireResult:
    """Let another process acquire a lease."""
    answer = await MemoryLeases.acquire(store, name, holder, TTL, timeout=1)
    assert answer is not None
    return answer


class Block:
    """A block under a lease, in its own task."""

    def __init__(self, engine: LeaseEngine, name: str = "x", **options: Any) -> None:
        self.engine, self.name, self.options = engine, name, options
        self.lease: Lease | None = None
        self.ended_at: float | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.may_end = asyncio.Event()
        self.late_by: float = 0.0
        """Seconds that it keeps running after it was cancelled."""

    async def run(self) -> None:
        timer = self.engine.timer
        try:
            async with self.engine.hold(self.name, **self.options) as self.lease:
                try:
                    await self.may_end.wait()
                except anyio.get_cancelled_exc_class():
                    self.is_cancelled = True
                    self.ended_at = timer.seconds_since_boot()
                    with anyio.CancelScope(shield=True):
                        await timer.sleep(self.late_by)
                    raise
        except Exception as error:
            self.error = error


# -- renewing


async def test_one_statement_for_all(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """25 leases are renewed by one statement in each interval, and stay held."""
    async with anyio.create_task_group() as tasks:
        blocks = [Block(engine, f"name-{number}") for number in range(25)]
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(20)
        assert len(engine.renewer.leases) == 25
        store.calls.clear()
        await timer.advance(100)
        assert [what for verb, what, _ in store.calls if verb == "renew"] == [25] * 20
        assert len(store.calls) == 20
        assert all(block.lease is not None and block.lease.is_held for block in blocks)
        for block in blocks:
            block.may_end.set()
    assert engine.renewer.leases == []


async def test_first_renewal_is_in_time(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """If the answer to an attempt came late, the first renewal is due one interval after the
    attempt."""
    store.faults.append(4.0)
    block, began = Block(engine), timer.seconds_since_boot()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(6)
        assert store.times_of("renew") == [began + 5]
        block.may_end.set()


async def test_slow_answer_does_not_extend_validity(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """The lease is valid from the start of the successful attempt, not from its answer."""
    store.faults.append(4.0)
    lease, _ = await _call_while_time_passes(timer, engine.try_acquire("x"), 4.0)
    assert lease is not None
    assert lease.valid_for == pytest.approx(VALIDITY - 4)
    await timer.advance(VALIDITY - 4 - 0.1)
    assert lease.is_held
    await timer.advance(0.2)
    assert not lease.is_held
    await lease.wait_lost()


async def test_slow_renewal_does_not_extend_validity(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """After a renewal with a slow answer, the lease is valid from the start of the renewal."""
    lease = await engine.acquire("x")
    await timer.advance(4)
    store.faults.append(2.0)
    await timer.advance(3 + 0.1)
    assert len(store.times_of("renew")) == 1
    assert engine.renewer.renewal_count == 1
    assert engine.renewer.last_renewal_seconds == pytest.approx(2.0)
    assert lease.valid_for == pytest.approx(VALIDITY - 2.1)
    await engine.release(lease)


async def _call_while_time_passes(timer: VirtualTimer, call: Any, seconds: float) -> Any:
    """Return the result of a call during which time is advanced."""
    answers: list[Any] = []

    async def run() -> None:
        answers.append(await call)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await timer.advance(seconds)
    return answers[0]


async def test_granted_too_late(store: Store, timer: VirtualTimer, log: list[Any]) -> None:
    """A lease is released if its grant arrives when no time is left to work under it."""
    timing = LeaseTiming(ttl=12.0, attempt_interval=5.0)
    store.faults.append(5.0)
    engine = LeaseEngine(store, holder="a", timing=timing, timer=timer)
    bound = timing.validity_seconds - timing.grace_seconds
    assert bound > 5.0  # no answer of an interval is too late, but for a process that stalled

    async def stall() -> None:
        await settle()
        await timer.stall(bound + 0.1)

    async with engine, anyio.create_task_group() as tasks:
        tasks.start_soon(stall)
        assert (await engine.try_acquire("x"))[0] is None
        assert store.times_of("release", "x")
        assert any(line["event"] == LEASE_ACQUIRED_TOO_LATE for line in log)


async def test_renewal_after_the_deadline(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A lease that its user renews after the local deadline is lost, even if the server would still
    renew it. A release frees it."""
    lease, _ = await engine.try_acquire("x")
    assert lease is not None
    await timer.advance(VALIDITY + 0.1)
    assert not await engine.renewer.renew_lease(lease)
    assert store.times_of("renew") == []
    assert await engine.release(lease)


async def test_renewals_that_fail(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Failed renewals are repeated, with one warning. The block is cancelled one grace period
    before the local deadline. The lease is released after the block, because it may still be
    held."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(5)
        renewed_at = store.times_of("renew")[-1]
        store.is_down = True
        await timer.advance(20)
        assert block.is_cancelled
        assert block.ended_at == pytest.approx(renewed_at + VALIDITY - GRACE, abs=0.01)
    assert isinstance(block.error, LeaseLostError)
    assert "could not be renewed in time" in str(block.error)
    assert len(store.times_of("renew")) > 3
    levels = [line["log_level"] for line in log if line["event"] == LEASE_RENEWAL_FAILED]
    assert levels[0] == "warning"
    assert set(levels[1:]) == {"debug"}
    assert store.times_of("release", "x")
    assert engine.renewer.renewal_failure_count == len(levels)


async def test_renewals_that_work_again(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """A failed renewal is repeated soon, and the lease stays held."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(4)
        store.faults.append(ConnectionResetError("gone"))
        await timer.advance(3)
        assert len(store.times_of("renew")) == 2
        await timer.advance(60)
        assert block.lease is not None
        assert block.lease.is_held
        assert LEASE_RENEWAL_RESTORED in [line["event"] for line in log]
        block.may_end.set()


async def test_renewal_without_an_answer(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A renewal without an answer leaves time for another one."""
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
    """After a suspension longer than the lease, the block is cancelled within a second. A thread
    sees at once that the lease is not held."""
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
    """`wait_lost` returns within a second after a suspension longer than the lease."""
    lease, _ = await engine.try_acquire("x")
    assert lease is not None
    returned = asyncio.Event()

    async def wait() -> None:
        await lease.wait_lost()
        returned.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await timer.advance(1)
        await timer.suspend(60)
        assert not returned.is_set()
        await timer.advance(1)
        assert returned.is_set()
        tasks.cancel_scope.cancel()


async def test_takeover_ends_one_lease(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A lease that another process acquired ends here and is not released. Other leases of this
    process stay held."""
    first, second = Block(engine, "x"), Block(engine, "y")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        tasks.start_soon(second.run)
        await timer.advance(1)
        store._rows["x"].expires_at = 0.0
        await _acquire_elsewhere(store)
        await timer.advance(5)
        assert first.is_cancelled
        assert second.lease is not None
        assert second.lease.is_held
        second.may_end.set()
    assert store.times_of("release") != []
    assert not store.times_of("release", "x")


async def test_locked_row(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Renewals of a lease with a locked row are repeated until its local deadline, with one
    warning. Other leases stay held. So does a lease whose row is unlocked in time."""
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
        assert len(store.times_of("renew")) < 60
        for block in blocks[1:]:
            block.may_end.set()
    assert "could not be renewed in time" in str(blocks[0].error)
    lines = [line for line in log if line["event"] == LEASE_RENEWAL_FAILED]
    assert [line["log_level"] for line in lines][:2] == ["warning", "debug"]
    assert lines[0]["error"].endswith("leases: x, y")


async def test_slow_renewal_beside_a_locked_row(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A lease with a locked row does not shorten the timeout of the other leases' renewals."""
    blocks = [Block(engine, name) for name in "xy"]
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            tasks.start_soon(block.run)
        await timer.advance(4)
        store.locked = {"x"}
        await timer.advance(VALIDITY - GRACE - 4.5)
        assert blocks[0].lease is not None
        assert blocks[0].lease.valid_for - GRACE < 1.0
        failures = engine.renewer.renewal_failure_count
        store.faults.append(1.0)
        await timer.advance(5)
        assert engine.renewer.renewal_failure_count == failures + 1  # of the lock
        for block in blocks:
            block.may_end.set()


# -- waiting


async def test_attempt_at_the_expiry(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A waiting caller tries at each interval plus jitter, and when the other holder's lease
    expires."""
    began = timer.seconds_since_boot()
    await _acquire_elsewhere(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(16)
        attempts = store.times_of("acquire", "x")
        assert block.lease is not None
        assert all(5 <= later - earlier <= 6 for earlier, later in pairwise(attempts[:-1]))
        assert began + 15 < attempts[-1] <= began + 15.06
        assert block.lease.waited == pytest.approx(attempts[-1] - began)
        block.may_end.set()


def _payload(action: str, name: str = "s:x", holder: str = "b", epoch: int = 1) -> str:
    return json.dumps({"v": 1, "lease": name, "epoch": epoch, "holder": holder, "action": action})


async def test_notification_of_a_release(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """A notification that another process released the lease causes an attempt within 50 ms.
    Notifications of other leases, of this process, or with invalid text cause none."""
    held = await _acquire_elsewhere(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await MemoryLeases.release(store, "x", held.epoch, "b", timeout=1)
        for payload in (
            _payload("released", "s:y"),
            _payload("released", "x"),
            _payload("released", holder="a"),
            _payload("something"),
            "no message",
        ):
            engine.receive_notification(payload)
        await timer.advance(0.1)
        assert block.lease is None
        received_at = timer.seconds_since_boot()
        engine.receive_notification(_payload("released"))
        await timer.advance(0.06)
        assert block.lease is not None
        assert received_at <= store.times_of("acquire")[-1] <= received_at + 0.05
        block.may_end.set()


async def test_resync(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """`wake_all` causes an attempt, because notifications may have been missed."""
    held = await _acquire_elsewhere(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await MemoryLeases.release(store, "x", held.epoch, "b", timeout=1)
        engine.wake_all_waiting_callers()
        await timer.advance(0.06)
        assert block.lease is not None
        block.may_end.set()


async def test_delay_by_held_leases(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """An attempt is delayed by 20 ms for each held lease, and at most by half a second."""
    blocks = [Block(engine, f"name-{number}") for number in range(30)]
    delays: list[float] = []
    async with anyio.create_task_group() as tasks:
        for block in blocks:
            began = timer.seconds_since_boot()
            tasks.start_soon(block.run)
            await timer.advance(0.6)
            delays.append(store.times_of("acquire", block.name)[0] - began)
        for block in blocks:
            block.may_end.set()
    assert delays == pytest.approx([min(0.02 * held, 0.5) for held in range(30)])


async def test_max_held(store: Store, timer: VirtualTimer) -> None:
    """A process never holds more than `max_held` leases, also with attempts in progress. When one
    is released, the next one is acquired."""
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


async def test_wait_timeout(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A caller waits for `wait`, with at least one attempt, and then gets a TimeoutError."""
    await _acquire_elsewhere(store)
    for seconds, attempts in ((0, 1), (12, 3)):
        store.calls.clear()
        await _renew_elsewhere(store)
        block = Block(engine, wait=timedelta(seconds=seconds))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(block.run)
            await timer.advance(seconds + 0.1)
        assert isinstance(block.error, TimeoutError)
        assert len(store.times_of("acquire")) >= attempts


async def _renew_elsewhere(store: Store) -> None:
    row = store._rows["x"]
    assert await MemoryLeases.renew(store, row.holder, [("x", row.epoch)], timeout=1) == {"x": True}


async def test_failed_attempts(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Failed attempts are repeated with growing pauses, at most the interval, and with one
    warning."""
    store.is_down = True
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(30)
        gaps = [later - earlier for earlier, later in pairwise(store.times_of("acquire"))]
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


async def test_outage_is_logged_once_for_all_names(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """Failed attempts for many names in one outage log one warning. The next outage logs another
    one."""
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


async def test_cancelled_attempt(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is acquired after its caller was cancelled is released. An attempt without an
    answer is given up soon after the cancellation."""
    for limit, releases in ((30.0, 1), (0.01, 0)):
        monkeypatch.setattr("riverpy._leases.engine.CANCELLED_ACQUIRE_TIMEOUT", limit)
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
            assert len(store.times_of("acquire")) == 1
            scope.cancel()
            if releases:
                await timer.advance(0.6)
            await ended.wait()
        assert block.lease is None
        assert engine.renewer.leases == []
        assert len(store.times_of("release")) == releases


# -- after the loss


async def test_block_that_keeps_running(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """While a block runs after its lease was lost, this process neither releases, renews nor
    acquires the lease. A warning about the block is logged every 10 s (S6)."""
    block, next_block = Block(engine), Block(engine)
    block.late_by = 100.0
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
        lines = [
            line["seconds"] for line in log if line["event"].startswith(WORK_RAN_PAST_ITS_LEASE)
        ]
        assert lines[0] == pytest.approx(GRACE, abs=1.1)
        assert all(10 <= later - earlier <= 11.1 for earlier, later in pairwise(lines))
        assert 80 < lines[-1] < 96
        await timer.advance(12)
        lines = [line for line in log if line["event"].startswith(WORK_RAN_PAST_ITS_LEASE)]
        assert lines[-1]["seconds"] < 101
        assert next_block.lease is not None
        next_block.may_end.set()
    assert isinstance(block.error, LeaseLostError)


async def test_lease_that_is_ended(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A lease that was ended by a call is not renewed. Its release frees it if it has not
    expired."""
    lease = await engine.acquire("x")
    assert engine.renewer.leases == [lease]
    assert lease.end("what is done under it goes on", cause=StopCause.CLIENT_STOP)
    assert not lease.end("the first reason counts")
    lines: list[str] = []
    lease.call_at_end(lambda: lines.append("late"))
    assert lines == ["late"]
    assert not lease.is_held
    assert lease.cause is StopCause.CLIENT_STOP
    await timer.advance(12)
    assert store.times_of("renew") == store.times_of("release") == []
    assert await engine.release(lease)
    assert engine.renewer.leases == []


async def test_release_request(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """A request with the epoch of this term ends it. This process makes no attempt for one
    interval. A request with another epoch has no effect."""
    block, next_block = Block(engine), Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        assert block.lease is not None
        engine.receive_notification(
            _payload("resign_requested", holder="a", epoch=block.lease.epoch - 1)
        )
        await settle()
        assert not block.is_cancelled
        engine.receive_notification(
            _payload("resign_requested", holder="a", epoch=block.lease.epoch)
        )
        requested_at = timer.seconds_since_boot()
        await settle()
        assert block.is_cancelled
        tasks.start_soon(next_block.run)
        await timer.advance(10)
        assert len(store.times_of("release", "x")) == 1
        assert store.times_of("acquire")[1] == pytest.approx(requested_at + 5, abs=0.1)
        next_block.may_end.set()


async def test_release_that_fails(store: Store, engine: LeaseEngine, log: list[Any]) -> None:
    """A release that fails is logged, frees nothing, and does not hide the block's error."""
    with pytest.raises(ZeroDivisionError):
        await _fail_inside(store, engine)
    assert LEASE_RELEASE_FAILED in [line["event"] for line in log]
    assert engine.renewer.leases == []


async def _fail_inside(store: Store, engine: LeaseEngine) -> None:
    async with engine.hold("x"):
        store.is_down = True
        raise ZeroDivisionError


async def test_block_that_ends_after_the_loss(engine: LeaseEngine) -> None:
    """A block that ends without waiting after its lease was lost raises LeaseLostError."""

    async def lose() -> None:
        async with engine.hold("x") as lease:
            lease.end("a test says so")

    with pytest.raises(LeaseLostError, match="a test says so"):
        await lose()


async def test_cancelled_block_of_a_lost_lease(
    store: Store, engine: LeaseEngine, timer: VirtualTimer
) -> None:
    """If a block is cancelled from outside while its lease is lost, the cancellation is raised, not
    LeaseLostError. A task that continues after the loss is not cancelled again."""
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
    """A callback at the commit of a memory transaction can use the leases."""
    await _acquire_elsewhere(store)
    async with store.transaction() as transaction:
        transaction.on_commit(store.forget)
    assert (await _acquire_elsewhere(store)).is_granted


# -- closing


async def test_task_of_the_engine(store: Store, engine: LeaseEngine, timer: VirtualTimer) -> None:
    """The engine has a task only while it has leases. A later lease starts another task."""
    for _ in range(2):
        async with engine.hold("x") as lease:
            task = engine.renewer._renewal_task
            assert task is not None
            await timer.advance(30)
            assert lease.is_held
        await settle()
        assert task.done()
        assert timer.sleepers == 0


async def test_close(store: Store, timer: VirtualTimer) -> None:
    """Closing ends and releases the held leases and joins all tasks. Waiting callers get a
    ClientStateError."""
    engine = _engine(store)
    await _acquire_elsewhere(store, "y")
    block, waiting = Block(engine, "x"), Block(engine, "y")
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        tasks.start_soon(waiting.run)
        await timer.advance(1)
        task = engine.renewer._renewal_task
        tasks.start_soon(engine.close)
        await timer.advance(0.1)
    assert block.is_cancelled
    assert isinstance(block.error, LeaseLostError)
    assert isinstance(waiting.error, ClientStateError)
    assert store.times_of("release", "x")
    assert store.is_closed
    assert task is not None
    assert task.done()


async def test_close_during_an_attempt(store: Store, timer: VirtualTimer) -> None:
    """A lease that is granted while the engine closes is released before the store is closed."""
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
    assert len(store.times_of("release", "x")) == 1
    assert engine.renewer.leases == []


async def test_close_during_an_attempt_without_an_answer(
    store: Store, timer: VirtualTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is closed after all attempts have ended. Attempts without an answer are given up
    soon, and raise."""
    monkeypatch.setattr("riverpy._leases.engine.CANCELLED_ACQUIRE_TIMEOUT", 0.01)
    engine = _engine(store)
    ended: list[str] = []

    async def attempt() -> None:
        with pytest.raises(TimeoutError, match="closed before the answer came"):
            await engine.try_acquire("y")
        assert not store.is_closed
        ended.append("y")

    block = Block(engine)
    async with anyio.create_task_group() as tasks, engine:
        store.faults.extend((3.0, 3.0))
        tasks.start_soon(attempt)
        tasks.start_soon(block.run)
        await settle()
        await engine.close()
        assert ended == ["y"]
        with pytest.raises(ClientStateError):
            await engine.try_acquire("z")
    assert isinstance(block.error, ClientStateError)


async def test_close_during_a_renewal(store: Store, timer: VirtualTimer, log: list[Any]) -> None:
    """A renewal in progress ends when the engine is closed, and nothing is logged."""
    engine = _engine(store)
    block = Block(engine)
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        await timer.advance(1)
        store.faults.append(4.0)
        await timer.advance(5)
        assert store.times_of("renew")
        task = engine.renewer._renewal_task
        assert task is not None
        await engine.close()
        assert task.done()
    await timer.advance(10)
    assert LEASE_RENEWAL_FAILED not in [line["event"] for line in log]


async def test_close_with_a_block_that_keeps_running(
    store: Store, timer: VirtualTimer, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits a limited time for a block. Then it logs that the lease is not released but
    expires."""
    monkeypatch.setattr("riverpy._leases.engine.ENGINE_CLOSE_TIMEOUT", 0.05)
    engine = _engine(store)
    block = Block(engine)
    block.late_by = 10
    async with anyio.create_task_group() as tasks, engine:
        tasks.start_soon(block.run)
        await timer.advance(1)
        await engine.close()
        assert not store.times_of("release")
        events = [line["event"] for line in log if line["log_level"] == "error"]
        assert events == [LEASE_WORK_STOP_TIMED_OUT]
        await timer.advance(10)


async def test_engine_that_fails(
    store: Store, engine: LeaseEngine, timer: VirtualTimer, log: list[Any]
) -> None:
    """An internal error of the engine ends all of its leases, because they are no longer
    renewed."""
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(1)
        store.faults.append(ZeroDivisionError("a fault"))
        await timer.advance(5)
    assert isinstance(block.error, LeaseLostError)
    assert "a fault ended the renewal of leases" in str(block.error)
    assert [line["log_level"] for line in log if line["event"] == LEASE_ENGINE_FAILED] == ["error"]
    block = Block(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(block.run)
        await timer.advance(6)
        assert block.lease is not None
        assert block.lease.is_held
        block.may_end.set()
