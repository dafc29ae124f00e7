"""Kills workers and restarts the server at random while jobs of ten steps run."""

from __future__ import annotations

import random
import time
from collections import Counter
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

import riverpy
from tests.kit.fleet import Shutdown, running_fleet
from tests.kit.history import Violation
from tests.kit.step_worker import KEPT, STEPS, Long, Record, StepSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.fleet import Fleet, Worker

TTL, INTERVAL, DEAD_AFTER = 1.5, 0.5, 2.0
RECOVERY_MAX = 60.0
"""Seconds within which all jobs must run again after a kill."""
DELAY_MAX = 0.3
"""Maximum seconds between the opening of steps and a kill."""
POLL = 0.02
ATTEMPTS_MAX = 10_000


class Kill(StrEnum):
    """The ways in which an attempt is ended."""

    SIGTERM = "SIGTERM"
    SIGKILL = "kill -9"
    RESTART = "restart of the server"
    CRASH = "crash of the server"


KILLS = (Kill.SIGTERM, Kill.SIGTERM, Kill.SIGKILL, Kill.SIGKILL, Kill.RESTART, Kill.CRASH)


class ChaosOfSteps:
    """One run. The steps are opened one after the other, so that kills hit all of them."""

    def __init__(self, seed: int, fleet: Fleet, kills: Sequence[Kill] | int) -> None:
        """`kills` are the kills in their order, or the number of random ones."""
        self._random = random.Random(seed)
        self._fleet = fleet
        self.kills = (
            [self._random.choice(KILLS) for _ in range(kills)]
            if isinstance(kills, int)
            else list(kills)
        )
        self._records = fleet.directory / "records"
        self._open_steps = fleet.directory / "open_steps"
        self.violations: list[Violation] = []

    async def run(self, workers: int, jobs: int) -> None:
        """Insert the jobs, kill, and wait for the end of the jobs."""
        self._records.touch()
        self._open(0)
        for number in range(workers):
            settings = StepSettings(
                elect_interval=INTERVAL,
                leader_ttl=TTL,
                dead_after=DEAD_AFTER,
                records=str(self._records),
                open_steps=str(self._open_steps),
            )
            await (await self._fleet.add(f"w{number}", settings)).start()
        async with riverpy.Client(self._fleet.server.url) as client:
            opts = riverpy.InsertOpts(max_attempts=ATTEMPTS_MAX)
            params = [riverpy.InsertManyParams(Long(), opts)] * jobs
            ids = {one.job.id for one in await client.insert_many(params)}
        for number, kill in enumerate(self.kills, start=1):
            pids = await self._until_running(ids)
            self._open(number * len(STEPS) // len(self.kills))
            await anyio.sleep(self._random.uniform(0, DELAY_MAX))
            await self._kill(kill, self._random.choice(pids))
        self._open(len(STEPS))
        await self._until_completed(jobs)

    def _open(self, step: int) -> None:
        temporary = self._open_steps.with_suffix(".new")
        temporary.write_text(str(step), "utf-8")
        temporary.replace(self._open_steps)

    async def _kill(self, kill: Kill, pid: int) -> None:
        """Kill the process that runs a job, or restart the server."""
        match kill:
            case Kill.SIGTERM | Kill.SIGKILL:
                worker = next(one for one in self._fleet.workers if one.pid == pid)
                await self._end(worker, kill)
                await worker.start()
            case Kill.RESTART | Kill.CRASH:
                how = Shutdown.FAST if kill is Kill.RESTART else Shutdown.IMMEDIATE
                await self._fleet.server.shut_down(how)
                await self._fleet.server.come_back()

    async def _end(self, worker: Worker, kill: Kill) -> None:
        if kill is Kill.SIGTERM:
            worker.terminate()
        else:
            worker.kill()
        await worker.ended()

    async def _until_running(self, ids: set[int]) -> list[int]:
        """Wait until each job runs in a process that lives. Return these processes."""
        pids: dict[int, int] = {}
        alive: set[int] = set()
        with anyio.move_on_after(RECOVERY_MAX):
            while True:
                pids = {one.job_id: one.pid for one in self.records() if one.what == "start"}
                alive = {worker.pid for worker in self._fleet.workers if worker.is_running}
                if pids.keys() == ids and alive.issuperset(pids.values()):
                    return sorted(pids.values())
                await anyio.sleep(POLL)
        self._violate("each job runs again", f"not within {RECOVERY_MAX} s: {pids}, alive {alive}")
        return sorted(alive)

    async def _until_completed(self, jobs: int) -> None:
        count = -1
        with anyio.move_on_after(RECOVERY_MAX):
            async with self._fleet.server.connected() as connection:
                while count != jobs:
                    await anyio.sleep(POLL)
                    count = await connection.fetchval(
                        "SELECT count(*) FROM river_job WHERE state = 'completed'"
                    )
        if count != jobs:
            self._violate("each job completes", f"{count} of {jobs}")

    def records(self) -> list[Record]:
        """Return all records so far. The last one of a killed process may be cut off."""
        found: list[Record] = []
        for line in self._records.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=Record))
            except msgspec.DecodeError:
                continue
        return found

    def check(self) -> None:
        """Check the records."""
        results: dict[tuple[int, int], list[str]] = {}
        for one in self.records():
            if one.is_repeated:
                self._violate("a stored result is not made again", str(one))
            if one.what == "got":
                results.setdefault((one.job_id, one.step), []).append(one.token)
        for (job_id, step), tokens in results.items():
            if any(former != later for former, later in pairwise(tokens)):
                text = f"job {job_id}, step {step}: {dict(Counter(tokens))}"
                self._violate("all attempts get the same result", text)

    def _violate(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))


async def run_chaos(
    seed: int, *, kills: Sequence[Kill] | int, workers: int, jobs: int
) -> dict[str, Any]:
    """Run, and return what happened as JSON values."""
    began = time.monotonic()
    async with running_fleet() as fleet:
        chaos = ChaosOfSteps(seed, fleet, kills)
        await chaos.run(workers, jobs)
        chaos.check()
        if chaos.violations:
            fleet.keep("violations.json", msgspec.json.encode(chaos.violations))
        records = chaos.records()
        kept = [one for one in records if one.step in KEPT]
        return {
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
            "jobs": jobs,
            "kills": dict(Counter(map(str, chaos.kills))),
            "attempts": sum(one.what == "start" for one in records),
            "plain_runs": sum(one.what == "run" for one in records) - _count(kept, "run"),
            "kept_runs": _count(kept, "run"),
            "kept_results": len({one.token for one in kept if one.what == "got"}),
            "kept_reads": _count(kept, "got"),
            "overtaken": sum(one.is_overtaken for one in kept),
            "violations": msgspec.to_builtins(chaos.violations),
            "logs": str(fleet.directory) if chaos.violations else None,
        }


def _count(records: list[Record], what: str) -> int:
    return sum(one.what == what for one in records)


def show(found: dict[str, Any]) -> None:
    """Print the result as text."""
    print(f"{found['jobs']} jobs of {len(STEPS)} steps, {found['attempts']} attempts")
    print("kills: " + ", ".join(f"{count} {name}" for name, count in found["kills"].items()))
    print(
        f"the steps with a kept result ran {found['kept_runs']} times until "
        f"{found['kept_results']} results were stored; attempts got them {found['kept_reads']} "
        f"times, {found['overtaken']} runs were of overtaken attempts; the other steps ran "
        f"{found['plain_runs']} times"
    )
