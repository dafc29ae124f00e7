"""The statements on queues: one typed function per SQL statement in
`sql/queries/river_queue.sql`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._postgres.sql_files import fetch_with_queue_filter, get_query
from riverpy._timestamps import decode_timestamp
from riverpy.queue import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sql_files import QueueFilter

_SQL_FILE = "river_queue"


async def queue_upsert(
    connection: Transaction, schema: str | None, names: list[str]
) -> dict[str, bool]:
    """Set `updated_at` of the queues to now, and insert missing rows. Return a dict from queue name
    to whether the queue is paused."""
    rows = await get_query(_SQL_FILE, "queue_upsert", schema).fetch(connection, name=names)
    return {row[0]: row[1] for row in rows}


async def queue_find_paused(
    connection: Transaction, schema: str | None, names: list[str]
) -> set[str]:
    """Return the names of the paused queues among `names`."""
    rows = await get_query(_SQL_FILE, "queue_paused", schema).fetch(connection, name=names)
    return {row[0] for row in rows}


async def queue_pause(connection: Transaction, schema: str | None, name: str) -> list[str]:
    """Pause a queue. The name `*` means all queues. Return the names of these queues, including
    those that were paused before."""
    rows = await get_query(_SQL_FILE, "queue_pause", schema).fetch(connection, name=name)
    return [row[0] for row in rows]


async def queue_resume(connection: Transaction, schema: str | None, name: str) -> list[str]:
    """Resume a queue. The name `*` means all queues. Return the names of these queues, including
    those that were not paused."""
    rows = await get_query(_SQL_FILE, "queue_resume", schema).fetch(connection, name=name)
    return [row[0] for row in rows]


async def queue_list_unused(
    connection: Transaction,
    schema: str | None,
    *,
    queue_filter: QueueFilter | None,
    unused_for: timedelta,
    after_name: str,
    limit: int,
) -> list[str]:
    """Return the names of up to `limit` queues that no client has used for `unused_for`, sorted.
    The list starts after `after_name`. Paused queues and queues with metadata are left out."""
    rows = await fetch_with_queue_filter(
        connection,
        _SQL_FILE,
        "queue_unused",
        schema,
        queue_filter,
        age=unused_for,
        after=after_name,
        limit=limit,
    )
    return [row[0] for row in rows]


async def queue_delete_unused(
    connection: Transaction, schema: str | None, *, names: Sequence[str], unused_for: timedelta
) -> set[str]:
    """Delete the rows of the queues in `names` that no client has used for `unused_for`. Paused
    queues, queues with metadata and locked rows are left out. Return the names of the deleted
    queues."""
    rows = await get_query(_SQL_FILE, "queue_delete_unused", schema).fetch(
        connection, names=names, age=unused_for
    )
    return {row[0] for row in rows}


async def queue_get(connection: Transaction, schema: str | None, name: str) -> Queue | None:
    """Return one queue, or None if it has no row."""
    row = await get_query(_SQL_FILE, "queue_get", schema).fetchrow(connection, name=name)
    return None if row is None else _queue_from_row(row)


async def queue_list(connection: Transaction, schema: str | None, limit: int) -> list[Queue]:
    """Return up to `limit` queues, sorted by name."""
    rows = await get_query(_SQL_FILE, "queue_list", schema).fetch(connection, limit=limit)
    return [_queue_from_row(row) for row in rows]


async def queue_update_metadata(
    connection: Transaction, schema: str | None, name: str, metadata: str
) -> Queue | None:
    """Replace the metadata of a queue with `metadata`, a JSON object as text. Return the queue, or
    None if it has no row."""
    row = await get_query(_SQL_FILE, "queue_update", schema).fetchrow(
        connection, name=name, metadata=metadata
    )
    return None if row is None else _queue_from_row(row)


async def queue_get_lags(
    connection: Transaction, schema: str | None, names: Sequence[str]
) -> dict[str, timedelta]:
    """Return how long the oldest due job of each queue has waited, by queue name. The value is 0 if
    no job waits."""
    rows = await get_query(_SQL_FILE, "queue_lag", schema).fetch(connection, name=names)
    return {name: timedelta(seconds=seconds) for name, seconds in rows}


async def queue_list_with_waiting_jobs(
    connection: Transaction, schema: str | None, limit: int
) -> list[str]:
    """Return up to `limit` queues that have available jobs and are not paused."""
    rows = await get_query(_SQL_FILE, "queue_waiting", schema).fetch(connection, limit=limit)
    return [row[0] for row in rows]


async def send_control_message(connection: Transaction, schema: str | None, payload: str) -> None:
    """Send a control message, for example that a queue was paused, to all clients of the schema.
    PostgreSQL sends it at the commit. `payload` is JSON as text."""
    await get_query(_SQL_FILE, "control_notify", schema).execute(connection, payload=payload)


def _queue_from_row(row: Record) -> Queue:
    name, created_at, metadata, paused_at, updated_at = row
    try:
        members = msgspec.json.decode(metadata, type=dict[str, Any])
    except msgspec.ValidationError:  # another program may store metadata that is not an object
        members = {}
    return Queue(
        name=name,
        created_at=_decode_required_timestamp(created_at),
        metadata=members,
        paused_at=decode_timestamp(paused_at),
        updated_at=_decode_required_timestamp(updated_at),
    )


def _decode_required_timestamp(raw: bytes) -> datetime:
    moment = decode_timestamp(raw)
    assert moment is not None  # noqa: S101 (the column is not null)
    return moment
