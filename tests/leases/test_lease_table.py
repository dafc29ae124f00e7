"""Compares the model of the table of leases with PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from riverpy._postgres import leases
from tests.leases.model_leases import RELEASED, LeaseTable, Locked

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests._database import Schema

SEED = int(os.environ.get("RIVERPY_TEST_SEED", "1"))
STEPS = int(os.environ.get("RIVERPY_TEST_EXAMPLES", "60")) * 10
TTL = timedelta(hours=1)
"""Long enough that no lease expires, or seems too long, by itself."""
MOVES = {
    "expired": timedelta(seconds=-1),
    "held": TTL / 2,
    "before the clock was set back": 3 * TTL,
}
"""Intervals from now, to which a row's expiry may be moved."""
NAMES = ("s:one", "s:two")
HOLDERS = ("a", "b")
WAITS = "waits"
"""The answer of a statement that must wait for a lock."""


class Pair:
    """The model and PostgreSQL. Both get the same statements."""

    def __init__(self, schema: str, sessions: list[asyncpg.Connection], seed: int) -> None:
        self._schema, self._bids, self._users = schema, sessions[0], sessions[1:]
        self._dice = random.Random(seed)
        self._model = LeaseTable()
        self._clock = datetime(2030, 1, 1, tzinfo=UTC)
        self._fenced: list[str | None] = [None] * len(self._users)
        """The lease that the open transaction of each session has fenced."""
        self._terms: list[tuple[str, int, int, str]] = []
        """All granted terms: name, the model's epoch, the real one, holder."""
        self.answers: dict[str, set[object]] = {}

    async def step(self) -> None:
        """Run one random statement."""
        steps: list[Callable[[], Awaitable[tuple[str, object, object]]]] = [
            *[self._acquire] * 4,
            *[self._renew] * 3,
            *[self._fence] * 3,
            *(self._release, self._end, self._move, self._remove),
        ]
        self._clock += timedelta(milliseconds=1)
        what, said, expected = await self._dice.choice(steps)()
        self.answers.setdefault(what.split()[0], set()).add(expected)
        assert said == expected, what

    async def close(self) -> None:
        """End the transactions."""
        for session in self._users:
            if session.is_in_transaction():
                await session.execute("ROLLBACK")

    async def _acquire(self) -> tuple[str, object, object]:
        name, holder = self._name(), self._dice.choice(HOLDERS)
        try:
            answer = self._model.acquire(name, holder, TTL, self._clock, clock=self._clock)
        except Locked:
            answer = None
        real = None
        with suppress(asyncpg.LockNotAvailableError):
            real = await leases.lease_acquire(
                self._bids, self._schema, name=name, holder=holder, ttl=TTL
            )
        if answer and real and answer.is_granted and real.is_granted:
            assert not any(term[0] == name and term[2] >= real.epoch for term in self._terms)
            self._terms.append((name, answer.epoch, real.epoch, holder))
        return f"acquire {name} {holder}", self._result(real, 2), self._result(answer, 1)

    def _result(self, answer: leases.LeaseAcquireResult | None, which: int) -> object:
        if answer is None:
            return WAITS
        number = [term[which] for term in self._terms].index(answer.epoch)
        return (
            answer.is_granted,
            answer.holder,
            number if not answer.is_granted else "new",
            bool(answer.seconds_until_expiry),
        )

    async def _renew(self) -> tuple[str, object, object]:
        given = [self._term() for _ in range(3)]
        holder = given[0][3]
        terms = {name: (ours, real) for name, ours, real, _ in given}
        renewed = self._model.renew(
            holder, [(name, ours) for name, (ours, _) in terms.items()], self._clock
        )
        real = await leases.lease_renew(
            self._bids,
            self._schema,
            holder=holder,
            names_and_epochs=[(name, real) for name, (_, real) in terms.items()],
        )
        return f"renew {terms} {holder}", frozenset(real.items()), frozenset(renewed.items())

    async def _release(self) -> tuple[str, object, object]:
        name, ours, theirs, holder = self._term()
        if self._dice.random() < 0.3:
            holder = self._dice.choice(HOLDERS)
        released = self._model.release(name, ours, holder, self._clock)
        real = await leases.lease_release(
            self._bids, self._schema, name=name, epoch=theirs, holder=holder
        )
        return f"release {name} {holder}", real, released

    async def _fence(self) -> tuple[str, object, object]:
        number = self._dice.randrange(len(self._users))
        if self._users[number].is_in_transaction():
            return await self._end(number)
        session = self._users[number]
        name, ours, theirs, _ = self._term()
        isolation = self._dice.choice(["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
        await session.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        fenced = self._model.fence(
            name, ours, clock=self._clock, has_snapshot=isolation != "READ COMMITTED"
        )
        real = await leases.lease_fence_transaction(
            session,
            self._schema,
            name=name,
            epoch=theirs,
            transaction_timeout=timedelta(minutes=5),
            lock_timeout=timedelta(seconds=30),
        )
        self._fenced[number] = name if fenced else None
        return f"fence {name} {isolation}", real, fenced

    async def _end(self, number: int | None = None) -> tuple[str, object, object]:
        if number is None:
            number = self._dice.randrange(len(self._users))
        session, name = self._users[number], self._fenced[number]
        if session.is_in_transaction():
            await session.execute(self._dice.choice(["COMMIT", "ROLLBACK"]))
        if name is not None:
            self._model.unfence(name)
            self._fenced[number] = None
        return "end", None, None

    async def _move(self) -> tuple[str, object, object]:
        name, to = self._name(), self._dice.choice(list(MOVES))
        if (row := self._model.rows.get(name)) is not None and row.expires_at != RELEASED:
            row.expires_at = self._clock + MOVES[to]
            await self._bids.execute(
                f'UPDATE "{self._schema}".riverpy_lease SET expires_at = now() + $1 '
                "WHERE name = $2",
                *(MOVES[to], name),
            )
        return f"move {name} {to}", None, None

    async def _remove(self) -> tuple[str, object, object]:
        """Delete a row. This waits for a fenced transaction too."""
        name = self._name()
        expected = WAITS if self._model.fences[name] else "DELETE"
        real = WAITS
        with suppress(asyncpg.LockNotAvailableError):
            told = await self._bids.execute(
                f'DELETE FROM "{self._schema}".riverpy_lease WHERE name = $1', name
            )
            real = told.split()[0]
        if expected != WAITS:
            self._model.rows.pop(name, None)
        return f"remove {name}", real, expected

    def _name(self) -> str:
        return self._dice.choice(NAMES)

    def _term(self) -> tuple[str, int, int, str]:
        """Return one of the last granted terms, or one that never existed."""
        return self._dice.choice([*self._terms[-4:], (NAMES[0], 1, 1, HOLDERS[0])])


@pytest.fixture
async def sessions(database_url: str) -> AsyncGenerator[list[asyncpg.Connection]]:
    """Connections: one for attempts, with a lock timeout of nearly zero, and two for fences."""
    opened = [await asyncpg.connect(database_url) for _ in range(3)]
    await opened[0].execute("SET lock_timeout = 20")
    yield opened
    for session in opened:
        session.terminate()


async def test_model_answers_as_postgres(
    schema: Schema, sessions: list[asyncpg.Connection]
) -> None:
    """The same statements on the same rows give the same answers in the model and in PostgreSQL.
    Every kind of answer occurs."""
    pair = Pair(schema.name, sessions, SEED)
    for _ in range(STEPS):
        await pair.step()
    await pair.close()
    assert pair.answers["release"] == pair.answers["fence"] == {True, False}
    assert WAITS in pair.answers["acquire"]
    assert {answer[0] for answer in pair.answers["acquire"] if answer != WAITS} == {True, False}
    assert {len(answer) for answer in pair.answers["renew"]} == {0, 1, 2}


# --- statements that are late

SHORT = timedelta(seconds=0.3)
WAITING = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"


async def test_long_wait_does_not_acquire_a_renewed_lease(
    schema: Schema, sessions: list[asyncpg.Connection]
) -> None:
    """An attempt waits for a fenced transaction while the lease is renewed. It is denied: the
    renewed lease does not count as one from before a change of the clock."""
    holder, user, bidder = sessions
    term = await leases.lease_acquire(holder, schema.name, name="s:one", holder="a", ttl=SHORT)
    assert term is not None

    async def set_end(text: str) -> None:
        await holder.execute(f'UPDATE "{schema.name}".riverpy_lease SET expires_at = {text}')

    transaction = user.transaction()
    await transaction.start()
    await user.execute(f'SELECT FROM "{schema.name}".riverpy_lease FOR KEY SHARE')
    await set_end("clock_timestamp() - interval '1 s'")
    async with asyncio.TaskGroup() as tasks:
        attempt = tasks.create_task(
            leases.lease_acquire(bidder, schema.name, name="s:one", holder="b", ttl=SHORT)
        )
        while not await holder.fetchval(WAITING, bidder.get_server_pid()):
            await asyncio.sleep(0.01)
        await holder.fetchval("SELECT pg_sleep($1)", 2 * SHORT.total_seconds())
        await set_end("clock_timestamp() + ttl")
        await transaction.commit()
    assert attempt.result() is None
    (row,) = await leases.lease_list(holder, schema.name)
    assert (row.holder, row.epoch) == ("a", term.epoch)


async def test_late_renewal_shortens_no_lease(
    schema: Schema, sessions: list[asyncpg.Connection]
) -> None:
    """A renewal that began before another one and runs after it does not shorten the lease."""
    first, second, _ = sessions
    term = await leases.lease_acquire(first, schema.name, name="s:one", holder="a", ttl=TTL)
    assert term is not None
    terms = [("s:one", term.epoch)]
    async with second.transaction():
        await second.fetchval("SELECT now()")
        await first.fetchval("SELECT pg_sleep(0.01)")
        await leases.lease_renew(first, schema.name, holder="a", names_and_epochs=terms)
        (before,) = await leases.lease_list(first, schema.name)
        assert await leases.lease_renew(second, schema.name, holder="a", names_and_epochs=terms)
    (after,) = await leases.lease_list(first, schema.name)
    assert before.expires_at
    assert after.expires_at
    assert after.expires_at > before.expires_at


@pytest.mark.parametrize(
    ("last", "is_ahead"), [(5, False), (2 * 10**18, True)], ids=["behind", "ahead"]
)
async def test_epochs_and_the_clock(schema: Schema, last: int, is_ahead: bool) -> None:
    """An epoch is higher than the last one, and at least the server's clock in microseconds. So
    epochs rise even if a failover has lost the last ones."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:one', $1, 'gone', '1 hour', '-infinity')",
        last,
    )
    before = int(datetime.now(UTC).timestamp() * 1e6) - 10**9
    async with schema.connected() as connection:
        answers = [
            await leases.lease_acquire(connection, schema.name, name=name, holder="a", ttl=TTL)
            for name in ("s:one", "s:new")
        ]
    epochs = [answer.epoch for answer in answers if answer is not None]
    assert min(epochs) > before
    assert (epochs[0] == last + 1) == is_ahead
