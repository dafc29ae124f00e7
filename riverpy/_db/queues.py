"""One typed function per block of `sql/queries/river_queue.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._sql import query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from riverpy.drivers.asyncpg import Transaction


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


async def queue_forget(
    connection: Transaction,
    schema: str | None,
    *,
    names: Sequence[str] | None,
    age: timedelta,
    limit: int,
) -> list[str]:
    """Delete up to `limit` queues, of these or of all, that were left alone for `age` and are
    neither paused nor described; returns their names."""
    values: dict[str, object] = {"age": age, "limit": limit}
    if names is None:
        statement = query("river_queue", "queue_forget", schema)
    else:
        statement = query("river_queue", "queue_forget_some", schema)
        values["name"] = names
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [row[0] for row in rows]


async def control_notify(connection: Transaction, schema: str | None, payload: str) -> None:
    """Send a control message to every client of the schema, at commit."""
    statement = query("river_queue", "control_notify", schema)
    await connection.execute(
        statement.text, *statement.arguments({"schema": schema, "payload": payload})
    )
