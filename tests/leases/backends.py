"""The stores of leases for the contract tests, with operations from outside."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg

from riverpy import LeaseManager, MemoryLeases

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._leases.memory import MemoryTransaction
    from tests._database import Schema

TTL, INTERVAL = timedelta(seconds=15), timedelta(seconds=5)
ADD_EFFECT = (
    "INSERT INTO river_queue (name, created_at, metadata, updated_at)"
    " VALUES ($1, now(), '{}', now())"
)
"""The statement that tests send under a lease."""


class Writer(Protocol):
    """An open transaction and its writes."""

    connection: Any
    """The argument for a fence."""

    async def write(self, effect: str) -> None:
        """Write an effect in the transaction."""


class Backend(Protocol):
    """One store of leases."""

    def database(self) -> Any:
        """Return what another manager needs. It is closed with the backend."""

    def manager(self, **options: Any) -> LeaseManager:
        """Create a manager of another process. It is not open."""

    def transaction(self) -> Any:
        """Open a Writer as an async context manager. It commits at the end."""

    async def effects(self) -> list[str]:
        """Return what was committed, in order of names."""

    async def expire(self, name: str) -> None:
        """Let a lease expire. Its holder is not notified."""

    async def forget(self) -> None:
        """Delete all rows."""


class _TableWriter:
    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self.connection = connection

    async def write(self, effect: str) -> None:
        await self.connection.execute(ADD_EFFECT, effect)


class TableBackend:
    """The table of leases, over a URL, pools or injected connections."""

    def __init__(self, schema: Schema, kind: str, url: str, stack: AsyncExitStack) -> None:
        self._schema, self._kind, self._url, self._stack = schema, kind, url, stack
        self._made = 0

    async def prepare(self, managers: int) -> None:
        """Create what managers are given. Managers are created without waiting."""
        self._databases: list[Any] = []
        for _ in range(managers):
            if self._kind == "pool":
                pool = asyncpg.create_pool(self._schema.url, min_size=1, max_size=2)
                self._databases.append(await self._stack.enter_async_context(pool))
            elif self._kind == "injected":
                self._databases.append(
                    await self._stack.enter_async_context(self._schema.connected())
                )

    def database(self) -> Any:
        return self._databases.pop() if self._databases else self._url

    def manager(self, **options: Any) -> LeaseManager:
        self._made += 1
        options = {"holder": f"process {self._made}", "ttl": TTL, "renew_interval": INTERVAL} | (
            options
        )
        return LeaseManager(
            self.database(),
            schema=self._schema.name,
            pooler=self._kind == "pooler",
            **options,
        )

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Writer]:
        async with self._schema.connected() as connection, connection.transaction():
            yield _TableWriter(connection)

    async def effects(self) -> list[str]:
        rows = await self._schema.fetch("SELECT name FROM river_queue ORDER BY name")
        return [row["name"] for row in rows]

    async def expire(self, name: str) -> None:
        await self._schema.execute(
            "UPDATE riverpy_lease SET expires_at = now() - interval '1 s' WHERE name = $1",
            f"s:{name}",
        )

    async def forget(self) -> None:
        await self._schema.execute("DELETE FROM riverpy_lease")


class _MemoryWriter:
    def __init__(self, connection: MemoryTransaction, effects: list[str]) -> None:
        self.connection = connection
        self._effects = effects

    async def write(self, effect: str) -> None:
        self.connection.on_commit(lambda: self._effects.append(effect))


class MemoryBackend:
    """Leases in memory."""

    def __init__(self) -> None:
        self._leases = MemoryLeases()
        self._effects: list[str] = []
        self._made = 0

    def database(self) -> MemoryLeases:
        return self._leases

    def manager(self, **options: Any) -> LeaseManager:
        self._made += 1
        options = {"holder": f"process {self._made}", "ttl": TTL, "renew_interval": INTERVAL} | (
            options
        )
        return LeaseManager(self._leases, **options)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Writer]:
        async with self._leases.transaction() as transaction:
            yield _MemoryWriter(transaction, self._effects)

    async def effects(self) -> list[str]:
        return sorted(self._effects)

    async def expire(self, name: str) -> None:
        self._leases._rows[name].expires_at = 0.0

    async def forget(self) -> None:
        self._leases.forget()
