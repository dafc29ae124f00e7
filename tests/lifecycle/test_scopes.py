"""StopScope and ServiceGroup: causes, shields, order, faults; signals and delays."""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from datetime import UTC, timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
import pytest

import riverpy._clock
import riverpy._lifecycle
from riverpy._clock import Backoff, Clock
from riverpy._lifecycle import (
    ServiceGroup,
    StopCause,
    StopScope,
    TestSignal,
    await_in_separate_task,
)
from tests._time import settle

if TYPE_CHECKING:
    from anyio.abc import TaskStatus


def test_timer_without_unix_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On systems without Unix clocks, such as Windows, the timer uses the monotonic clock."""
    plain = ModuleType("time")
    for name in ("time", "monotonic", "perf_counter", "sleep"):
        setattr(plain, name, getattr(time, name))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "time", plain)
        module = runpy.run_path(riverpy._clock.__file__)
    before = time.monotonic()
    assert before <= module["Timer"]().seconds_since_boot() <= time.monotonic()


async def test_first_cause_wins() -> None:
    """A scope keeps the first cause it was stopped for, and absorbs its own cancellation."""
    scope = StopScope()
    assert scope.cause is None
    with scope:
        scope.stop(StopCause.JOB_TIMEOUT)
        scope.stop(StopCause.HARD_STOP)
        await anyio.sleep(3600)
    assert scope.cause is StopCause.JOB_TIMEOUT


async def test_cause_of_the_parent() -> None:
    """A scope without a cause of its own has its parent's; its own counts first."""
    parent = StopScope()
    child, other = StopScope(parent), StopScope(parent)
    other.stop(StopCause.QUEUE_REMOVED)
    with parent:
        parent.stop(StopCause.CLIENT_STOP)
    assert child.cause is StopCause.CLIENT_STOP
    assert other.cause is StopCause.QUEUE_REMOVED


async def test_cause_is_there_at_the_cancellation() -> None:
    """Cancelled code can read the cause."""
    scope = StopScope()
    seen: list[StopCause | None] = []

    async def work() -> None:
        with scope:
            try:
                await anyio.sleep(3600)
            finally:
                seen.append(scope.cause)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await asyncio.sleep(0)
        scope.stop(StopCause.LEADERSHIP_LOST)
    assert seen == [StopCause.LEADERSHIP_LOST]


@pytest.mark.parametrize("error", [None, LookupError("nothing to undo")])
async def test_cancelled_once(error: Exception | None) -> None:
    """User code in a stopped scope is cancelled once. Each step of its clean-up ends, and an error
    of the clean-up is raised."""
    scope, steps, began = StopScope(), [], anyio.Event()

    async def work() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            for number in range(3):
                await settle()
                steps.append(number)
            if error is not None:
                raise error

    async def host() -> None:
        with scope:
            await await_in_separate_task("work", work)

    hosted = asyncio.get_running_loop().create_task(host())
    await began.wait()
    scope.stop(StopCause.LEASE_LOST)
    with anyio.fail_after(10):
        await asyncio.wait([hosted])
    assert steps == [0, 1, 2]
    assert hosted.exception() is error


async def test_cancelled_by_itself() -> None:
    """User code that cancels its own task has failed, since no stop was requested."""

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await settle()

    with pytest.raises(RuntimeError, match="work cancelled itself"):
        await await_in_separate_task("work", work)


async def test_cancellation_of_somebody_else_passes() -> None:
    """A cancellation from outside passes through a scope that was not stopped."""
    scope = StopScope()
    reached = False
    with anyio.CancelScope() as outer:
        with scope:
            outer.cancel()
            await anyio.sleep(3600)
        reached = True
    assert not reached
    assert scope.cause is None


async def test_shielded_step_is_finished() -> None:
    """A shielded step continues after a stop. The code after it does not."""
    scope = StopScope()
    done: list[str] = []
    with scope:
        with scope.shield_from_stop(60, timeout_after_stop=60):
            scope.stop(StopCause.CLIENT_STOP)
            await anyio.sleep(0.001)
            done.append("step")
        await anyio.sleep(0)
        done.append("after")
    assert done == ["step"]


@pytest.mark.parametrize("when", ["before", "during", "cancelled"])
async def test_shielded_step_has_a_bound_after_a_stop(when: str) -> None:
    """After a stop or a cancellation a shielded step has `timeout_after_stop` seconds, even if it
    starts after that."""
    scope = StopScope()
    with anyio.fail_after(10):
        with scope:
            if when == "before":
                scope.stop(StopCause.CLIENT_STOP)
            with pytest.raises(TimeoutError, match="not finished in time"):  # noqa: PT012, SIM117
                with scope.shield_from_stop(3600, timeout_after_stop=0.01):
                    if when == "during":
                        scope.stop(StopCause.CLIENT_STOP)
                    elif when == "cancelled":
                        scope.cancel("outside")
                    await anyio.sleep(3600)


async def test_shielded_step_has_a_bound() -> None:
    """Without a stop a shielded step has `bound` seconds. Then TimeoutError is raised."""
    with (
        pytest.raises(TimeoutError),
        StopScope() as scope,
        scope.shield_from_stop(0.01, timeout_after_stop=60),
    ):
        await anyio.sleep(3600)


