"""Compares `insert_and_wait` with a bare loop that polls every 5 ms. Exit code 1: a goal is missed.

Two worker processes work the jobs, each of 50 ms. In each round this process, which only inserts,
makes 200 calls at once. The bare loop inserts the same rows with asyncpg, over as many connections,
and one more connection reads all ids every 5 ms. A time is that from the call to its result. The
figures are medians of the rounds. Then 200 calls wait while the server restarts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

import riverpy
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from scripts._wait_worker import Short
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ROOT = Path(__file__).resolve().parents[1]
RIVERPY = Path(sys.executable).with_name("riverpy")
STATEMENTS = read_statements(Path(__file__).with_suffix(".sql"))
WORKERS = 2
POLL_SECONDS = 0.005
NOTIFY_SECONDS = 0.002
"""The bare loop notifies as seldom as riverpy, because NOTIFY makes commits wait for each other."""
TIMEOUT = timedelta(seconds=60)
P95_RATIO_MAX = 1.5
CONNECTIONS_MAX = 2


@asynccontextmanager
async def working(url: str) -> AsyncGenerator[None]:
    """Run the worker processes."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(str(RIVERPY), "worker", "scripts._wait_worker:client", "--log-level", "error"),
            cwd=ROOT,
            env={**os.environ, "DATABASE_URL": url},
        )
        for _ in range(WORKERS)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await process.wait()


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


async def run_at_once(count: int, call: Any) -> list[float]:
    """Make calls at once, and return the seconds that each took."""

    async def measure(n: int) -> float:
        start = time.perf_counter()
        await call(n)
        return time.perf_counter() - start

    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(n)) for n in range(count)]
    return [call.result() for call in calls]


class BareLoop:
    """Inserts jobs with asyncpg, and reads the states of all of them every 5 ms."""

    def __init__(self, url: str, pool: asyncpg.Pool) -> None:
        self._url, self._pool = url, pool
        self._ended: dict[int, asyncio.Event] = {}
        self._notified_at = 0.0

    @asynccontextmanager
    async def polling(self) -> AsyncGenerator[None]:
        """Poll during the block."""
        connection = await asyncpg.connect(self._url)
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(self._poll(connection))
            yield
            poll.cancel()
        await connection.close()

    async def _poll(self, connection: asyncpg.Connection) -> None:
        statement = await connection.prepare(STATEMENTS["ended"])
        while True:
            if self._ended:
                for job_id, _output in await statement.fetch(list(self._ended)):
                    self._ended.pop(job_id).set()
            await asyncio.sleep(POLL_SECONDS)

    async def insert_and_wait(self, n: int) -> None:
        """Insert a job, and wait until a poll finds its end."""
        name, now = "insert", time.monotonic()
        if now - self._notified_at > NOTIFY_SECONDS:
            name, self._notified_at = "insert_and_notify", now
        job_id = await self._pool.fetchval(STATEMENTS[name], json.dumps({"n": n}))
        ended = self._ended[job_id] = asyncio.Event()
        await ended.wait()


async def compare(url: str, calls: int, rounds: int) -> dict[str, list[list[float]]]:
    """Measure both in turns. Return the times of each round. The first round is not counted."""
    found: dict[str, list[list[float]]] = {"riverpy": [], "bare": []}
    pool_size = riverpy.Config().pool_size
    async with (
        riverpy.Client(url) as client,
        asyncpg.create_pool(url, min_size=pool_size, max_size=pool_size) as pool,
    ):
        bare = BareLoop(url, pool)

        async def insert_and_wait(n: int) -> None:
            row = await client.insert_and_wait(Short(n), timeout=TIMEOUT)
            assert riverpy.result(row) == n

        for number in range(rounds + 1):
            for name in sorted(found, reverse=bool(number % 2)):
                if name == "bare":
                    async with bare.polling():
                        times = await run_at_once(calls, bare.insert_and_wait)
                else:
                    times = await run_at_once(calls, insert_and_wait)
                if number:
                    found[name].append(times)
    return found


