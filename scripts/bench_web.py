"""Measures pages of the dashboard beside many jobs. Exit code 1: a goal is missed.

An embedded PostgreSQL gets jobs in all states, in 60 queues and of 40 kinds. `riverpy web` sends
each page several times. The time of a page includes that of `riverpy web`, so the server needs
less. Then viewers keep the home page open, and the processor time of the server and of `riverpy
web` is read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg

from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Sequence

RIVERPY = Path(sys.executable).with_name("riverpy")
STATEMENTS = read_statements(Path(__file__).with_suffix(".sql"))
ROWS_PER_STATEMENT = 1_000_000
PAGES = (
    "/",
    "/jobs",
    "/jobs?state=available",
    "/jobs?state=completed",
    "/jobs?state=completed&kind=kind_3",
    "/jobs?state=available&kind=kind_5",
    "/jobs?state=discarded&error=boom+3",
    "/jobs?state=completed&tag=tag20",
    "/jobs?state=retryable&queue=queue_5",
    "/jobs/1",
    "/queues",
    "/queue?name=queue_5",
    "/workers",
    "/periodic",
    "/leader",
    "/doctor",
    "/api/jobs?state=available",
    "/api/states",
)
STATUS_EXPIRY_SECONDS = 10.0
"""The status that the pages share is older than its limit after this time."""
PAGE_MS_MAX = 100.0
SERVER_PERCENT_MAX = 5.0
WARM_UP_SECONDS = 5.0


async def fill(url: str, rows: int) -> None:
    """Insert the jobs, and show the progress."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("set synchronous_commit = off; set maintenance_work_mem = '512MB'")
        indexes = [row[0] for row in await connection.fetch(STATEMENTS["read_indexes"])]
        await connection.execute(STATEMENTS["drop_indexes"])
        for first in range(1, rows + 1, ROWS_PER_STATEMENT):
            last = min(first + ROWS_PER_STATEMENT - 1, rows)
            await connection.execute(STATEMENTS["fill"], first, last)
            print(f"{last:,} of {rows:,} jobs", file=sys.stderr)
        for index in indexes:
            await connection.execute(index)
        await connection.execute("vacuum analyze river_job")
        print("indexes made", file=sys.stderr)
    finally:
        await connection.close()


class Site:
    """`riverpy web` on a free port."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port

    @classmethod
    async def start(cls, database_url: str) -> Site:
        """Start it, and wait for its address."""
        process = await asyncio.create_subprocess_exec(
            *(RIVERPY, "web", "--port", "0", "--database-url", database_url),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", line)
        assert found, line
        return cls(process, found[0])

    async def open(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request for a page."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n\r\n"
        )
        writer.write(request.encode())
        return reader, writer

    async def time_page(self, path: str) -> float:
        """Return how many milliseconds a page took."""
        began = time.perf_counter()
        reader, writer = await self.open(path)
        text = await reader.read()
        took = (time.perf_counter() - began) * 1000
        writer.close()
        assert text.startswith(b"HTTP/1.1 200"), (path, text[:100])
        return took

    async def follow_home(self) -> None:
        """Read the live updates of the home page."""
        reader, writer = await self.open("/live?path=%2F")
        try:
            while await reader.read(65_536):
                pass
        finally:
            writer.close()


def read_processor_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of processes, and of their children that ended."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except FileNotFoundError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def list_processes(parent: int) -> list[int]:
    """Return a process and its children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *map(int, children)]


async def time_pages(site: Site, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and the maximum time of each page, and of home with a new status."""
    times: dict[str, list[float]] = {path: [] for path in PAGES}
    for path in PAGES:
        await site.time_page(path)
    for _ in range(rounds):
        for path in PAGES:
            times[path].append(await site.time_page(path))
    times["/ (new status)"] = []
    for _ in range(3):
        await asyncio.sleep(STATUS_EXPIRY_SECONDS)
        times["/ (new status)"].append(await site.time_page("/"))
    return {
        path: {"median_ms": round(statistics.median(of_path), 1), "max_ms": round(max(of_path), 1)}
        for path, of_path in times.items()
    }


async def follow(site: Site, server: int, viewers: int, seconds: float) -> dict[str, float]:
    """Return the share of a core that the server and `riverpy web` use while viewers look."""
    async with asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(site.follow_home()) for _ in range(viewers)]
        await asyncio.sleep(WARM_UP_SECONDS)
        processes = {"server": list_processes(server), "web": [site.process.pid]}
        before = {name: read_processor_seconds(pids) for name, pids in processes.items()}
        await asyncio.sleep(seconds)
        used = {
            name: read_processor_seconds(pids) - before[name] for name, pids in processes.items()
        }
        for task in following:
            task.cancel()
    return {f"{name}_percent": round(one / seconds * 100, 1) for name, one in used.items()}


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    postgres = EmbeddedPostgres(f"bench-web-{os.getpid()}")
    await asyncio.to_thread(postgres.start)
    try:
        await migrate_all(postgres.url)
        await fill(postgres.url, given.rows)
        site = await Site.start(postgres.url)
        try:
            pages = await time_pages(site, given.rounds)
            lines = (postgres.directory / "data" / "postmaster.pid").read_text().split()
            shares = await follow(site, int(lines[0]), given.viewers, given.seconds)
        finally:
            site.process.terminate()
            await site.process.wait()
    finally:
        await asyncio.to_thread(postgres.remove)
    return {"rows": given.rows, "pages": pages, "viewers": given.viewers, **shares}


def main() -> int:
    """Measure and print; exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench web", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="jobs (1000000)")
    parser.add_argument("--rounds", type=int, default=10, help="times each page is sent (10)")
    parser.add_argument("--viewers", type=int, default=100, help="open home pages (100)")
    parser.add_argument("--seconds", type=float, default=30, help="time of the viewers (30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if min(given.rows, given.rounds, given.viewers) < 1 or given.seconds <= 0:
        parser.error("--rows, --rounds and --viewers must be 1 or more, and --seconds above 0")
    found = asyncio.run(measure(given))
    slow = [path for path, times in found["pages"].items() if times["median_ms"] > PAGE_MS_MAX]
    is_ok = not slow and found["server_percent"] <= SERVER_PERCENT_MAX
    if given.json:
        print(json.dumps({"ok": is_ok} | found))
        return 0 if is_ok else 1
    print(f"{found['rows']:,} jobs, times in ms (goal: median at most {PAGE_MS_MAX:g})")
    for path, times in found["pages"].items():
        mark = "  slow" if path in slow else ""
        print(f"{path:<40} median {times['median_ms']:7}  max {times['max_ms']:7}{mark}")
    print(
        f"{found['viewers']} viewers: the server {found['server_percent']} % of a core "
        f"(goal: at most {SERVER_PERCENT_MAX:g}), riverpy web {found['web_percent']} %"
    )
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
