"""An event log with two projections and an automation, as a process of a fleet runs them, and a
checker of what the fleet made of it.

    python -m tests.leases.singletons.event_log URL SCHEMA NAME MAIL [--unfenced]

SIGUSR1 tells it to stop itself, as by SIGSTOP, where that is worst: after it has read what it will
write.

Each projection applies every event once, in order: its checkpoint moves in the transaction that
applies, under the fence of its lease. The automation works a list of things to do, one item an
event: a letter, written once by the database; and a mail, sent at most once, which is a line at the
end of the file MAIL.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import uvloop

import riverpy
from tests.kit.fleet import end_with_the_fleet
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SQL = read_statements(Path(__file__).with_suffix(".sql"))
PROJECTIONS = ("history", "totals")
AUTOMATION = "automation"
TTL = timedelta(seconds=1.5)
BATCH = 10
LOOK_INTERVAL = 0.05
HOLD_MOST = 0.02
"""The longest time that a transaction stays open after its fence, in seconds, so that some faults
occur during it."""


class Application:
    """The work of one process."""

    def __init__(self, pool: asyncpg.Pool, client: riverpy.Client, mail: int, *, fenced: bool):
        self.pool, self.client, self.mail, self.fenced = pool, client, mail, fenced
        self.freezes = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.freeze_soon)
        for name in PROJECTIONS:
            client.singleton(name, partial(self.project, name))
        client.singleton(AUTOMATION, self.automate)

    def freeze_soon(self) -> None:
        """Freeze at the next read before a write."""
        self.freezes = True

    async def moment(self) -> None:
        """Freeze here if requested, between a read and the write."""
        await anyio.sleep(random.uniform(0, HOLD_MOST))
        if self.freezes:
            self.freezes = False
            os.kill(os.getpid(), signal.SIGSTOP)

    @asynccontextmanager
    async def fenced_connection(self, lease: riverpy.Lease) -> AsyncGenerator[Any]:
        """Open a transaction that commits only under the lease. With `--unfenced` it has no
        fence."""
        async with self.pool.acquire() as connection:
            if not self.fenced:
                yield connection
                return
            async with connection.transaction():
                await lease.fence(connection)
                yield connection

    async def project(self, name: str, lease: riverpy.Lease) -> None:
        """Apply new events in order."""
        async with self.fenced_connection(lease) as connection:
            await connection.execute(SQL["register"], name)
        while True:
            async with self.fenced_connection(lease) as connection:
                events = await connection.fetch(SQL["next_events"], name, BATCH)
                if events:
                    await self.moment()
                    columns = [
                        [event[key] for event in events] for key in ("id", "stream", "amount")
                    ]
                    await connection.execute(SQL["apply"], name, *columns, lease.epoch)
            if not events:
                await anyio.sleep(LOOK_INTERVAL)

    async def automate(self, lease: riverpy.Lease) -> None:
        """Work the list of things to do."""
        while True:
            todos = await self.pool.fetch(SQL["open_todos"], BATCH)
            for (event,) in todos:
                lease.expect_held()
                await self.client.run_at_most_once(f"mail {event}", partial(self.send, event))
                async with self.pool.acquire() as connection, connection.transaction():
                    write = partial(self.write_letter, event, lease.epoch)
                    letter = await self.client.run_once(f"letter {event}", write, tx=connection)
                    if letter.state is not riverpy.ExecutionState.IN_PROGRESS:
                        await connection.execute(SQL["todo_done"], event)
            if not todos:
                await anyio.sleep(LOOK_INTERVAL)

    async def send(self, event: int, claim: riverpy.Claim) -> None:
        """Send a mail: an effect outside of the database."""
        await self.moment()
        os.write(self.mail, f"{event} {claim.epoch}\n".encode())

    async def write_letter(self, event: int, epoch: int, connection: Any) -> None:
        """Write a letter: an effect in the database."""
        await connection.execute(SQL["write_letter"], event, epoch)


async def main(url: str, schema: str, name: str, mail: str, *, fenced: bool) -> None:
    """Run until stopped."""
    config = riverpy.Config(
        schema=schema,
        name=name,
        candidate=False,
        leader_ttl=TTL,
        elect_interval=TTL / 5,
        soft_stop_timeout=timedelta(0),
    )
    # A transaction without a fence ends soon, too, when its process is frozen: others wait for it.
    settings = {"search_path": schema, "idle_in_transaction_session_timeout": "1500"}
    descriptor = os.open(mail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    async with asyncpg.create_pool(url, min_size=0, max_size=5, server_settings=settings) as pool:
        client = riverpy.Client(url, config=config)
        Application(pool, client, descriptor, fenced=fenced)
        await client.run()


async def findings(connection: Any, mail: Path, kills: int) -> list[str]:
    """Return the violations after a run in which this many processes were killed or frozen."""
    found = [
        f"{check}: {dict(row)}"
        for check in ("misapplied", "wrong_totals", "late_writes", "wrong_letters")
        for row in await connection.fetch(SQL[check])
    ]
    sent = [int(line.split()[0]) for line in mail.read_text().splitlines()]
    found += [f"mail {event} was sent twice" for event in set(sent) if sent.count(event) > 1]
    events = (await connection.fetchrow(SQL["counts"]))["events"]
    unknown = {row["key"] for row in await connection.fetch(SQL["claims_left"])}
    unsent = {f"mail {event}" for event in range(1, events + 1)} - {f"mail {e}" for e in sent}
    found += [f"{key} was not sent, and nobody had claimed it" for key in unsent - unknown]
    if len(unknown) > kills:
        found.append(f"{len(unknown)} mails are unknown after {kills} faults")
    return found


if __name__ == "__main__":
    end_with_the_fleet()
    uvloop.run(main(*sys.argv[1:5], fenced="--unfenced" not in sys.argv))
