"""The row of leaders: what elects, renews, resigns and fences, over real connections."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import structlog

from riverpy import FencedOutError
from riverpy._clock import Timer
from riverpy._leading.leader_stores import LeaderRowStore
from riverpy._leading.term_fence import TermFence
from riverpy._leases.lease import Lease
from riverpy._leases.timing import LeaseTiming
from riverpy._postgres.connection import (
    CallerDatabase,
    ConnectionOutageTracker,
    DedicatedConnection,
    close_connections,
    set_statement_timeout,
)
from riverpy._postgres.driver import DATABASE_ERRORS, connect
from riverpy._postgres.leaders import leader_get, leader_renew, leader_request_resign
from riverpy._postgres.leases import LeaseAcquireResult, epoch_from_acquired_at

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy._postgres.driver import Connection
    from tests._database import Schema, SchemaPool

TTL = timedelta(seconds=30)
BOUND = 30.0
KINDS = ["owned", "injected"]


class Session:
    """A store with a connection of its own, and what is behind it."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.raw: list[Connection] = []
        """Each connection that it ever had."""
        self.outage = ConnectionOutageTracker(client_id="a:1:b")
        self.owned = DedicatedConnection("lease", self.connect, self.outage)
        self.connection: Any = self.owned
        self.store = self._store("a")

    async def connect(self) -> Connection:
        connection = await connect(self.schema.url, application_name="session")
        await set_statement_timeout(connection, timedelta(seconds=5))
        self.raw.append(connection)
        return connection

    async def inject(self) -> None:
        """Work over a connection of somebody else's."""
        self.connection = CallerDatabase(await self.connect())
        self.connection.outage_tracker = self.outage
        self.store = self._store("a")

    def _store(self, leader_id: str) -> LeaderRowStore:
        return LeaderRowStore(self.connection, self.schema.name, leader_id=leader_id, ttl=TTL)

    async def attempt(self, leader_id: str, ttl: timedelta = TTL) -> LeaseAcquireResult | None:
        """The answer to an attempt to become leader."""
        self.store = self._store(leader_id)
        return await self.store.acquire("default", leader_id, ttl, timeout=BOUND)

    async def elect(self, leader_id: str, ttl: timedelta = TTL) -> LeaseAcquireResult | None:
        """The term, if the attempt succeeded."""
        answer = await self.attempt(leader_id, ttl)
        return answer if answer is not None and answer.is_granted else None

    async def renew(self, term: LeaseAcquireResult) -> bool:
        """Whether the term was extended."""
        terms = [("default", term.epoch)]
        return bool(await self.store.renew(term.holder, terms, timeout=BOUND))

    async def resign(self, term: LeaseAcquireResult) -> bool:
        """Whether the term was ended."""
        return await self.store.release("default", term.epoch, term.holder, timeout=BOUND)

    async def close(self) -> None:
        await close_connections([self.owned])
        for connection in self.raw:
            connection.terminate()


@asynccontextmanager
async def sessions(
    schema: Schema, count: int = 1, kind: str = "owned"
) -> AsyncGenerator[list[Session]]:
    """Stores of so many processes."""
    made = [Session(schema) for _ in range(count)]
    try:
        for session in made:
            if kind == "injected":
                await session.inject()
        yield made
    finally:
        for session in made:
            await session.close()


@pytest.fixture(params=KINDS)
async def session(schema: Schema, request: pytest.FixtureRequest) -> AsyncGenerator[Session]:
    """A store over a connection of its own, and one over somebody else's."""
    async with sessions(schema, kind=request.param) as (made,):
        yield made


async def expire(schema: Schema, by: str = "1 second") -> None:
    """Let the lease have run out."""
    await schema.execute("UPDATE river_leader SET expires_at = now() - $1::text::interval", by)


async def rows(schema: Schema) -> list[tuple[Any, ...]]:
    """Who is in the table."""
    return [tuple(row) for row in await schema.fetch("SELECT leader_id FROM river_leader")]


