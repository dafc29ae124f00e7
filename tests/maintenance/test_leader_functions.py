"""Functions that run while their client leads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import (
    Client,
    ClientStateError,
    Config,
    ConfigError,
    FencedOutError,
    LeaderTerm,
    TransactionError,
)
from riverpy._leading import term_fence
from riverpy._maintenance import base
from tests._database import connected
from tests.kit.proxy import proxied
from tests.leases.singletons.rig import TTL, Task, running, soon, until

if TYPE_CHECKING:
    from tests._database import Schema


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services begin, and begin again, without a delay."""
    monkeypatch.setattr(base, "FIRST_RUN_DELAY_MAX", 0.0)
    monkeypatch.setattr(base, "SERVICE_RETRY_DELAY_MIN", timedelta(milliseconds=50))


def make_client(
    schema: Schema,
    client_id: str,
    domain: str | None = None,
    leader_ttl: timedelta = timedelta(seconds=15),
) -> Client:
    """A client that may lead, and has nothing else to do than to stand by for a singleton."""
    config = Config(
        schema=schema.name,
        id=client_id,
        leader_domain=domain,
        leader_ttl=leader_ttl,
        elect_interval=timedelta(milliseconds=250),
        soft_stop_timeout=timedelta(0),
        hard_stop_timeout=timedelta(seconds=2),
    )
    client = Client(schema.url, config=config)
    client.singleton("nothing", Task())
    return client


class Function:
    """Tells its terms; ends when it is told."""

    def __init__(self) -> None:
        self.began: asyncio.Queue[LeaderTerm] = asyncio.Queue()
        self.ended: asyncio.Queue[LeaderTerm] = asyncio.Queue()
        self.errors: list[Exception] = []

    async def __call__(self, term: LeaderTerm) -> None:
        self.began.put_nowait(term)
        try:
            if self.errors:
                raise self.errors.pop()
            await anyio.sleep_forever()
        finally:
            self.ended.put_nowait(term)


@pytest.mark.parametrize("domain", [None, "billing"])
async def test_runs_with_the_lead(schema: Schema, domain: str | None) -> None:
    """S9: it runs in the one client that leads the domain, moves with the lead, and its fence lets
    a transaction through while the term is held, and not after."""
    functions, clients = [Function(), Function()], []
    for number, function in enumerate(functions):
        client = make_client(schema, f"c{number}", domain)
        client.leader_only("census", function)
        clients.append(client)
    await schema.execute("create table census (n int)")
    try:
        async with schema.connected() as connection, running(clients[0]):
            term = await soon(functions[0].began)
            assert term.is_held
            with pytest.raises(TransactionError):
                await term.fence(connection)
            async with connection.transaction():
                await term.fence(connection)
                await connection.execute("insert into census values (1)")
            async with running(clients[1]):
                clients[0].stop()
                await soon(functions[0].ended)
                next_term = await soon(functions[1].began)
                assert (term.is_held, next_term.is_held) == (False, True)
                with pytest.raises(FencedOutError):
                    term.expect_held()
                async with connection.transaction():
                    with pytest.raises(FencedOutError):
                        await term.fence(connection)
        assert await schema.fetchval("select count(*) from census") == 1
    finally:
        await schema.execute("drop table census")


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_fence_by_an_old_snapshot(schema: Schema, isolation: Any) -> None:
    """In a snapshot the lead that was renewed since seems to have expired: such a transaction is
    refused, and the leader goes on. That of a domain has an epoch, and takes any isolation."""
    for domain in (None, "billing"):
        function, client = Function(), make_client(schema, "a", domain)
        client.leader_only("census", function)
        async with schema.connected() as connection, running(client):
            term = await soon(function.began)
            async with connection.transaction(isolation=isolation):
                if domain is None:
                    with pytest.raises(TransactionError, match="read committed"):
                        await term.fence(connection)
                else:
                    await term.fence(connection)
            assert term.is_held
            async with connection.transaction(isolation="read_committed"):
                await term.fence(connection)


