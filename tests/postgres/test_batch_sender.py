"""Batches that fail: sent in parts, down to the rows that fail alone."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

import asyncpg
import pytest

from riverpy._postgres import batch_sender, skipped_rows
from riverpy._postgres.batch_sender import (
    AdaptiveBatchSize,
    BatchSender,
    BatchStatement,
    ErrorCause,
    RepeatedErrorDetector,
    find_error_cause,
    split_batch,
)
from riverpy._postgres.connection import StatementTimeoutError
from riverpy._postgres.skipped_rows import SkippedRows

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSED = asyncpg.RaiseError("not this one")
TOO_SLOW = asyncpg.QueryCanceledError("canceling statement due to statement timeout")
DAMAGED = asyncpg.InternalServerError("missing chunk number 0 for toast value 1")
LOST = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
LOCKED = asyncpg.LockNotAvailableError("canceling statement due to lock timeout")
AWAY = TimeoutError("storing took longer than 10 s: connection refused")
LIMIT = 10.0


class Statements:
    """A server on which statements fail for what their rows are."""

    def __init__(
        self, fails: Callable[[list[int]], Exception | None], *, maximum: int = 1_000
    ) -> None:
        self.fails = fails
        self.sent: list[list[int]] = []
        self.done: list[int] = []
        self.named: list[int] = []
        self.recovered: list[int] = []
        self.too_slow: list[int] = []
        """The size of statements after each that took too long."""
        self.set_aside_rows = SkippedRows[int](retry_delay_min=0.0, retry_delay_max=0.0)
        self.sender = BatchSender(
            BatchStatement(self._send, get_row_id=lambda row: row),
            batch_size=AdaptiveBatchSize(maximum, LIMIT),
            skipped_rows=self.set_aside_rows,
            on_row_skipped=lambda row, _error: self.named.append(row),
            on_row_recovered=self.recovered.append,
            on_batch_too_slow=lambda size, _error: self.too_slow.append(size),
        )

    async def _send(self, rows: list[int]) -> None:
        self.sent.append(rows)
        if (error := self.fails(rows)) is not None:
            raise error
        self.done += rows

    def add(self, count: int) -> None:
        """Have the rows from 1 on sent."""
        for row in range(1, count + 1):
            self.sender.add_row(row)

    async def send(self, steps: int) -> None:
        """Send so many statements, in spite of errors that say nothing."""
        for _ in range(steps):
            try:
                await self.sender.send_batch()
            except (asyncpg.PostgresError, TimeoutError):
                continue


def bad(error: Exception, *rows: int) -> Callable[[list[int]], Exception | None]:
    """Statements with one of these rows fail."""
    return lambda sent: error if set(rows) & set(sent) else None


@pytest.mark.parametrize(
    "error", [REFUSED, TOO_SLOW, DAMAGED, LOST], ids=lambda one: type(one).__name__
)
async def test_one_bad_row(error: Exception) -> None:
    """One row among 500 that fails every statement stops no other, whatever the error is: all
    others are sent within few statements, and few of these fail."""
    statements = Statements(bad(error, 333))
    statements.add(500)
    await statements.send(60)
    assert sorted(statements.done) == [*range(1, 333), *range(334, 501)]
    before_alone = [rows for rows in statements.sent if 333 in rows and len(rows) > 1]
    assert len(before_alone) <= 4
    assert statements.named == [333]
    assert statements.too_slow == ([250, 11] if error is TOO_SLOW else [])
    statements.fails = lambda _rows: None
    while len(statements.sender):
        await statements.send(1)
    assert statements.recovered == [333]


async def test_rows_flow_past_a_bad_one() -> None:
    """While the bad row of a batch is searched, every second statement is one of new rows."""
    statements = Statements(bad(TOO_SLOW, 1), maximum=10)
    statements.add(100)
    await statements.send(12)
    new = [rows for rows in statements.sent[1:] if rows[0] > 10]
    assert len(new) >= 5


async def test_a_row_that_is_tried_again_goes_alone() -> None:
    """A row that is set aside is sent alone, and new rows are sent between two of its tries."""
    statements = Statements(bad(REFUSED, 1, 2), maximum=10)
    statements.add(60)
    await statements.send(60)
    later = statements.sent[statements.sent.index([1]) :]
    assert all(len(rows) == 1 for rows in later if {1, 2} & set(rows))
    assert sorted(statements.done) == [*range(3, 61)]


@pytest.mark.parametrize("each", [0.001, 0.1, 1.0, 3.0])
async def test_slow_rows(each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow rows are, batches shrink to what the time limit allows; they do not run into it
    again and again, and are no smaller than they must be."""
    now = 0.0
    failed = 0

    def take(rows: list[int]) -> Exception | None:
        nonlocal now, failed
        now += min(each * len(rows), LIMIT)
        if each * len(rows) <= LIMIT:
            return None
        failed += 1
        return TOO_SLOW

    monkeypatch.setattr("time.monotonic", lambda: now)
    statements = Statements(take)
    statements.add(3_000)
    while len(statements.sender):
        await statements.send(1)
    assert sorted(statements.done) == [*range(1, 3_001)]
    assert failed <= 10
    full = max(map(len, statements.sent[-20:]))
    assert each * full >= LIMIT / 8 or full == 1_000
    assert statements.named == []