@pytest.mark.parametrize("state", ["missing", "expired"])
async def test_race_has_one_winner(schema: Schema, state: str) -> None:
    """Eight bid at once for a row that is free or missing: one wins, the others hear who, or that
    somebody just has."""
    if state == "expired":
        await schema.execute(
            "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
            " VALUES ('old', now() - interval '9 s', now() - interval '1 s')"
        )
    async with sessions(schema, 8) as made, anyio.create_task_group() as tasks:
        bids: dict[str, Any] = {}

        async def bid(name: str, session: Session) -> None:
            bids[name] = await session.attempt(name)

        for number, one in enumerate(made):
            tasks.start_soon(bid, f"p{number}", one)
    (winner,) = [name for name, answer in bids.items() if answer is not None and answer.is_granted]
    assert await rows(schema) == [(winner,)]
    for name, answer in bids.items():
        if name != winner and answer is not None:
            assert answer.holder == winner
            assert 20 < answer.seconds_until_expiry < 40  # one may have waited, or come late


async def test_row_is_made_by_another(session: Session, schema: Schema) -> None:
    """Of two who make the missing row at once, the second is denied when the first has committed,
    and hears no error."""
    bids: list[Any] = []

    async def bid() -> None:
        bids.append(await session.attempt("a"))

    await session.elect("a")
    await schema.execute("TRUNCATE river_leader")
    async with (
        schema.connected() as other,
        anyio.create_task_group() as tasks,
        other.transaction(),
    ):
        await other.execute(GO_INSERT)
        tasks.start_soon(bid)
        await until_waiting(schema, session)
    assert [answer is not None and answer.is_granted for answer in bids] == [False]
    assert await rows(schema) == [("go",)]


async def test_same_holder_is_refused(session: Session) -> None:
    """A second bid of the holder on a fresh lease is no renewal: it is refused, and the lease stays
    as it is."""
    assert await session.elect("a") is not None
    before = await session.schema.fetchrow("SELECT * FROM river_leader")
    bid = await session.attempt("a")
    assert bid is not None
    assert (bid.is_granted, bid.holder) == (False, "a")
    assert await session.schema.fetchrow("SELECT * FROM river_leader") == before


async def test_expired_row_is_taken_over(session: Session, schema: Schema) -> None:
    """An expired row is taken over, by another or by the same; the new term is a later one."""
    first = await session.elect("a")
    await expire(schema)
    second = await session.elect("b")
    await expire(schema)
    third = await session.elect("b")
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.acquired_at < second.acquired_at < third.acquired_at
    assert await rows(schema) == [("b",)]


async def test_term_is_later_than_the_old_one(session: Session, schema: Schema) -> None:
    """The server's clock was set back: a new term of the same client still is a later one."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ('a', now() + interval '1 hour', now() + interval '1 hour')"
    )
    old = await schema.fetchval("SELECT elected_at FROM river_leader")
    await expire(schema)
    term = await session.elect("a")
    assert term is not None
    assert term.acquired_at == old + timedelta(microseconds=1)


async def test_missing_row_heals(session: Session, schema: Schema) -> None:
    """The table is unlogged, so that a crash of the server empties it: the next bid makes the row,
    and the old term can neither renew nor resign."""
    old = await session.elect("a")
    assert old is not None
    await schema.execute("TRUNCATE river_leader")
    assert not await session.renew(old)
    assert await session.elect("b") is not None
    assert not await session.resign(old)
    assert await rows(schema) == [("b",)]


async def test_renewal(session: Session, schema: Schema) -> None:
    """A renewal extends the lease by the server's clock and leaves the term as it is."""
    term = await session.elect("a", timedelta(seconds=5))
    assert term is not None
    assert await session.renew(term)
    async with schema.connected() as connection:
        row = await leader_get(connection, schema.name)
    assert row is not None
    assert (row.leader_id, row.elected_at) == (term.holder, term.acquired_at)
    assert 25 < row.seconds_until_expiry <= 30


async def test_renewal_after_takeover(session: Session, schema: Schema) -> None:
    """A deposed holder can neither extend nor clear its successor, nor a later term of its own id;
    and is told so."""
    old = await session.elect("a")
    assert old is not None
    for successor in ("b", "a"):
        await expire(schema)
        assert not await session.renew(old)
        assert await session.elect(successor) is not None
        row = await schema.fetchrow("SELECT * FROM river_leader")
        assert not await session.renew(old)
        assert not await session.resign(old)
        assert await schema.fetchrow("SELECT * FROM river_leader") == row


