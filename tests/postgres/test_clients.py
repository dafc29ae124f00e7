"""Statements on rows of clients: those of one run, and those on the rows of dead ones."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._postgres.clients import (
    client_delete_idle,
    client_heartbeats,
    client_lock_dead,
    client_set_slots,
    client_set_state,
    client_unregister,
)
from riverpy._postgres.domains import member_mark_supports_domains, member_update
from riverpy._postgres.skipped_rows import SkippedRowReport

if TYPE_CHECKING:
    from tests._database import Schema

REGISTER = (
    "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
    " dead_after) VALUES ('me', '{}', '{}', true, false, '1', '60 s')"
)


async def test_row_of_another_run(schema: Schema) -> None:
    """A run that was displaced under its id changes nothing of its successor's row."""
    await schema.execute(REGISTER)
    before = await schema.fetch("SELECT * FROM riverpy_client")
    run = {"client_id": "me", "registered_at": 1}
    name = schema.name
    async with schema.connected() as connection:
        await client_set_slots(connection, name, **run, slots=[1], stuck=[2])
        aside = [SkippedRowReport("claim", "1", "full", 2, 0.0)]
        await client_set_state(
            connection, name, **run, state="stopping", process=None, aside=aside, aside_count=1
        )
        await member_mark_supports_domains(connection, name, **run)
        await member_update(
            connection,
            name,
            **run,
            domain="mail",
            settings="a",
            queues=[],
            interval=timedelta(seconds=1),
        )
        await client_unregister(connection, name, **run)
    assert await schema.fetch("SELECT * FROM riverpy_client") == before


async def test_rows_of_dead_clients(schema: Schema) -> None:
    """A client is dead only with the heartbeat that was observed, and on the server that was
    observed; then its row can be locked, and deleted."""
    await schema.execute(REGISTER)
    async with schema.connected() as connection:
        ((_, heartbeat, _),), start = await client_heartbeats(connection, schema.name)
        for seen, server in ((b"other", start), (heartbeat, b"other")):
            dead = await client_lock_dead(
                connection, schema.name, {"me": seen}, server_start=server
            )
            assert dead == set()
        dead = await client_lock_dead(
            connection, schema.name, {"me": heartbeat}, server_start=start
        )
        assert dead == {"me"}
        assert await client_delete_idle(connection, schema.name, {"me": b"other"}) == []
        assert await client_delete_idle(connection, schema.name, {"me": heartbeat}) == ["me"]
