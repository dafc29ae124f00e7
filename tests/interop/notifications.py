"""What is sent on River's channels of a schema, as a plain connection receives it."""

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
    """The payloads received, in order."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._received: list[tuple[str, Any]] = []
        self._markers = 0

    def receive(self, _connection: object, _pid: int, channel: str, payload: str) -> None:
        """As asyncpg calls a listener."""
        topic = channel.removeprefix(f"{self._schema.name}.")
        if topic == MARKER:
            self._markers += 1
        else:
            self._received.append((topic, json.loads(payload)))

    async def take(self) -> list[tuple[str, Any]]:
        """All that was sent until now by transactions that have ended: topic and payload. They are
        not returned again."""
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