async def test_every_row_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each row alone takes too long, each is set aside by name, after it failed twice."""
    now = 0.0

    def fail(_rows: list[int]) -> Exception:
        nonlocal now
        now += LIMIT
        return TOO_SLOW

    monkeypatch.setattr("time.monotonic", lambda: now)
    statements = Statements(fail)
    statements.add(20)
    for _ in range(200):
        await statements.send(1)
        tries = {entry.row: entry.failure_count for entry in statements.set_aside_rows.rows}
        assert all(tries[row] > 1 for row in statements.named)
        now += 1.0
    assert sorted(statements.named) == [*range(1, 21)]
    assert len(statements.sender) == 20
    assert all(entry.failure_count > 1 for entry in statements.set_aside_rows.rows)


async def test_size_grows_again() -> None:
    """Quick full batches double the next one up to the maximum; slow or partial ones do not."""
    size = AdaptiveBatchSize(100, LIMIT)
    size.shrink(100)
    size.shrink(50)
    assert size.row_count == 25
    size.grow_if_fast(24, 0.1)
    size.grow_if_fast(25, LIMIT / 3)
    assert size.row_count == 25
    size.grow_if_fast(25, 0.1)
    assert size.row_count == 50
    size.grow_if_fast(50, 0.1)
    size.grow_if_fast(100, 0.1)
    assert size.row_count == 100
    size.shrink(1)
    size.shrink(1)
    assert size.row_count == 1


async def test_search_among_the_first_rows() -> None:
    """A statement that takes the first rows that it finds does not grow before it got past those
    that failed it."""
    size = AdaptiveBatchSize(500, LIMIT)
    size.shrink_after_failed_selection(500)
    assert size.row_count == 22
    for _ in range(21):
        size.grow_if_fast(22, 0.0)
    assert size.row_count == 22
    size.shrink_after_failed_selection(22)
    size.shrink_after_failed_selection(4)
    assert size.row_count == 1
    size.grow_if_fast(1, 0.0)
    assert size.row_count == 1
    size.allow_growth()
    size.grow_if_fast(1, 0.0)
    assert size.row_count == 2


async def test_server_that_is_away() -> None:
    """While nothing can be sent no row is set aside and no batch becomes smaller; then all is
    sent."""
    statements = Statements(lambda _rows: AWAY)
    statements.add(500)
    await statements.send(50)
    assert statements.sender.batch_size.row_count == 1_000
    assert len(statements.sender) == 500
    statements.fails = lambda _rows: None
    await statements.send(1)
    assert (len(statements.done), statements.named) == (500, [])


async def test_error_that_passes() -> None:
    """A batch is sent again as it is after an error that came once."""
    errors: list[Exception] = [LOST, DAMAGED]
    statements = Statements(lambda _rows: errors.pop() if errors else None)
    statements.add(500)
    await statements.send(3)
    assert [len(rows) for rows in statements.sent] == [500] * 3
    assert len(statements.done) == 500


async def test_all_rows_fail_for_a_while() -> None:
    """Where nothing succeeds few rows are tried alone before the sender pauses; the first success
    makes all due that are set aside."""
    statements = Statements(lambda _rows: REFUSED, maximum=500)
    statements.set_aside_rows = statements.sender.skipped_rows = SkippedRows(retry_delay_min=60.0)
    statements.add(500)
    count = 0
    while statements.sender.can_send_now:
        await statements.send(1)
        count += 1
    assert count < 20
    assert len(statements.named) <= count
    statements.fails = lambda _rows: None
    await statements.sender.send_all_due_rows()
    assert len(statements.done) == 500
    assert sorted(statements.recovered) == sorted(statements.named)


async def test_pause_ends_with_a_success() -> None:
    """While the sender pauses it tries rows that are set aside; when one succeeds the others go on
    at once."""
    statements = Statements(lambda _rows: REFUSED)
    statements.set_aside_rows = statements.sender.skipped_rows = SkippedRows(retry_delay_min=60.0)
    statements.add(500)
    while statements.sender.can_send_now:
        await statements.send(1)
    statements.sender._paused_until += 60.0
    statements.set_aside_rows.make_all_rows_due()
    statements.fails = lambda _rows: None
    await statements.send(2)
    (retried,), sent = statements.sent[-2:]
    assert retried in statements.named
    assert sent[0] not in statements.named


async def test_time_to_send() -> None:
    """After its time the sender tells whether rows are left, but for those that are set aside."""
    statements = Statements(bad(REFUSED, 1))
    statements.add(2)
    assert not await statements.sender.send_all_due_rows(timeout=0.0)
    assert statements.sent == []
    await statements.send(2)
    assert not await statements.sender.send_all_due_rows(timeout=0.0)
    await statements.send(1)
    assert await statements.sender.send_all_due_rows(timeout=0.0)
    assert statements.sender.unsent_rows == [1]


async def test_rows_that_are_forgotten() -> None:
    """Rows that are discarded are not sent; one that was set aside and forgotten is a new row."""
    statements = Statements(bad(REFUSED, 1))
    statements.set_aside_rows = statements.sender.skipped_rows = SkippedRows(retry_delay_min=60.0)
    for _ in range(2):
        statements.add(3)
        await statements.send(2)
        statements.sender.discard_unsent_rows()
        assert statements.sender.unsent_rows == [1]
        statements.sender.forget_skipped_row(1)
    assert statements.sent == [[1, 2, 3], [1], [1], [2]]
    assert statements.named == [1, 1]


async def test_row_that_succeeds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a row that is set aside succeeds, the others are tried at once: what failed them all may
    be over."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    statements = Statements(bad(REFUSED, 1, 2))
    statements.set_aside_rows = statements.sender.skipped_rows = SkippedRows(retry_delay_min=1.0)
    statements.add(3)
    while statements.sender.can_send_now:
        await statements.send(1)
    now = statements.sender.next_send_at
    await statements.send(1)
    statements.fails = lambda _rows: None
    await statements.send(2)
    assert statements.done == [3, 2, 1]


async def test_row_that_is_set_aside_and_added_again() -> None:
    """It stays set aside, and fails no other."""
    statements = Statements(bad(REFUSED, 1))
    statements.set_aside_rows = statements.sender.skipped_rows = SkippedRows(retry_delay_min=60.0)
    for _ in range(2):
        statements.add(2)
        await statements.send(3)
    assert statements.sent == [[1, 2], [1], [2], [2]]


async def test_server_that_is_away_at_a_retry() -> None:
    """A row that is set aside is not sent twice after it."""
    statements = Statements(bad(REFUSED, 1))
    statements.add(1)
    await statements.send(1)
    statements.fails = lambda _rows: AWAY
    await statements.send(2)
    assert statements.sender.unsent_rows == [1]


async def test_two_rows_of_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows with one id go in two statements, also when one of them is set aside."""
    monkeypatch.setattr("time.monotonic", lambda: 1.0)  # so that no statement takes time
    sent: list[list[tuple[int, int]]] = []
    fails = True

    async def send(rows: list[tuple[int, int]]) -> None:
        sent.append(rows)
        if fails:
            raise REFUSED

    named: list[tuple[int, int]] = []
    sender = BatchSender(
        BatchStatement(send, get_row_id=lambda row: row[0], get_skipped_row_key=lambda row: row),
        batch_size=AdaptiveBatchSize(10, LIMIT),
        skipped_rows=SkippedRows(retry_delay_min=0.0, retry_delay_max=0.0),
        on_row_skipped=lambda row, _error: named.append(row),
    )
    sender.add_row((1, 1))
    sender.add_row((1, 2))
    for _ in range(4):
        await sender.send_batch()
    assert set(named) == set(sender.unsent_rows) == {(1, 1), (1, 2)}
    fails = False
    await sender.send_all_due_rows()
    assert all(len(rows) == 1 for rows in sent)
    assert len(sender) == 0


