"""The example of an event log: three processes project and act on it while they are killed and
frozen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._log_events import SINGLETON_LOST_ITS_LEASE
from tests.kit.fleet import ROOT
from tests.leases.singletons.event_log import AUTOMATION, PROJECTIONS, SQL, findings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema

FAULTS = int(os.environ.get("EVENT_LOG_FAULTS", "4"))
MODE = os.environ.get("EVENT_LOG_MODE", "")
"""With `--unfenced` the checker must find a violation."""
EVENTS = 3
"""The number of events that are appended at a time."""
POLL = 0.02


class Processes:
    """Three processes. Each is started again after it was killed."""

    def __init__(self, schema: Schema, directory: Path) -> None:
        self.schema, self.mail, self.log = schema, directory / "mail", directory / "log"
        self.mail.touch()
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> None:
        with self.log.open("ab") as log:
            self.running[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.leases.singletons.event_log",
                self.schema.url,
                self.schema.name,
                name,
                str(self.mail),
                MODE,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    async def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        await self.running[name].wait()

    async def stop(self) -> None:
        """SIGKILL ends them: their tables are dropped next."""
        for process in self.running.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                await process.wait()


@pytest.fixture
async def processes(schema: Schema, tmp_path: Path) -> AsyncGenerator[Processes]:
    """Processes on a new event log."""
    await schema.execute(SQL["create"])
    processes = Processes(schema, tmp_path)
    try:
        for name in ("a", "b", "c"):
            await processes.start(name)
        yield processes
    finally:
        await processes.stop()
        tables = "event_log, projection, applied, stream_total, letter, todo"
        await schema.execute(f"drop table {tables}")


@asynccontextmanager
async def appending(schema: Schema) -> AsyncGenerator[None]:
    """Append events during the block."""

    async def append() -> None:
        async with schema.connected() as connection:
            while not is_over:
                await connection.execute(SQL["append"], EVENTS)
                await anyio.sleep(random.uniform(0, 0.4))

    is_over = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append)
        yield
        is_over = True


async def holder_of(schema: Schema, lease: str, *, beside: int = 0) -> tuple[str, int]:
    """Return the holder of a lease and its epoch, if the epoch is not `beside`."""
    while True:
        row = await schema.fetchrow(SQL["holder"], f"s:{lease}")
        if row is not None and row["epoch"] != beside:
            return row["holder"].split(":")[0], row["epoch"]
        await anyio.sleep(POLL)


async def until_past(schema: Schema, column: str, least: int) -> None:
    """Return when this count is above `least`."""
    while (await counts(schema))[column] <= least:
        await anyio.sleep(POLL)


async def counts(schema: Schema) -> dict[str, int]:
    """Return the counts of the run."""
    row = await schema.fetchrow(SQL["counts"])
    assert row is not None
    return dict(row)


async def strike(processes: Processes, number: int) -> None:
    """Kill the holder of a lease, or freeze it before a write until the next holder has made its
    first steps."""
    schema = processes.schema
    lease = (*PROJECTIONS, AUTOMATION)[number % 3]
    column = "done" if lease == AUTOMATION else "applied"
    await until_past(schema, column, (await counts(schema))[column])
    name, epoch = await holder_of(schema, lease)
    if number % 2:
        await processes.kill(name)
        await processes.start(name)
        await holder_of(schema, lease, beside=epoch)
    else:
        processes.running[name].send_signal(signal.SIGUSR1)
        try:
            await holder_of(schema, lease, beside=epoch)
            await until_past(schema, column, (await counts(schema))[column])
        finally:
            processes.running[name].send_signal(signal.SIGCONT)


@pytest.mark.timeout(60 + 30 * FAULTS)
async def test_each_event_once(processes: Processes, capsys: Any) -> None:
    """Each projection applies each event once and in order, and each side effect happens once,
    although processes are killed and frozen. The lag of each projection is visible, and becomes
    zero."""
    schema, lags = processes.schema, dict.fromkeys(PROJECTIONS, 0.0)

    async def watch_lag() -> None:
        for _ in count():
            for name, _events, seconds in await watcher.fetch(SQL["lag"]):
                lags[name] = max(lags[name], seconds)
            await anyio.sleep(0.1)

    async with schema.connected() as watcher, anyio.create_task_group() as tasks:
        tasks.start_soon(watch_lag)
        async with appending(schema):
            for number in range(FAULTS):
                await strike(processes, number)
        tasks.cancel_scope.cancel()
    while True:
        lag = await schema.fetch(SQL["lag"])
        now = await counts(schema)
        if not any(row["events"] for row in lag) and now["done"] == now["events"]:
            break
        await anyio.sleep(POLL)
    losses = processes.log.read_text().count(
        SINGLETON_LOST_ITS_LEASE
    )  # where the machine stalls, too
    assert await findings(schema, processes.mail, FAULTS + losses) == []
    assert {row["name"] for row in lag} == set(PROJECTIONS)
    with capsys.disabled():
        if FAULTS > 4:
            print(f"\n{FAULTS} faults, {now['events']} events, greatest lag in seconds: {lags}")
