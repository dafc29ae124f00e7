"""Batches: their pauses, and when a pass ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from riverpy._leading.term_fence import FenceTimeoutError
from riverpy._log_events import MAINTENANCE_RUN_CUT_SHORT
from riverpy._maintenance import batch_runner
from riverpy._maintenance.batch_runner import (
    BATCH_PAUSE_MAX,
    BATCH_PAUSE_MIN,
    MaintenanceBatchRunner,
)
from riverpy.errors import FencedOutError
from tests.leading.term_context import StillTimer
from tests.maintenance.fakes import FakeService, context_without_database, lease_of, term

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSAL = asyncpg.ForeignKeyViolationError("an invoice refers to it")


class Numbers:
    """Batches of numbers, of which some fail as the test says. Each statement takes `each` seconds
    of a clock that stands still otherwise."""

    def __init__(self, failing: Callable[[int], Exception | None] = lambda _number: None) -> None:
        self.timer = StillTimer()
        context = context_without_database(self.timer, lease_of(term(1), self.timer))
        self.batch_runner: MaintenanceBatchRunner[int] = MaintenanceBatchRunner(
            FakeService(context), "counting", self._send, row_key=lambda number: number
        )
        self.failing, self.each = failing, 0.0
        self.handled: list[int] = []
        self.sizes: list[int] = []

    async def _send(self, numbers: list[int]) -> None:
        self.sizes.append(len(numbers))
        self.timer.skipped += self.each
        for number in numbers:
            if (error := self.failing(number)) is not None:
                raise error
        self.handled += numbers


@pytest.mark.parametrize("each", [0.0, 0.4, 30.0])
async def test_pauses(each: float) -> None:
    """A pause between two statements lasts for no longer than a statement took, and than a second;
    quick ones leave at most 50 ms."""
    numbers = Numbers()
    numbers.each = each
    for number in range(50):
        await numbers.batch_runner.send_in_batches([number])
    pauses = numbers.timer.sleeps
    assert len(pauses) == 50
    assert all(
        min(each, BATCH_PAUSE_MIN) <= pause <= min(each, BATCH_PAUSE_MAX) for pause in pauses
    )


async def test_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read from behind the last one on, so each row is read once in a pass, also one that
    is refused."""
    monkeypatch.setattr(batch_runner, "PAGE_ROWS_MIN", 10)
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 10)
    numbers = Numbers(lambda number: REFUSAL if number % 7 == 0 else None)
    read: list[int] = []

    async def page(after: int | None, limit: int) -> list[int]:
        first = 0 if after is None else after + 1
        rows = list(range(first, min(first + limit, 95)))
        read.extend(rows)
        return rows

    assert await numbers.batch_runner.read_and_send_pages(page)
    assert read == list(range(95))
    assert sorted(numbers.handled) == [number for number in range(95) if number % 7]


async def test_all_refused(monkeypatch: pytest.MonkeyPatch, log: list[dict[str, Any]]) -> None:
    """Where all rows are refused a pass does not try each of them, which one line says; it
    remembers so many as set aside, and names ten."""
    monkeypatch.setattr(batch_runner, "CONSECUTIVE_FAILURES_MAX", 100)
    monkeypatch.setattr(batch_runner, "SKIPPED_ROWS_MAX", 50)
    numbers = Numbers(lambda _number: REFUSAL)
    assert not await numbers.batch_runner.send_in_batches(range(10_000))
    assert len(numbers.sizes) == 100
    assert await numbers.batch_runner.send_in_batches(())
    assert len(numbers.batch_runner.skipped_rows) <= 50
    warnings = [entry["event"] for entry in log if entry["log_level"] == "warning"]
    assert warnings.count(MAINTENANCE_RUN_CUT_SHORT) == 1
    assert len(warnings) == 12  # with one that the other lines are at debug


@pytest.mark.parametrize("error", [FencedOutError("over"), FenceTimeoutError("busy")])
async def test_errors_that_are_not_of_rows(error: Exception) -> None:
    """A term that is over, or a transaction that cannot begin, blames no row however often it
    comes."""
    numbers = Numbers(lambda _number: error)
    for _ in range(5):
        with pytest.raises(type(error)):
            await numbers.batch_runner.send_in_batches(range(10))
    assert numbers.sizes == [10] * 5
    assert len(numbers.batch_runner.skipped_rows) == 0


async def test_change_of_scope() -> None:
    """Rows that are set aside are forgotten when the scope changes."""
    numbers = Numbers(lambda number: REFUSAL if number == 3 else None)
    for scope, kept in (("all", 1), ("all", 1), ("some", 0)):
        numbers.batch_runner.set_queue_scope(scope)
        assert len(numbers.batch_runner.skipped_rows) == (kept if numbers.sizes else 0)
        if not numbers.sizes:
            await numbers.batch_runner.send_in_batches(range(10))