async def test_release_is_truthful(session: Session, schema: Schema) -> None:
    """Released is said once, by the call that removed the row."""
    term = await session.elect("a")
    assert term is not None
    assert await session.resign(term)
    assert await rows(schema) == []
    assert not await session.resign(term)


async def test_expired_term_can_be_released(session: Session, schema: Schema) -> None:
    """A term that ran out is released as long as nobody has taken it over."""
    term = await session.elect("a")
    assert term is not None
    await expire(schema)
    assert await session.resign(term)


async def test_two_schemas(schema_pool: SchemaPool) -> None:
    """Each schema has a leader of its own; neither hears of the other's."""
    async with (
        schema_pool.schema() as one,
        schema_pool.schema() as other,
        sessions(one) as (first,),
        sessions(other) as (second,),
    ):
        heard = await listen(one)
        mine = await first.elect("a")
        theirs = await second.elect("b")
        assert mine is not None
        assert theirs is not None
        assert await second.resign(theirs)
        assert await first.renew(mine)
        assert await first.resign(mine)
        assert json.loads(await anext(heard))["leader_id"] == "a"


async def test_payloads(schema: Schema) -> None:
    """What is announced, and where, is River's, byte for byte."""
    heard = await listen(schema)
    async with sessions(schema) as (session,):
        term = await session.elect("notify-client-A")
        assert term is not None
        async with schema.connected() as connection:
            await leader_request_resign(connection, schema.name)
        await session.resign(term)
    assert json.loads(await anext(heard)) == {"action": "request_resign", "leader_id": ""}
    assert await anext(heard) == '{"leader_id" : "notify-client-A", "action" : "resigned"}'


async def test_payload_without_schema(schema: Schema) -> None:
    """Where no schema is given the channel carries the first of the search path."""
    heard = await listen(schema)
    async with schema.connected() as connection:
        injected: Any = CallerDatabase(connection)
        injected.outage_tracker = ConnectionOutageTracker()
        store = LeaderRowStore(injected, None, leader_id="a", ttl=TTL)
        term = await store.acquire("default", "a", TTL, timeout=BOUND)
        assert term is not None
        assert await store.release("default", term.epoch, "a", timeout=BOUND)
    assert json.loads(await anext(heard)) == {"leader_id": "a", "action": "resigned"}


async def test_silent_release(schema: Schema) -> None:
    """A release that released nothing announces nothing."""
    heard = await listen(schema)
    async with sessions(schema) as (session,):
        await session.resign(
            LeaseAcquireResult(
                True, "a", epoch_from_acquired_at(now := datetime.now(UTC)), now, None
            )
        )
        term = await session.elect("b")
        assert term is not None
        await session.resign(term)
    assert json.loads(await anext(heard))["leader_id"] == "b"


async def listen(schema: Schema) -> AsyncGenerator[str]:
    """What is announced on the topic of leaders of this schema, from now on."""
    queue: asyncio.Queue[str] = asyncio.Queue()
    channel = f"{schema.name}.river_leadership"
    connection: Any = schema._connection
    await connection.add_listener(channel, lambda *args: queue.put_nowait(args[3]))

    async def heard() -> AsyncGenerator[str]:
        with anyio.fail_after(BOUND):
            while True:
                yield await queue.get()

    return heard()


# -- beside a leader of River in Go

GO_DELETE_EXPIRED = "DELETE FROM river_leader WHERE expires_at < now()"
GO_INSERT = (
    "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
    " VALUES ('go', now(), now() + interval '15 s') ON CONFLICT DO NOTHING RETURNING elected_at"
)
GO_RENEW = (
    "UPDATE river_leader SET expires_at = now() + interval '15 s'"
    " WHERE leader_id = 'go' AND elected_at = $1 AND expires_at >= now() RETURNING 1"
)


async def go_bid(schema: Schema) -> Any:
    """A bid as Go's clients make it."""
    async with schema.connected() as connection, connection.transaction():
        await connection.execute(GO_DELETE_EXPIRED)
        return await connection.fetchval(GO_INSERT)


