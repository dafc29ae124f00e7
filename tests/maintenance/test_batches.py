"""Batches: their size, their pauses, and what a timeout does to them."""

from __future__ import annotations

import asyncpg
import pytest

from riverpy._maintenance.batches import (
    BATCH_SIZE,
    PAUSE_MAX,
    PAUSE_MIN,
    REDUCED_SIZE,
    TIMEOUT_WINDOW,
    Batches,
)
from riverpy._maintenance.mandate import FenceBusyError
from tests.maintenance.office import StillTimer

TIMEOUT = asyncpg.QueryCanceledError("canceling statement due to statement timeout")


class Log:
    """Counts warnings."""

    def __init__(self) -> None:
        self.warnings = 0

    def warning(self, *_args: object, **_values: object) -> None:
        self.warnings += 1


class Steps:
    """Batches whose steps do what the test says: find so many rows, raise, or take so long."""

    def __init__(self) -> None:
        self.timer = StillTimer()
        self.log = Log()
        self.batches = Batches(self.timer, self.log)
        self.sizes: list[int] = []

    async def run(self, *outcomes: int | Exception, each: float = 0.0) -> None:
        self.sizes = []
        left = list(outcomes)

        async def step(size: int) -> int:
            self.sizes.append(size)
            self.timer.skipped += each
            outcome = left.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        await self.batches.run(step)
        assert not left


async def test_until_all_are_done() -> None:
    """MC7: batches follow each other until one is not full, with a pause after each full one."""
    steps = Steps()
    await steps.run(BATCH_SIZE, BATCH_SIZE, 3)
    assert steps.sizes == [BATCH_SIZE] * 3
    assert len(steps.timer.sleeps) == 2


@pytest.mark.parametrize("each", [0.0, 0.4, 30.0])
async def test_pauses(each: float) -> None:
    """A pause is at least 50 ms, and at most as long as the batch took and a second."""
    steps = Steps()
    await steps.run(*[BATCH_SIZE] * 50, 0, each=each)
    most = min(max(each, PAUSE_MIN), PAUSE_MAX)
    assert all(PAUSE_MIN <= pause <= most for pause in steps.timer.sleeps)
    assert len(set(steps.timer.sleeps)) > 1 or each == 0.0


async def test_reduced_after_timeouts() -> None:
    """MC8: after three timeouts one after the other batches are small, for good."""
    steps = Steps()
    await steps.run(TIMEOUT, TimeoutError(), TIMEOUT, REDUCED_SIZE, 0)
    assert steps.sizes == [BATCH_SIZE] * 3 + [REDUCED_SIZE] * 2
    await steps.run(0)
    assert steps.sizes == [REDUCED_SIZE]
    assert steps.log.warnings == 1


async def test_success_in_between() -> None:
    """MC9: a success between timeouts forgets those before it."""
    steps = Steps()
    await steps.run(TIMEOUT, TIMEOUT, BATCH_SIZE, TIMEOUT, TIMEOUT, 0)
    assert steps.sizes == [BATCH_SIZE] * 6


async def test_old_timeouts() -> None:
    """Timeouts that are ten minutes apart are not one after the other."""
    steps = Steps()
    await steps.run(TIMEOUT, TIMEOUT, TIMEOUT, 0, each=TIMEOUT_WINDOW / 2)
    assert steps.sizes == [BATCH_SIZE] * 4


async def test_other_errors() -> None:
    """Other errors end the pass; they neither count as timeouts nor forget them."""
    steps = Steps()
    for error in (ConnectionError(), FenceBusyError()):
        with pytest.raises(type(error)):
            await steps.run(TIMEOUT, error)
    await steps.run(TIMEOUT, 0)
    assert steps.sizes == [BATCH_SIZE, REDUCED_SIZE]


async def test_timeout_of_a_small_batch() -> None:
    """A small batch that takes too long ends the pass, which is tried again as after any error."""
    steps = Steps()
    with pytest.raises(asyncpg.QueryCanceledError):
        await steps.run(TIMEOUT, TIMEOUT, TIMEOUT, TIMEOUT)
    assert steps.sizes == [BATCH_SIZE] * 3 + [REDUCED_SIZE]