async def test_error_of_a_shielded_step_passes() -> None:
    """An error inside a shielded step is raised unchanged."""
    with (
        pytest.raises(KeyError),
        StopScope() as scope,
        scope.shield_from_stop(1, timeout_after_stop=1),
    ):
        raise KeyError("mine")


class Recorder:
    """A service that records its start and its end."""

    def __init__(self, name: str, log: list[str], *, fault: str = "", slow: int = 0) -> None:
        self.name, self.log, self.fault, self.slow = name, log, fault, slow
        self.cause: StopCause | None = None
        self.crash = asyncio.Event()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        if self.fault == "start":
            raise OSError(f"{self.name} cannot start")
        self.log.append(f"{self.name} up")
        task_status.started()
        try:
            await self.crash.wait()
            raise OSError(f"{self.name} crashed")
        finally:
            self.cause = scope.cause
            with anyio.CancelScope(shield=True):
                for _ in range(self.slow):
                    await asyncio.sleep(0)
            self.log.append(f"{self.name} down")


async def test_groups_stop_from_the_inside_out() -> None:
    """`start` returns when the service has started. Leaving nested groups stops the inner ones
    first and waits for them. The services receive the cause."""
    log: list[str] = []
    outer, first, second = (Recorder(name, log, slow=5) for name in ("outer", "first", "second"))
    async with ServiceGroup() as services:
        await services.start(outer)
        async with ServiceGroup() as inner:
            await inner.start(first)
            await inner.start(second)
            log.append("body")
        log.append("between")
    assert log[:4] == ["outer up", "first up", "second up", "body"]
    assert set(log[4:6]) == {"first down", "second down"}
    assert log[6:] == ["between", "outer down"]
    assert {one.cause for one in (outer, first, second)} == {StopCause.CLIENT_STOP}


async def test_stop_with_another_cause() -> None:
    """The cause of a group's stop reaches its members, and only those."""
    log: list[str] = []
    one, other = Recorder("one", log), Recorder("other", log)
    async with ServiceGroup() as services:
        await services.start(other)
        async with ServiceGroup() as inner:
            await inner.start(one)
            inner.stop(StopCause.LEADERSHIP_LOST)
    assert one.cause is StopCause.LEADERSHIP_LOST
    assert other.cause is StopCause.CLIENT_STOP


async def test_parent_of_a_group() -> None:
    """Members of a group with a parent scope have the parent's cause."""
    log: list[str] = []
    one = Recorder("one", log)
    parent = StopScope()
    with parent:
        async with ServiceGroup(parent) as services:
            await services.start(one)
            parent.stop(StopCause.LEADERSHIP_LOST)
            await anyio.sleep(3600)
    assert one.cause is StopCause.LEADERSHIP_LOST


async def test_service_that_cannot_start() -> None:
    """`start` raises the error of the service. The others are cancelled without a cause."""
    log: list[str] = []
    one = Recorder("one", log)
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with ServiceGroup() as services:
            await services.start(one)
            await services.start(Recorder("two", log, fault="start"))
    assert caught.group_contains(OSError, match="two cannot start")
    assert log == ["one up", "one down"]
    assert one.cause is None


async def test_crash_of_a_member() -> None:
    """A member that fails ends the block and the other members with its error."""
    log: list[str] = []
    one, two = Recorder("one", log), Recorder("two", log)
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with ServiceGroup() as services:
            await services.start(one)
            await services.start(two)
            one.crash.set()
            await anyio.sleep(3600)
    assert caught.group_contains(OSError, match="one crashed")
    assert set(log) == {"one up", "two up", "one down", "two down"}
    assert two.cause is None


async def test_signal() -> None:
    """A signal counts: as many waits pass as there were emits, before or after."""
    signal = TestSignal("tested")
    signal.emit()  # not counted before init
    signal.init()
    signal.emit()
    signal.emit()
    await signal.wait()
    await signal.wait()
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(signal.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        signal.emit()
        signal.emit()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(task.done() for task in waiting) == 2
        signal.emit()


async def test_signal_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without a signal fails with the name of the signal. A wait for a signal without init
    fails too."""
    monkeypatch.setattr(riverpy._lifecycle, "TEST_SIGNAL_TIMEOUT", 0.01)
    signal = TestSignal("Something.happened")
    with pytest.raises(RuntimeError, match=r"Something.happened"):
        await signal.wait()
    signal.init()
    with pytest.raises(TimeoutError, match=r"Something.happened"):
        await signal.wait()


def test_backoff() -> None:
    """Delays double from the minimum to the maximum, with 10 % of jitter, and start again after a
    reset."""
    backoff = Backoff(timedelta(seconds=1), timedelta(seconds=60))
    for expected in (1, 2, 4, 8, 16, 32, 60, 60):
        assert 0.9 * expected <= backoff.next_delay() <= 1.1 * expected
    for _ in range(2000):
        assert backoff.next_delay() <= 66
    backoff.reset()
    assert backoff.next_delay() <= 1.1
    assert len({Backoff(timedelta(1), timedelta(1)).next_delay() for _ in range(10)}) > 1


def test_system_clock() -> None:
    """The clock returns aware UTC times, and seconds that never decrease."""
    clock = Clock()
    assert clock.now().tzinfo is UTC
    assert clock.monotonic() <= clock.monotonic()