async def test_rival_takes_over_and_is_taken_over(session: Session, schema: Schema) -> None:
    """Leadership passes to a client in Go and back; each refuses the other's fresh lease, and each
    deposed one is told so."""
    ours = await session.elect("a")
    assert ours is not None
    assert await go_bid(schema) is None
    await expire(schema)
    theirs = await go_bid(schema)
    assert theirs is not None
    assert not await session.renew(ours)
    assert await session.elect("a") is None
    assert await schema.fetchval(GO_RENEW, theirs) == 1
    await expire(schema)
    assert await session.elect("a") is not None
    assert await schema.fetchval(GO_RENEW, theirs) is None


async def test_rival_resigns_for_all(session: Session, schema: Schema) -> None:
    """A rival's resignation may remove whatever row there is: our term is over then."""
    term = await session.elect("a")
    assert term is not None
    await schema.execute("DELETE FROM river_leader")
    assert not await session.renew(term)
    assert await session.elect("b") is not None


async def test_rivals_race(schema: Schema) -> None:
    """Bids of both languages at once: one wins."""
    async with sessions(schema, 4) as made:
        for _ in range(5):
            won: list[str] = []

            async def ours(session: Session, won: list[str] = won) -> None:
                if await session.elect("py") is not None:
                    won.append("py")

            async def theirs(won: list[str] = won) -> None:
                if await go_bid(schema) is not None:
                    won.append("go")

            async with anyio.create_task_group() as tasks:
                bids: list[Callable[[], Any]] = [theirs, theirs]
                bids += [lambda one=one: ours(one) for one in made]
                random.shuffle(bids)
                for bid in bids:
                    tasks.start_soon(bid)
            assert len(won) == 1
            assert await rows(schema) == [(won[0],)]
            await expire(schema)


# -- the fence


class Fenced:
    """A term, and transactions under it."""

    def __init__(self, session: Session, term: LeaseAcquireResult) -> None:
        timer = Timer()
        self.lease = Lease(
            "default",
            term,
            attempted_at=timer.seconds_since_boot(),
            store=session.store,
            timing=LeaseTiming(ttl=30.0, attempt_interval=10.0),
            timer=timer,
        )
        self.fence = TermFence(self.lease)
        self.connection = DedicatedConnection("maintenance", session.connect, session.outage)

    def transaction(self) -> Any:
        return self.fence.transaction(self.connection, "writing")


async def test_fence_lets_renewals_pass(schema: Schema) -> None:
    """The holder renews while a transaction of its term is open."""
    async with sessions(schema) as (session,):
        term = await session.elect("a")
        assert term is not None
        fenced = Fenced(session, term)
        async with fenced.transaction():
            assert await session.renew(term)
        await fenced.connection.close()


async def test_fence_holds_up_a_takeover(schema: Schema) -> None:
    """A takeover of an expired lease, and a release, wait until an open transaction of the old term
    has committed; a denied bid waits for nobody."""
    async with sessions(schema, 2) as (session, other), anyio.create_task_group() as tasks:
        term = await session.elect("a")
        assert term is not None
        fenced = Fenced(session, term)
        order: list[str] = []

        async def take_over() -> None:
            assert await other.elect("b") is not None
            order.append("taken over")

        async with fenced.transaction():
            denied = await other.attempt("b")
            assert denied is not None
            assert not denied.is_granted
            await expire_from(fenced, session)
            tasks.start_soon(take_over)
            await until_waiting(schema, other)
            order.append("committed")
        await fenced.connection.close()
    assert order == ["committed", "taken over"]


async def expire_from(fenced: Fenced, session: Session) -> None:
    """Let the lease run out although a fence is on it: no other way than a short renewal."""
    async with session.connection.acquire("a short renewal", BOUND) as connection:
        await leader_renew(
            connection,
            session.schema.name,
            leader_id=fenced.lease.holder,
            elected_at=fenced.lease.acquired_at,
            ttl=timedelta(milliseconds=1),
        )
    await session.schema.fetchval("SELECT pg_sleep(0.01)")


