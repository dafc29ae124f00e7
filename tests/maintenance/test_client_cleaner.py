"""The client cleaner: which rows it deletes, and which it keeps."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._leading.queue_scope import NO_QUEUES
from riverpy._maintenance.client_cleaner import RUN_INTERVAL, ClientCleaner
from riverpy.errors import FencedOutError
from tests.leading.term_context import held_term
from tests.maintenance.dead_clients import BEAT, in_contact, observed, register
from tests.maintenance.rows import insert_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests._database import Schema
    from tests.leading.term_context import HeldTerm


async def observing(held: HeldTerm, contact: Callable[[], float] = in_contact) -> ClientCleaner:
    """A cleaner that has read the heartbeats, and that eleven minutes ago by its own clock."""
    return await observed(held, ClientCleaner(held.context, contact), 660.0)


@pytest.fixture
async def quick(schema: Schema) -> AsyncGenerator[HeldTerm]:
    """A context to which a client is dead after a second."""
    async with held_term(schema, dead_after=timedelta(seconds=1)) as held:
        yield held


async def known(schema: Schema) -> list[str]:
    """The clients that are remembered."""
    rows = await schema.fetch("SELECT client_id FROM riverpy_client ORDER BY 1")
    return [row[0] for row in rows]


async def test_dead_for_long(quick: HeldTerm, log: list[dict[str, Any]]) -> None:
    """Clients that are dead for ten minutes are forgotten, but for those whose jobs still run;
    whatever queues the term maintains."""
    schema = quick.schema
    quick.scope = NO_QUEUES
    for client_id in ("gone", "busy", "dead"):
        await register(schema, client_id)
    for client_id in ("busy", "another"):
        await insert_jobs(
            schema,
            state="'running'",
            attempt="1",
            attempted_at="now()",
            attempted_by=f"array['{client_id}']",
        )
    cleaner = await observing(quick)
    await schema.execute(BEAT, "dead")
    assert await quick.run(cleaner) == RUN_INTERVAL
    assert await known(schema) == ["busy", "dead"]
    assert [entry["client_ids"] for entry in log] == [["gone"]]


async def test_nobody_is_silent(quick: HeldTerm) -> None:
    """While all clients write heartbeats nothing is written, not even by a leader that was
    deposed."""
    await register(quick.schema, "alive")
    await quick.take_over()
    cleaner = await observing(quick)
    await quick.schema.execute(BEAT, "alive")
    await quick.run(cleaner)
    assert await known(quick.schema) == ["alive"]


async def test_out_of_contact(quick: HeldTerm) -> None:
    """A leader that was out of contact deletes no client: perhaps the server was away."""
    await register(quick.schema, "gone")
    await quick.run(await observing(quick, lambda: 0.9))
    assert await known(quick.schema) == ["gone"]


async def test_deposed(quick: HeldTerm) -> None:
    """A leader whose term is over, and that does not notice it yet, deletes no client."""
    await register(quick.schema, "gone")
    await quick.take_over()
    with pytest.raises(FencedOutError):
        await quick.run(await observing(quick))
    assert await known(quick.schema) == ["gone"]


async def test_client_that_is_back(quick: HeldTerm) -> None:
    """A client that writes a heartbeat at this moment is neither waited for nor forgotten."""
    schema = quick.schema
    await register(schema, "back")
    async with schema.connected() as client, client.transaction():
        await client.execute("UPDATE riverpy_client SET heartbeat_at = now()")
        async with asyncio.timeout(30):
            await quick.run(await observing(quick))
    assert await known(schema) == ["back"]


async def test_client_that_a_foreign_key_holds(quick: HeldTerm, log: list[dict[str, Any]]) -> None:
    """A client that a table of the application refers to stays; all others are forgotten, and the
    log names it (FR-03)."""
    schema = quick.schema
    for client_id in ("a", "held", "z"):
        await register(schema, client_id)
    await schema.execute("CREATE TABLE audit (client_id text REFERENCES riverpy_client)")
    try:
        await schema.execute("INSERT INTO audit VALUES ('held')")
        await quick.run(await observing(quick))
        assert await known(schema) == ["held"]
        assert [entry.get("row") for entry in log if entry["log_level"] == "warning"] == ["held"]
    finally:
        await schema.execute("DROP TABLE audit")
