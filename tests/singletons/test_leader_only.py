"""Functions that run while their client leads."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
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
from riverpy._maintenance import base
from tests.singletons.rig import Task, running, soon

if TYPE_CHECKING:
    from tests._database import Schema


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services begin, and begin again, without a delay."""
    monkeypatch.setattr(base, "STAGGER", 0.0)
    monkeypatch.setattr(base, "RETRY_FIRST", timedelta(milliseconds=50))


def make_client(schema: Schema, client_id: str, domain: str | None = None) -> Client:
    """A client that may lead, and has nothing else to do than to stand by for a singleton."""
    config = Config(
        schema=schema.name,
        id=client_id,
        leader_domain=domain,
        elect_interval=timedelta(milliseconds=250),
        soft_stop_timeout=timedelta(0),
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


async def test_failing(schema: Schema) -> None:
    """What raises runs again in the same term, and disturbs no maintenance."""
    function, client = Function(), make_client(schema, "a")
    function.errors.append(LookupError("no census"))
    client.leader_only("census", function)
    async with running(client):
        first, second = await soon(function.began), await soon(function.began)
        assert first._mandate.term == second._mandate.term
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