async def until_waiting(schema: Schema, session: Session) -> None:
    """Return when the statement of a session waits for a lock."""
    pid = session.raw[-1].get_server_pid()
    with anyio.fail_after(BOUND):
        while not await schema.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid):
            await asyncio.sleep(0.005)


async def test_takeover_waits_bounded(schema: Schema) -> None:
    """A bid that waits for a fence gives up at its bound, and the answer is not known."""
    async with sessions(schema, 2) as (session, other):
        term = await session.elect("a")
        assert term is not None
        fenced = Fenced(session, term)
        async with fenced.transaction():
            await expire_from(fenced, session)
            with pytest.raises(TimeoutError, match="electing a leader"):
                await other.store.acquire("default", "b", TTL, timeout=0.2)
        await fenced.connection.close()


@pytest.mark.parametrize("successor", ["a", "b"])
async def test_fence_refuses_an_old_term(schema: Schema, successor: str) -> None:
    """After another client, or the same client in a later term, became leader, a transaction of the
    old term is refused, and the leader election is notified."""
    async with sessions(schema) as (session,):
        term = await session.elect("a")
        assert term is not None
        await expire(schema)
        await session.elect(successor)
        fenced = Fenced(session, term)
        with pytest.raises(FencedOutError):
            async with fenced.transaction():
                pytest.fail("the block was entered")
        assert fenced.lease.cause is not None
        await fenced.connection.close()


# -- connections


@pytest.mark.parametrize("is_seen", [False, True])
async def test_owned_connection_is_replaced_with_a_warning(
    schema: Schema, *, is_seen: bool
) -> None:
    """One that is lost, in a statement or while idle, is made again at the next call; one warning
    names the client and the error."""
    async with sessions(schema) as (session,):
        term = await session.elect("a")
        assert term is not None
        await schema.execute("SELECT pg_terminate_backend($1)", session.raw[-1].get_server_pid())
        with structlog.testing.capture_logs() as logs:
            while is_seen and not session.raw[-1].is_closed():
                await asyncio.sleep(0.005)
            with suppress(*DATABASE_ERRORS):  # or the loss was seen before the statement was sent
                await session.renew(term)
            assert await session.renew(term)
        (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["client_id"] == "a:1:b"
    assert warning["error_type"]
    assert len(session.raw) == 2


async def test_injected_connection_is_left_alone(schema: Schema) -> None:
    """One of somebody else's is neither closed nor replaced: not after an error, not at a bound,
    not when it is dead."""
    async with sessions(schema, kind="injected") as (session,):
        (raw,) = session.raw
        term = await session.elect("a")
        assert term is not None
        await schema.execute("ALTER TABLE river_leader RENAME TO river_leader_gone")
        try:
            with pytest.raises(DATABASE_ERRORS):
                await session.renew(term)
        finally:
            await schema.execute("ALTER TABLE river_leader_gone RENAME TO river_leader")
        assert await session.renew(term)
        async with schema.connected() as blocker, blocker.transaction():
            await blocker.execute("SELECT FROM river_leader FOR UPDATE")
            with pytest.raises(TimeoutError, match="renewing the leader lease"):
                await session.store.renew(term.holder, [("default", term.epoch)], timeout=0.1)
        assert not raw.is_closed()
        assert await session.renew(term)
        raw.terminate()
        for _ in range(2):
            with pytest.raises(DATABASE_ERRORS):
                await session.resign(term)
        assert session.raw == [raw]
        assert await rows(schema) == [("a",)]


async def fail_in(fenced: Fenced, *, cut: bool) -> None:
    """Fail inside a transaction, perhaps on a connection that is gone."""
    async with fenced.transaction() as connection:
        if cut:
            connection.terminate()
        raise LookupError("the first")


@pytest.mark.parametrize("cut", [False, True])
async def test_first_error_is_raised(schema: Schema, *, cut: bool) -> None:
    """What fails in a fenced transaction is raised as it is, even if its rollback fails too."""
    async with sessions(schema) as (session,):
        term = await session.elect("a")
        assert term is not None
        fenced = Fenced(session, term)
        with pytest.raises(LookupError, match="the first"):
            await fail_in(fenced, cut=cut)
        async with fenced.transaction() as connection:
            assert await connection.fetchval("SELECT 1") == 1
        await fenced.connection.close()
