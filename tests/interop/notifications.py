"""Notifications on River's channels of a schema, received by a plain connection. A notification of
inserts by riverpy has one key more than River's, which River in Go ignores. It is left out here."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema

TOPICS = ("river_insert", "river_control", "river_leadership")
MARKER = "test_marker"


class Notifications:
    """The received payloads in order."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._received: list[tuple[str, Any]] = []
        self._markers = 0

    def receive(self, _connection: object, _pid: int, channel: str, payload: str) -> None:
        """Store a payload; asyncpg calls this."""
        topic = channel.removeprefix(f"{self._schema.name}.")
        if topic == MARKER:
            self._markers += 1
        else:
            message = json.loads(payload)
            message.pop("notify_interval_ms", None)
            self._received.append((topic, message))

    async def take(self) -> list[tuple[str, Any]]:
        """Return topic and payload of all notifications by transactions that have ended, each
        once."""
        wanted = self._markers + 1
        await self._schema.execute("SELECT pg_notify($1, '')", f"{self._schema.name}.{MARKER}")
        with anyio.fail_after(PATIENCE):
            while self._markers < wanted:
                await asyncio.sleep(0.005)
        taken, self._received = self._received, []
        return taken


@asynccontextmanager
async def notifications(schema: Schema) -> AsyncGenerator[Notifications]:
    """Listen until the end of the block."""
    received = Notifications(schema)
    async with schema.connected() as connection:
        for topic in (*TOPICS, MARKER):
            await connection.add_listener(f"{schema.name}.{topic}", received.receive)
        yield received
        await connection.reset(timeout=10)
