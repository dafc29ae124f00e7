"""One typed function per block of `sql/queries/river_queue.sql`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._postgres.queue_filter import filtered
from riverpy._postgres.sql_files import query
from riverpy.job import timestamp
from riverpy.queue import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.queue_filter import QueueFilter


async def queue_touch(
    connection: Transaction, schema: str | None, names: list[str]
) -> dict[str, bool]:
    """Renew the rows of the queues, making those that are missing; returns whether each is
    paused."""
    rows = await connection.fetch(query("river_queue", "queue_touch", schema).text, names)
    return {row[0]: row[1] for row in rows}


async def queue_paused(connection: Transaction, schema: str | None, names: list[str]) -> set[str]:
    """Which of the queues are paused."""
    rows = await connection.fetch(query("river_queue", "queue_paused", schema).text, names)
    return {row[0] for row in rows}


async def queue_pause(connection: Transaction, schema: str | None, name: str) -> list[str]:
    """Pause a queue, or `*`; returns the queues named so."""
    rows = await connection.fetch(query("river_queue", "queue_pause", schema).text, name)
    return [row[0] for row in rows]


async def queue_resume(connection: Transaction, schema: str | None, name: str) -> list[str]:
    """Resume a queue, or `*`; returns the queues named so."""
    rows = await connection.fetch(query("river_queue", "queue_resume", schema).text, name)
    return [row[0] for row in rows]


async def queue_unused(
    connection: Transaction,
    schema: str | None,
    *,
    within: QueueFilter | None,
    age: timedelta,
    after: str,
    limit: int,
) -> list[str]:
    """Up to `limit` names behind `after` of queues that were left alone for `age` and are neither
    paused nor described."""
    values: dict[str, object] = {"age": age, "after": after, "limit": limit}
    text, arguments = filtered("river_queue", "queue_unused", schema, within, values)
    rows = await connection.fetch(text, *arguments)
    return [row[0] for row in rows]


async def queue_forget(
    connection: Transaction, schema: str | None, *, names: Sequence[str], age: timedelta
) -> set[str]:
    """Delete those of the queues that are still unused and not locked; return their names."""
    statement = query("river_queue", "queue_forget", schema)
    values: dict[str, object] = {"names": names, "age": age}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def queue_get(connection: Transaction, schema: str | None, name: str) -> Queue | None:
    """One queue."""
    row = await connection.fetchrow(query("river_queue", "queue_get", schema).text, name)
    return None if row is None else _queue(row)


async def queue_list(connection: Transaction, schema: str | None, limit: int) -> list[Queue]:
    """Up to `limit` queues, by name."""
    rows = await connection.fetch(query("river_queue", "queue_list", schema).text, limit)
    return [_queue(row) for row in rows]


async def queue_update(
    connection: Transaction, schema: str | None, name: str, metadata: str
) -> Queue | None:
    """Replace the metadata, given as JSON text, of a queue."""
    statement = query("river_queue", "queue_update", schema)
    row = await connection.fetchrow(
        statement.text, *statement.arguments({"name": name, "metadata": metadata})
    )
    return None if row is None else _queue(row)


async def queue_lag(
    connection: Transaction, schema: str | None, names: Sequence[str]
) -> dict[str, timedelta]:
    """How long the oldest due job of each of the queues has waited; 0: none waits."""
    rows = await connection.fetch(query("river_queue", "queue_lag", schema).text, names)
    return {name: timedelta(seconds=seconds) for name, seconds in rows}


async def queue_waiting(connection: Transaction, schema: str | None, limit: int) -> list[str]:
    """Up to `limit` queues that hold available jobs and are not paused."""
    rows = await connection.fetch(query("river_queue", "queue_waiting", schema).text, limit)
    return [row[0] for row in rows]


async def control_notify(connection: Transaction, schema: str | None, payload: str) -> None:
    """Send a control message to every client of the schema, at commit."""
    statement = query("river_queue", "control_notify", schema)
    await connection.execute(statement.text, payload)


def _queue(row: Record) -> Queue:
    name, created_at, metadata, paused_at, updated_at = row
    try:
        members = msgspec.json.decode(metadata, type=dict[str, Any])
    except msgspec.ValidationError:  # no object: somebody wrote it by SQL
        members = {}
    return Queue(
        name=name,
        created_at=_time(created_at),
        metadata=members,
        paused_at=timestamp(paused_at),
        updated_at=_time(updated_at),
    )


def _time(raw: bytes) -> datetime:
    moment = timestamp(raw)
    assert moment is not None  # noqa: S101 (the column is not null)
    return moment
