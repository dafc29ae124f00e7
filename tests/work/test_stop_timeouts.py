"""The time of a stop, and how much of it each step gets."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import anyio
import pytest

from riverpy._work.stop import StopTimeouts
from tests.work.rig import PATIENCE


def budget(soft: float | None, hard: float) -> StopTimeouts:
    """Return a budget of so many seconds."""
    return StopTimeouts(None if soft is None else timedelta(seconds=soft), timedelta(seconds=hard))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose element is the monotonic time."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_phases(clock: list[float]) -> None:
    """Running jobs get the soft stop timeout. Cancelled jobs get the rest, except the share for
    results. A hard stop leaves the hard stop timeout, and a second one does not extend it."""
    stop = budget(10, 5)
    assert (stop.is_stop_requested, stop.soft_stop_seconds_left()) == (False, 0.0)
    stop.start_timeouts()
    assert stop.is_stop_requested
    clock[0] += 4
    assert (
        stop.soft_stop_seconds_left(),
        stop.stop_seconds_left(),
        stop.seconds_left_for_cancelled_jobs(),
    ) == (6.0, 11.0, 9.0)
    stop.start_hard_stop_timeout()
    assert (stop.stop_seconds_left(), stop.seconds_left_for_cancelled_jobs()) == (5.0, 3.0)
    clock[0] += 4
    stop.start_hard_stop_timeout()
    assert (stop.stop_seconds_left(), stop.seconds_left_for_cancelled_jobs()) == (1.0, 0.0)
    clock[0] += 10
    assert (
        stop.soft_stop_seconds_left(),
        stop.stop_seconds_left(),
        stop.seconds_left_for_cancelled_jobs(),
    ) == (0.0, 0.0, 0.0)


def test_jobs_that_may_go_on_for_any_time(clock: list[float]) -> None:
    """Without a soft stop timeout, the hard stop timeout starts when jobs are cancelled."""
    stop = budget(None, 5)
    stop.start_timeouts()
    clock[0] += 1000
    assert stop.soft_stop_seconds_left() is None
    assert stop.stop_seconds_left() == 5.0
    clock[0] += 2
    assert stop.stop_seconds_left() == 3.0


def test_end_without_a_stop(clock: list[float]) -> None:
    """A run that ends by a fault gives its jobs no soft time, and the hard stop timeout for
    everything."""
    stop = budget(10, 5)
    assert stop.soft_stop_seconds_left() == 0.0
    assert stop.seconds_left_for_cancelled_jobs() == 3.0
    clock[0] += 4
    assert stop.stop_seconds_left() == 1.0


async def test_results_have_a_moment() -> None:
    """After all time was used there is still a short time for results."""
    stop = budget(0, 0.25)
    stop.start_hard_stop_timeout()
    await asyncio.sleep(0.25)
    began = time.monotonic()
    with anyio.fail_after(PATIENCE):
        await stop.wait_until_results_stored(asyncio.Event())
    assert time.monotonic() - began > 0.09


async def test_hard_stop_while_results_are_stored() -> None:
    """A hard stop shortens a running wait for results. A cancellation does not end it."""
    stop, ended = budget(8, 0.1), []

    async def wait() -> None:
        await stop.wait_until_results_stored(asyncio.Event())
        ended.append(True)

    began = time.monotonic()
    stop.start_timeouts()
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            stop.start_hard_stop_timeout()
    assert ended == [True]
    assert time.monotonic() - began < 8
