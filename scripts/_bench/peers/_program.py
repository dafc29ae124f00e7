"""The command line that the programs of all peers have, and their stopwatch.

install URL                 makes the tables in an empty database
insert URL (one|many) JOBS  inserts no-op jobs: {"per_s": ...}
work URL JOBS SLOTS         works the jobs that are there: {"work_per_s": ...}

A run is timed from the first line of the first job to that of the last one, in the process that
works: what a peer does after that, as storing the last results, is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Protocol


class Peer(Protocol):
    """Client of a peer for one database."""

    async def install(self, url: str) -> None:
        """Create the tables."""
        ...

    async def insert_one(self, url: str, jobs: int) -> float:
        """Insert jobs one at a time and return the seconds."""
        ...

    async def insert_100_callers(self, url: str, jobs: int) -> float:
        """Insert jobs in 100 tasks and return the seconds."""
        ...

    async def insert_many(self, url: str, jobs: int) -> float:
        """Insert jobs in one call and return the seconds."""
        ...

    async def work(self, url: str, slots: int) -> None:
        """Work jobs until cancelled."""
        ...


class Stopwatch:
    """Counts jobs. Each job calls `tick` in its first line."""

    def __init__(self) -> None:
        self.jobs = 0
        self._count = 0
        self._began = self._ended = 0.0
        self._done = asyncio.Event()

    def tick(self) -> None:
        """Count a job that starts."""
        if not self._count:
            self._began = time.perf_counter()
        self._count += 1
        if self._count == self.jobs:
            self._ended = time.perf_counter()
            self._done.set()

    async def rate(self) -> float:
        """Return jobs per second when all have run. The first job only starts the clock."""
        await self._done.wait()
        return (self.jobs - 1) / (self._ended - self._began)


WATCH = Stopwatch()


async def _work(peer: Peer, url: str, jobs: int, slots: int) -> dict[str, float]:
    WATCH.jobs = jobs
    working = asyncio.ensure_future(peer.work(url, slots))
    rate = asyncio.ensure_future(WATCH.rate())
    await asyncio.wait([working, rate], return_when=asyncio.FIRST_COMPLETED)
    if not rate.done():
        working.result()
        sys.exit("the worker ended before all jobs had run")
    await asyncio.sleep(0.2)  # give it time to store its results
    return {"work_per_s": rate.result()}


async def _run(peer: Peer, verb: str, url: str, *rest: str) -> dict[str, float]:
    match verb, rest:
        case "install", []:
            await peer.install(url)
            return {}
        case "insert", ["one", jobs]:
            return {"per_s": int(jobs) / await peer.insert_one(url, int(jobs))}
        case "insert", ["100_callers", jobs]:
            return {"per_s": int(jobs) / await peer.insert_100_callers(url, int(jobs))}
        case "insert", ["many", jobs]:
            return {"per_s": int(jobs) / await peer.insert_many(url, int(jobs))}
        case "work", [jobs, slots]:
            return await _work(peer, url, int(jobs), int(slots))
        case _:
            sys.exit(__doc__)


def main(peer: Peer, runner: type[asyncio.Runner] = asyncio.Runner) -> None:
    """Run the command line, then end the process even if something still runs in it."""
    with runner() as loop:
        print(json.dumps(loop.run(_run(peer, *sys.argv[1:]))), flush=True)
        os._exit(0)
