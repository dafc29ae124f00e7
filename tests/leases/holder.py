"""A process that holds a lease and writes under it, for a test that freezes the process.

It takes a URL, a schema, and `fence first` (start the fenced transaction before it prints that it
holds the lease) or `fence late`. It writes when it reads a line, and prints the result.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import asyncpg

from riverpy import LeaseLostError, LeaseManager
from tests.leases.backends import ADD_EFFECT

TTL, INTERVAL = timedelta(seconds=4), timedelta(seconds=1)


async def main(url: str, schema: str, *, fence_first: bool) -> None:
    """Hold the lease, wait for a line, write."""
    connection = await asyncpg.connect(url, server_settings={"search_path": schema})
    async with LeaseManager(url, schema=schema, ttl=TTL, renew_interval=INTERVAL) as leases:
        lease = await leases.try_acquire("x")
        if lease is None:
            raise SystemExit("somebody has the lease")
        try:
            async with connection.transaction():
                if fence_first:
                    await lease.fence(connection)
                print("held", flush=True)
                sys.stdin.readline()
                if not fence_first:
                    await lease.fence(connection)
                await connection.execute(ADD_EFFECT, "stale")
        except (LeaseLostError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            print(type(error).__name__, flush=True)
        else:
            print("committed", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], fence_first=sys.argv[3] == "fence first"))
