"""Statements on rows of clients: those of one run, and those on the rows of dead ones."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._postgres.clients import (
    client_delete_dead_without_jobs,
    client_list_heartbeats,
    client_lock_dead,
    client_set_slot_counts,
    client_set_state,
    client_unregister,
    default_domain_get_election_status,
)
from riverpy._postgres.domains import member_mark_supports_domains, member_write_heartbeat
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
        await client_set_slot_counts(
            connection, name, **run, queues=["q"], slot_counts=[1], stuck_job_ids=[2]
        )
        aside = [SkippedRowReport("claim", "1", "full", 2, 0.0)]
        await client_set_state(
            connection,
            name,
            **run,
            state="stopping",
            process_name=None,
            skipped_rows=aside,
            skipped_row_count=1,
        )
        await member_mark_supports_domains(connection, name, **run)
        await member_write_heartbeat(
            connection,
            name,
            **run,
            domain="mail",
            settings_digest="a",
            queues=[],
            heartbeat_interval=timedelta(seconds=1),
        )
        await client_unregister(connection, name, **run)
    assert await schema.fetch("SELECT * FROM riverpy_client") == before


async def test_rows_of_dead_clients(schema: Schema) -> None:
    """A client is dead only with the heartbeat that was observed, and on the server that was
    observed; then its row can be locked, and deleted."""
    await schema.execute(REGISTER)
    async with schema.connected() as connection:
        ((_, heartbeat, _),), start = await client_list_heartbeats(connection, schema.name)
        for seen, server in ((b"other", start), (heartbeat, b"other")):
            dead = await client_lock_dead(
                connection, schema.name, {"me": seen}, raw_server_start_time=server
            )
            assert dead == set()
        dead = await client_lock_dead(
            connection, schema.name, {"me": heartbeat}, raw_server_start_time=start
        )
        assert dead == {"me"}
        assert (
            await client_delete_dead_without_jobs(connection, schema.name, {"me": b"other"}) == []
        )
        assert await client_delete_dead_without_jobs(
            connection, schema.name, {"me": heartbeat}
        ) == ["me"]


async def test_candidates_of_default(schema: Schema) -> None:
    """A client of another domain never becomes leader of `default`, so it is no candidate there.
    Before the migration that adds domains, all clients are of `default`."""
    await schema.execute(REGISTER)
    async with schema.connected() as connection, connection.transaction():
        assert (
            await default_domain_get_election_status(connection, schema.name)
        ).has_riverpy_candidate
        await connection.execute("UPDATE riverpy_client SET domain = 'mail'")
        assert not (
            await default_domain_get_election_status(connection, schema.name)
        ).has_riverpy_candidate
        await connection.execute("ALTER TABLE riverpy_client RENAME COLUMN domain TO other")
        assert (
            await default_domain_get_election_status(connection, schema.name)
        ).has_riverpy_candidate
        await connection.execute("ALTER TABLE riverpy_client RENAME COLUMN other TO domain")