def test_delays_of_a_row_that_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed try doubles the delay up to its maximum; slow tries leave most of the time to
    others."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    aside = SkippedRows[int](2, retry_delay_min=1.0, retry_delay_max=8.0)
    delays: list[float] = []
    for _ in range(5):
        aside.add_failure(7, 7, REFUSED, 0.0)
        delays.append(aside.next_retry_at - now)
        assert aside.first_due_row() is None
        now = aside.next_retry_at
        assert aside.first_due_row() is not None
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert [entry.first_failed_at for entry in aside.rows] == [100.0]
    assert not aside.is_full
    aside.add_failure(8, 8, TOO_SLOW, 5.0)
    assert aside.is_full
    assert aside.next_retry_at == now
    aside.add_failure(7, 7, TOO_SLOW, 5.0)
    assert aside.next_retry_at == now + 1.0
    aside.remove_row(8)
    assert aside.next_retry_at == now + 20.0
    aside.make_all_rows_due()
    assert aside.next_retry_at == now + 20.0
    aside.remove_row(7)
    assert aside.next_retry_at == math.inf


def test_locked_row_is_tried_again_soon() -> None:
    """However often a row was found locked: a lock ends soon, mostly."""
    aside = SkippedRows[int](retry_delay_min=1.0, retry_delay_max=60.0)
    for _ in range(5_000):
        aside.add_failure(7, 7, LOCKED, 0.0)
    assert aside.next_retry_at - time.monotonic() <= skipped_rows.LOCKED_ROW_RETRY_DELAY_MAX