async def count_connections(url: str, calls: int) -> int:
    """Return how many connections a client has that waits in many calls, and does nothing else."""
    most = 0
    async with riverpy.Client(url) as inserting, riverpy.Client(url) as waiting:
        jobs = [riverpy.InsertManyParams(Short(n)) for n in range(calls)]
        ids = [one.job.id for one in await inserting.insert_many(jobs)]
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(waiting.wait(job_id)) for job_id in ids]
            while not all(wait.done() for wait in waits):
                pool, notifier = waiting._pool, waiting._listener._own_notifier  # noqa: SLF001
                assert pool is not None
                is_listening = notifier is not None and notifier.is_connected
                most = max(most, pool.get_size() + is_listening)
                await asyncio.sleep(0.001)
    return most


async def restart(postgres: EmbeddedPostgres, calls: int) -> dict[str, int]:
    """Restart the server while calls wait. Return how many ended, failed and hung."""
    counts = {"ended": 0, "failed": 0, "hung": 0}
    async with riverpy.Client(postgres.url) as client:
        jobs = [
            riverpy.InsertManyParams(Short(n), riverpy.InsertOpts(notify_end=True))
            for n in range(calls)
        ]
        ids = [one.job.id for one in await client.insert_many(jobs)]
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(_wait(client, job_id)) for job_id in ids]
            await asyncio.sleep(0.05)
            pid = int((postgres.directory / "data" / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGINT)
            await asyncio.to_thread(_wait_for_exit, pid)
            await asyncio.to_thread(postgres.start)
        for wait in waits:
            counts[wait.result()] += 1
    return counts


def _wait_for_exit(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


async def _wait(client: riverpy.Client, job_id: int) -> str:
    try:
        row = await client.wait(job_id, timeout=TIMEOUT)
    except riverpy.WaitTimeoutError:
        return "hung"
    return "ended" if row.state is riverpy.JobState.COMPLETED else "failed"


async def measure(calls: int, rounds: int) -> dict[str, Any]:
    """Measure everything."""
    postgres = EmbeddedPostgres(f"wait-{os.getpid()}")
    await asyncio.to_thread(postgres.start)
    try:
        await migrate_all(postgres.url)
        async with AsyncExitStack() as running:
            await running.enter_async_context(working(postgres.url))
            times = await compare(postgres.url, calls, rounds)
            connections = await count_connections(postgres.url, calls)
            after_restart = await restart(postgres, calls)
    finally:
        await asyncio.to_thread(postgres.remove)
    found: dict[str, Any] = {
        f"p{percent}_ms": {
            name: round(statistics.median(percentile(one, percent) for one in of_rounds), 1)
            for name, of_rounds in times.items()
        }
        for percent in (50, 95, 99)
    }
    ratios = [
        percentile(ours, 95) / percentile(bare, 95)
        for ours, bare in zip(times["riverpy"], times["bare"], strict=True)
    ]
    found["p95_ratio"] = round(statistics.median(ratios), 2)
    return found | {"connections": connections, "restart": after_restart}


def main() -> int:
    """Measure and print; exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench wait", description=__doc__)
    parser.add_argument("-n", "--calls", type=int, default=200, help="calls at once (200)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds (10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if given.calls < 2 or given.rounds < 1:
        parser.error("--calls is 2 or more, and --rounds 1 or more")
    found = asyncio.run(measure(given.calls, given.rounds))
    is_ok = (
        found["p95_ratio"] < P95_RATIO_MAX
        and found["connections"] <= CONNECTIONS_MAX
        and found["restart"]["ended"] == given.calls
    )
    if given.json:
        print(json.dumps({"ok": is_ok} | found))
        return 0 if is_ok else 1
    for name in ("p50_ms", "p95_ms", "p99_ms"):
        print(f"{name:<12} riverpy {found[name]['riverpy']:8}   bare loop {found[name]['bare']:8}")
    print(f"p95 ratio    {found['p95_ratio']} (goal: below {P95_RATIO_MAX})")
    print(f"connections  {found['connections']} (goal: at most {CONNECTIONS_MAX})")
    print(
        "restart      " + ", ".join(f"{count} {name}" for name, count in found["restart"].items())
    )
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