@pytest.mark.parametrize("domain", [None, "billing"])
async def test_fence_in_another_database(
    schema: Schema, fresh_database_url: str, domain: str | None
) -> None:
    """A fence in another database is refused with its name, and the client leads on; one in its own
    that finds another's term ends the lead."""
    function, client = Function(), make_client(schema, "a", domain)
    client.leader_only("census", function)
    table, columns = "river_leader", "name text, leader_id text, elected_at timestamptz"
    if domain is not None:
        table, columns = "riverpy_lease", "name text, epoch bigint"
    async with connected(fresh_database_url) as other, running(client):
        await other.execute(
            f'create schema "{schema.name}"'
            f" create table {table} ({columns}, expires_at timestamptz)"
        )
        term = await soon(function.began)
        async with other.transaction():
            place = await other.fetchval("select current_database()")
            with pytest.raises(TransactionError, match=f"sees, in {place}.*which is held"):
                await term.fence(other)
        assert term.is_held
        async with schema.connected() as connection:
            async with connection.transaction():
                await term.fence(connection)
            change = "leader_id = 'rival'" if domain is None else "epoch = epoch + 1"
            await schema.execute(f"update {table} set {change}")
            async with connection.transaction():
                with pytest.raises(FencedOutError):
                    await term.fence(connection)
        await soon(function.ended)


async def test_fence_that_is_not_answered(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence waits for a bounded time, and the lead goes on: its own connection works."""
    monkeypatch.setattr(term_fence, "TRANSACTION_CHECK_TIMEOUT", 0.05)
    function, client = Function(), make_client(schema, "a", "billing")
    client.leader_only("census", function)
    async with proxied(schema.url) as proxy, running(client):
        term = await soon(function.began)
        connection = await asyncpg.connect(proxy.url)
        try:
            await connection.transaction().start()
            proxy.hold()
            with anyio.fail_after(30):
                with pytest.raises(TimeoutError, match="passing the fence"):
                    await term.fence(connection)
            assert term.is_held
        finally:
            connection.terminate()


async def test_clean_up(schema: Schema) -> None:
    """S9: it is cancelled once when the term ends, so that its clean-up can await."""
    began, ended = anyio.Event(), anyio.Event()

    async def census(term: LeaderTerm) -> None:
        async with schema.connected() as connection:
            try:
                async with connection.transaction():
                    await term.fence(connection)
                    began.set()
                    await anyio.sleep_forever()
            finally:
                await connection.execute("select 1")
                ended.set()

    client = make_client(schema, "a")
    client.leader_only("census", census)
    async with running(client) as reports:
        with anyio.fail_after(30):
            await began.wait()
    assert ended.is_set()
    assert reports[0].is_clean


async def test_left_behind(schema: Schema) -> None:
    """S9: one that ignores its cancellation is in the report of the run, which ends without it."""
    began, may_end, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def census(term: LeaderTerm) -> None:
        began.set()
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()
        ended.set()

    client = make_client(schema, "a", leader_ttl=TTL)
    client.leader_only("census", census)
    async with running(client) as reports:
        with anyio.fail_after(30):
            await began.wait()
            client.stop()
            try:
                await until(lambda: bool(reports))
            finally:
                may_end.set()
                await ended.wait()
    assert reports[0].maintenance_left


async def test_failing(schema: Schema) -> None:
    """What raises runs again in the same term, and disturbs no maintenance."""
    function, client = Function(), make_client(schema, "a")
    function.errors.append(LookupError("no census"))
    client.leader_only("census", function)
    async with running(client):
        first, second = await soon(function.began), await soon(function.began)
        assert first.lease is second.lease
        assert client.is_leader


async def test_bad_registrations(schema: Schema) -> None:
    """The same name twice, what is no coroutine function, and a client that runs are refused."""
    client, plain = make_client(schema, "a"), print
    client.leader_only("census", Function())
    bad: Any = plain
    with pytest.raises(ConfigError, match="registered already"):
        client.leader_only("census", Function())
    with pytest.raises(ConfigError, match="must be an `async def`"):
        client.leader_only("other", bad)
    with pytest.raises(ConfigError):
        client.leader_only("a name", Function())
    async with running(client):
        with pytest.raises(ClientStateError):
            client.leader_only("other", Function())