def test_causes() -> None:
    """Refusals, locked rows and time limits may be the fault of rows at once, an error of another
    class when it is repeated, and waiting for the connection never."""
    errors = RepeatedErrorDetector()
    assert [find_error_cause(error) for error in (REFUSED, TOO_SLOW, DAMAGED, AWAY)] == list(
        ErrorCause
    )
    assert (
        find_error_cause(StatementTimeoutError("storing took longer than 10 s"))
        is ErrorCause.TIMEOUT
    )
    assert find_error_cause(LOCKED) is ErrorCause.BAD_ROW
    assert errors.record_and_check_if_caused_by_row(REFUSED)
    assert errors.record_and_check_if_caused_by_row(TOO_SLOW)
    assert not errors.record_and_check_if_caused_by_row(AWAY)
    assert not errors.record_and_check_if_caused_by_row(AWAY)
    assert not errors.record_and_check_if_caused_by_row(DAMAGED)
    assert not errors.record_and_check_if_caused_by_row(LOST)
    assert errors.record_and_check_if_caused_by_row(DAMAGED)
    assert errors.record_and_check_if_caused_by_row(ConnectionResetError())


def test_causes_of_a_row_that_is_tried_again() -> None:
    """An error of any class may be the row's fault at once, since it failed alone before; but a
    connection that is lost once is not."""
    assert RepeatedErrorDetector().record_and_check_if_caused_by_row(DAMAGED, is_retry=True)
    errors = RepeatedErrorDetector()
    assert not errors.record_and_check_if_caused_by_row(LOST, is_retry=True)
    assert errors.record_and_check_if_caused_by_row(LOST, is_retry=True)


def test_which_errors_are_the_same() -> None:
    """Those of one code of the server. A fault of ours is never that of a row."""
    errors = RepeatedErrorDetector()
    first, second = asyncpg.PostgresError("one"), asyncpg.PostgresError("two")
    first.sqlstate, second.sqlstate = "XX001", "XX002"
    assert not errors.record_and_check_if_caused_by_row(first)
    assert not errors.record_and_check_if_caused_by_row(second)
    assert errors.record_and_check_if_caused_by_row(first)
    for _ in range(2):
        assert not errors.record_and_check_if_caused_by_row(ValueError("ours"))


def test_repetition_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that comes again after a long time is not repeated."""
    errors = RepeatedErrorDetector()
    assert not errors.record_and_check_if_caused_by_row(LOST)
    monkeypatch.setattr(batch_sender, "REPEATED_ERROR_WINDOW", 0.0)
    assert not errors.record_and_check_if_caused_by_row(LOST)


def test_split() -> None:
    """The parts hold all rows in their order, and each is smaller than the whole."""
    for count in (2, 3, 4, 5, 17, 500, 5_000):
        rows = random.sample(range(10_000), count)
        parts = split_batch(rows)
        assert [row for part in parts for row in part] == rows
        assert max(map(len, parts)) <= math.isqrt(count) < count or max(map(len, parts)) == 1
