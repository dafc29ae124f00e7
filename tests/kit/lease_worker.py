"""A process that holds a lease or waits for it, and records its acts: `python -m
tests.kit.lease_worker`.

In a term it acts again and again even if the lease is no longer valid locally, and writes through
its fence. After the term it tries one more fenced write, like code that has not noticed the loss.
SIGUSR1 takes every connection of its pool until the term ends. SIGUSR2 blocks its event loop.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import msgspec

from riverpy import Client, Config, LeaseLostError, LeaseManager
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.fleet import SETTINGS_VARIABLE, end_with_the_fleet
from tests.kit.lease_fleet import LEASE, WRITE, LeaseSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Lease

ACT_INTERVAL = 0.01
HOLD_MAX = 0.05
"""Maximum seconds that a fenced transaction stays open, so that faults hit some of them."""
RETRY = 0.05
BLOCK_SHARE = 1.3
"""How long SIGUSR2 blocks the loop, as a multiple of the lease time."""
POOL_SIZE = 3
CONNECT_LIMIT = 2.0

settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=LeaseSettings)
notes = os.open(settings.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(what: str, lease: Lease | None = None) -> None:
    """Append a record to the file and sync it. The time is read before the validity of the
    lease."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    epoch, is_held = (lease.epoch, lease.is_held) if lease else (0, False)
    os.write(notes, f"{now:.6f} {os.getpid()} {what} {epoch} {is_held}\n".encode())


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[asyncpg.Connection]:
    """Open a connection for the writes."""
    connection = await asyncpg.connect(url, timeout=CONNECT_LIMIT, statement_cache_size=0)
    try:
        yield connection
    finally:
        connection.terminate()


class Holder:
    """The user of the lease."""

    def __init__(self, late: anyio.abc.TaskGroup) -> None:
        self._late = late
        self._hoard = anyio.Event()
        self.pool: asyncpg.Pool | None = None
        """The pool whose connections SIGUSR1 takes."""

    def take_connections(self) -> None:
        """Take every connection of the pool."""
        self._hoard.set()

    async def hold(self, lease: Lease) -> None:
        """Act until cancelled."""
        self._hoard = anyio.Event()
        fence_statement = lease.fence_statement
        note("begin", lease)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, lease)
                tasks.start_soon(self._take_all)
                while True:
                    note("act", lease)
                    await anyio.sleep(ACT_INTERVAL)
        finally:
            note("end", lease)
            self._late.start_soon(self._write_late, lease, fence_statement)

    async def _write(self, lease: Lease) -> None:
        while True:
            try:
                async with connected(settings.database_url) as connection:
                    while await self._write_once(connection, lease):
                        await anyio.sleep(ACT_INTERVAL)
                    return
            except DATABASE_ERRORS:
                await anyio.sleep(RETRY)

    async def _write_once(self, connection: asyncpg.Connection, lease: Lease) -> bool:
        try:
            async with connection.transaction():
                await lease.fence(connection)
                await anyio.sleep(random.random() * HOLD_MAX)
                is_stale = await connection.fetchval(WRITE, lease.epoch)
        except LeaseLostError:
            note("refused", lease)
            return False
        note("stale" if is_stale else "wrote", lease)
        return True

    async def _write_late(self, lease: Lease, fence_statement: str) -> None:
        """Write until the server refuses. The term may end in this process before it ends in the
        database."""
        with anyio.move_on_after(20 * settings.leader_ttl):
            while True:
                try:
                    async with connected(settings.history_url) as connection:
                        while await self._write_late_once(connection, lease, fence_statement):
                            await anyio.sleep(ACT_INTERVAL)
                        return
                except DATABASE_ERRORS:
                    await anyio.sleep(RETRY)

    async def _write_late_once(
        self, connection: asyncpg.Connection, lease: Lease, fence_statement: str
    ) -> bool:
        async with connection.transaction():
            if not await connection.fetchval(fence_statement):
                note("late_refused", lease)
                return False
            if await connection.fetchval(WRITE, lease.epoch):
                note("stale", lease)
        return True

    async def _take_all(self) -> None:
        await self._hoard.wait()
        if self.pool is not None:
            held: list[Any] = []
            try:
                while True:  # take connections that are released later, too
                    held.append(await self.pool.acquire())
            finally:
                for connection in held:
                    connection.terminate()


async def run_client(holder: Holder) -> None:
    """Hold the lease as a singleton of a client, which is notified of a release."""
    config = Config(
        candidate=False,
        elect_interval=timedelta(seconds=settings.elect_interval),
        leader_ttl=timedelta(seconds=settings.leader_ttl),
    )
    client = Client(settings.database_url, config=config)
    client.singleton(LEASE, holder.hold)
    async with client.working():
        holder.pool = client._get_open_pool()
        note("stands")
        await anyio.sleep_forever()


async def run_manager(holder: Holder, database: Any) -> None:
    """Acquire the lease again and again."""
    manager = LeaseManager(
        database,
        ttl=timedelta(seconds=settings.leader_ttl),
        renew_interval=timedelta(seconds=settings.elect_interval),
        pooler=settings.is_pooler,
    )
    async with manager:
        note("stands")
        while True:
            try:
                async with manager.hold(LEASE) as lease:
                    await holder.hold(lease)
            except LeaseLostError:
                note("lost")


async def watch_signals(standing: anyio.CancelScope, holder: Holder) -> None:
    """SIGTERM ends the process; the other signals are faults."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) as received:
        async for number in received:
            match number:
                case signal.SIGUSR1:
                    holder.take_connections()
                case signal.SIGUSR2:
                    time.sleep(BLOCK_SHARE * settings.leader_ttl)
                case _:
                    standing.cancel()


async def run(holder: Holder) -> None:
    """Run as the settings say."""
    match settings.through:
        case "client":
            await run_client(holder)
        case "pool":
            url = settings.database_url
            holder.pool = await asyncpg.create_pool(url, min_size=1, max_size=POOL_SIZE)
            await run_manager(holder, holder.pool)
        case _:
            await run_manager(holder, settings.database_url)


async def main() -> None:
    """Run until SIGTERM."""
    async with anyio.create_task_group() as late:
        holder = Holder(late)
        async with anyio.create_task_group() as signals:
            with anyio.CancelScope() as standing:
                signals.start_soon(watch_signals, standing, holder)
                await run(holder)
            signals.cancel_scope.cancel()


if __name__ == "__main__":
    end_with_the_fleet()
    anyio.run(main)
