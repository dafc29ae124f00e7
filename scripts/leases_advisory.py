"""Measures for `scripts/leases advisory` how session advisory locks work in place of leases."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from tests.kit.pgbouncer import is_installed, pooled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TRY = "SELECT pg_try_advisory_lock(hashtextextended($1, 0))"
UNLOCK = "SELECT pg_advisory_unlock(hashtextextended($1, 0))"
PAIRS = 100
NAMES = 25
"""The number of names of 20 projections and five automations."""
FROZEN_FOR = 30.0
COLLISION_NAMES = 100_000
HOLDER = f"""
import asyncio, sys, asyncpg
async def main():
    connection = await asyncpg.connect(sys.argv[1])
    print(await connection.fetchval({TRY!r}, "frozen"), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
COLLISIONS = """
SELECT count(*) - count(DISTINCT hashtext('projection:' || n)) FROM generate_series(1, $1::int) AS n
"""
_PRIVATE = ("Private_Clean:", "Private_Dirty:")


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[asyncpg.Connection]:
    """Open a connection that also works through a pooler."""
    connection = await asyncpg.connect(url, statement_cache_size=0, timeout=20)
    try:
        yield connection
    finally:
        connection.terminate()


async def measure(url: str) -> dict[str, Any]:
    """Run all measurements."""
    return {
        "pooler": await behind_a_pooler(url) if is_installed() else None,
        "connections": await connections(url),
        "killed_free_after": round(await free_after(url, signal.SIGKILL), 4),
        "frozen_is_held_after": round(await free_after(url, signal.SIGSTOP)),
        "collisions": await collisions(url),
    }


async def behind_a_pooler(url: str) -> dict[str, Any]:
    """Measure behind a pooler in transaction mode. Two clients with little work try to get the same
    lock. The winners unlock it, and all disconnect. A lock that is still held remains until the
    pooler closes its connections."""
    both = lost = 0
    with pooled(url, size=2) as pooler_url:
        for number in range(PAIRS):
            holders, failures = await _lock_and_unlock(pooler_url, f"pooled:{number}")
            both += holders == 2
            lost += failures
        async with connected(url) as direct:
            left = await direct.fetchval(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
            )
    return {"pairs": PAIRS, "both_hold": both, "unlocks_in_vain": lost, "left_locked": left}


async def _lock_and_unlock(pooler_url: str, name: str) -> tuple[int, int]:
    """Return how many of two clients got the lock, and how many of their unlocks failed."""
    async with connected(pooler_url) as one, connected(pooler_url) as two:
        holders = sum([await client.fetchval(TRY, name) for client in (one, two)])
        # Other work of the pool: another client uses the server's connection in between.
        async with one.transaction():
            await one.fetchval("SELECT 1")
            unlocked = sum([await two.fetchval(UNLOCK, name) for _ in range(holders)])
    return holders, holders - unlocked


async def connections(url: str) -> dict[str, Any]:
    """Return the server's private memory for a connection per lock."""
    async with AsyncExitStack() as stack:
        pids: list[int] = []
        for number in range(NAMES):
            connection = await stack.enter_async_context(connected(url))
            await connection.fetchval(TRY, f"projection:{number}")
            pids.append(await connection.fetchval("SELECT pg_backend_pid()"))
        sizes = [_private(pid) for pid in pids]
    return {"names": NAMES, "connections": NAMES, "mib": round(sum(sizes) / 1024, 1)}


def _private(pid: int) -> int:
    """Return the private memory of a process in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(_PRIVATE))


async def free_after(url: str, how: signal.Signals) -> float:
    """Return the seconds until the lock of a process that got this signal is free; `FROZEN_FOR` if
    it still is not."""
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, url), stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    await holder.stdout.readline()
    holder.send_signal(how)
    began = time.monotonic()
    try:
        async with connected(url) as connection:
            while not await connection.fetchval(TRY, "frozen"):
                if time.monotonic() > began + FROZEN_FOR:
                    break
                await asyncio.sleep(0.001 if how is signal.SIGKILL else 0.1)
        return time.monotonic() - began
    finally:
        if how is not signal.SIGKILL:
            holder.kill()
        await holder.wait()


async def collisions(url: str) -> dict[str, Any]:
    """Return the chance that two of M names have the same number, and how many of 100,000 names
    do."""
    async with connected(url) as connection:
        found = await connection.fetchval(COLLISIONS, COLLISION_NAMES)
    chances = {
        f"{bits} bits": {str(names): chance(names, bits) for names in (25, 1_000, COLLISION_NAMES)}
        for bits in (32, 64)
    }
    return {"hashtext": {"names": COLLISION_NAMES, "found": found}, "chances": chances}


def chance(names: int, bits: int) -> float:
    """Return the chance that two of this many names have the same hash: 1 - exp(-M (M - 1) /
    2^(bits + 1))."""
    return float(f"{-math.expm1(-names * (names - 1) / 2 ** (bits + 1)):.2g}")
