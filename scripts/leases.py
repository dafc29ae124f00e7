"""Measures what leases cost, at default times: a ttl of 15 s, renewed every 5 s.

`cost` measures, for several numbers of leases: the statements of a process that holds them and of
one that waits for them, the time and the WAL of a renewal, how soon another process has all of them
after a release and after a kill, and how the leases spread over three processes. `advisory`
measures session advisory locks for comparison. Both use a PostgreSQL of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import leases_advisory
from tests.kit.fleet import Server, running_fleet, with_user
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import asyncpg

ROOT = Path(__file__).resolve().parents[1]
STATEMENTS = read_statements(Path(__file__).with_suffix(".sql"))
TTL = 15.0
INTERVAL = TTL / 3
HELD = (1, 25, 200)
NAMES = 25
TAKEOVERS = (
    (signal.SIGTERM, ("--client",)),
    (signal.SIGTERM, ()),
    (signal.SIGKILL, ()),
)
LIMIT = 240.0
TICKS = os.sysconf("SC_CLK_TCK")


class Holder:
    """A process that acquires leases."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.began: dict[str, float] = {}
        """Start times of its terms, by name of the lease."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, url: str, role: str, names: int, *options: str) -> Holder:
        """Start a process that connects as this role. With `--client` it uses a client, which
        listens."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scripts._lease_holder", with_user(url, role)),
            *("--names", *(f"projection:{number}" for number in range(names))),
            *("--ttl", str(TTL), *options),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def until_held(self, names: int) -> None:
        """Return when it has started this many terms."""
        async with asyncio.timeout(LIMIT):
            while len(self.began) < names:  # noqa: ASYNC110 (it prints lines)
                await asyncio.sleep(0.005)

    def cpu(self) -> float:
        """Return the CPU time of the process, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal and wait for its end."""
        if self.process.returncode is None:
            self.process.send_signal(how)
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            at, name = line.decode().split()
            self.began[name] = float(at)


class LeaseServer:
    """The server of the measurements."""

    def __init__(self, server: Server, connection: asyncpg.Connection, seconds: float) -> None:
        self.url = server.url
        self.connection = connection
        self.seconds = seconds

    @asynccontextmanager
    async def holders(
        self, *wanted: tuple[str, int], options: Sequence[str] = ()
    ) -> AsyncGenerator[list[Holder]]:
        """Run processes, each given by its role and its number of names. Each starts when the one
        before holds all of its leases. The table of leases is empty before the first."""
        await self.connection.execute(STATEMENTS["clear"])
        started: list[Holder] = []
        try:
            for role, names in wanted:
                if started:
                    await started[-1].until_held(names)
                started.append(await Holder.start(self.url, role, names, *options))
            yield started
        finally:
            for holder in started:
                await holder.end()


async def cost(server: LeaseServer) -> dict[str, Any]:
    """Run all measurements of `cost`."""
    return {
        "held": [await held(server, names) for names in HELD],
        "takeover": [
            await takeover(server, names, how, options)
            for how, options in TAKEOVERS
            for names in (1, NAMES)
        ],
        "spread": await spread(server),
    }


async def held(server: LeaseServer, names: int) -> dict[str, Any]:
    """Measure a process that holds this many leases, and one that waits for them."""
    async with server.holders(("holder", names), ("follower", names)) as (holder, follower):
        await asyncio.sleep(2 * INTERVAL)
        await server.connection.execute(STATEMENTS["reset"])
        before, cpus = await churn(server), [one.cpu() for one in (holder, follower)]
        await asyncio.sleep(server.seconds)
        rows = {
            role: await server.connection.fetchrow(STATEMENTS["statements"], role)
            for role in ("holder", "follower")
        }
        after = await churn(server)
        shares = [
            (one.cpu() - cpu) / server.seconds
            for one, cpu in zip((holder, follower), cpus, strict=True)
        ]
    renewals = rows["holder"]["renewals"] or 1
    updates = after["updates"] - before["updates"]
    return {
        "names": names,
        "statements_per_second": round(rows["holder"]["calls"] / server.seconds, 3),
        "renewals_per_interval": round(renewals * INTERVAL / server.seconds, 2),
        "follower_statements_per_second": round(rows["follower"]["calls"] / server.seconds, 3),
        "renewal_ms": round(rows["holder"]["milliseconds"] / renewals, 3),
        "renewal_wal_bytes": round(rows["holder"]["wal_bytes"] / renewals),
        "rows_locked_per_second": round(updates / server.seconds, 2),
        "hot_share": round((after["hot"] - before["hot"]) / (updates or 1), 3),
        "table_bytes": after["bytes"],
        "core_share": round(shares[0], 4),
        "follower_core_share": round(shares[1], 4),
    }


async def churn(server: LeaseServer) -> dict[str, int]:
    """Return the server's statistics of the table, which are a moment late."""
    await asyncio.sleep(1.5)
    row = await server.connection.fetchrow(STATEMENTS["churn"])
    assert row is not None
    return dict(row)


async def takeover(
    server: LeaseServer, names: int, how: signal.Signals, options: Sequence[str]
) -> dict[str, Any]:
    """Return the seconds from the end of one process until another has its first lease, and all of
    its leases."""
    wanted = ("holder", names), ("follower", names)
    async with server.holders(*wanted, options=options) as (holder, follower):
        await asyncio.sleep(2 * INTERVAL)
        ended_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        await holder.end(how)
        await follower.until_held(names)
    times = [at - ended_at for at in follower.began.values()]
    return {
        "names": names,
        "after": how.name,
        "by": "client" if options else "manager",
        "first": round(min(times), 3),
        "all": round(max(times), 3),
    }


async def spread(server: LeaseServer) -> dict[str, Any]:
    """Count how 25 leases spread over three processes that start together, and over two waiting
    processes after the holder of all leases was killed."""
    async with server.holders() as holders:
        holders += [await Holder.start(server.url, "holder", NAMES) for _ in range(3)]
        await until_spread(holders)
        together = [len(holder.began) for holder in holders]
    async with server.holders(("holder", NAMES), ("follower", NAMES)) as holders:
        holders.append(await Holder.start(server.url, "follower", NAMES))
        await asyncio.sleep(2 * INTERVAL)
        await holders[0].end()
        await until_spread(holders[1:])
        return {"together": together, "killed": [len(holder.began) for holder in holders[1:]]}


async def until_spread(holders: list[Holder]) -> None:
    """Return when each name is held."""
    async with asyncio.timeout(LIMIT):
        while sum(len(Counter(holder.began)) for holder in holders) < NAMES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def run(what: str, seconds: float) -> dict[str, Any]:
    """Measure on a server of its own."""
    settings = {"fsync": "on", "shared_preload_libraries": "pg_stat_statements"}
    async with running_fleet(lambda place: Server(place, **settings)) as fleet:
        if what == "advisory":
            return await leases_advisory.measure(fleet.server.url)
        async with fleet.server.connected() as connection:
            await connection.execute(STATEMENTS["roles"])
            return await cost(LeaseServer(fleet.server, connection, seconds))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="scripts/leases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=["cost", "advisory"], default="cost")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds of each cost measurement (30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in one line")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.what, arguments.seconds))
    print(json.dumps(found, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
