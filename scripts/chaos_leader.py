"""Injects random faults into the leader and the other workers of a fleet."""

from __future__ import annotations

import json
import random
import statistics
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

import riverpy
from riverpy._postgres.driver import DATABASE_ERRORS
from scripts.chaos_fleet import ChaosOfFleet, Fault, make_plan
from tests.kit.bad_rows import JOBS
from tests.kit.fleet import WorkerSettings, running_fleet
from tests.kit.history import POLICIES, STATEMENTS, Broken, Violation, check, read
from tests.kit.stepped_server import make_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.bad_rows import Table
    from tests.kit.fleet import Fleet
    from tests.kit.history import History

SHORT = WorkerSettings(elect_interval=0.5, leader_ttl=1.5, dead_after=3.0)
DEFAULT = WorkerSettings()
INSERT_INTERVAL = 0.05
JOB_SECONDS_MOST = 1.0
CALM_LIMIT = 150.0
"""Seconds, beyond the time of a rescue, until the fleet must work again after the last fault. A row
that was refused is tried again within a minute, and its job can run a minute later."""


class Chaos(ChaosOfFleet):
    """One run against leader election and maintenance."""

    def __init__(self, fleet: Fleet, settings: WorkerSettings, plan: Sequence[Fault]) -> None:
        super().__init__(fleet, settings, plan)
        self.inserted: list[int] = []

    async def run(self, workers: int, seconds: float) -> History:
        """Inject faults for this many seconds, let the fleet recover, stop it, and return its
        history."""
        for number in range(workers):
            await (await self._fleet.add(f"w{number}", self._settings)).start()
        await self._break(seconds)
        await self._recover()
        await self._stop()
        async with self._fleet.server.connected() as connection:
            history = await read(connection)
        history.inserted, history.crashes = self.inserted, self.crashes
        history.clock_steps = self.clock_steps
        history.broken = [
            Broken(
                span.what,
                datetime.fromtimestamp(span.began, UTC),
                datetime.fromtimestamp(span.ended, UTC),
            )
            for span in self.spans
        ]
        history.validity = timedelta(seconds=self._settings.leader_ttl)
        return history

    async def _load(self) -> None:
        async with riverpy.Client(self._fleet.server.url) as client:
            while True:
                args = {"seconds": random.random() ** 3 * JOB_SECONDS_MOST}
                with suppress(*DATABASE_ERRORS):
                    result = await client.insert(riverpy.RawArgs("touch", json.dumps(args)))
                    self.inserted.append(result.job.id)
                await anyio.sleep(INSERT_INTERVAL)

    @property
    def _table(self) -> Table:
        return JOBS

    async def _leader_name(self) -> str:
        leader_id = await self._fetch_value(STATEMENTS["leader"]) or ""
        return leader_id.split(":")[0]

    async def _progress(self) -> str:
        terms = await self._fetch_value(STATEMENTS["term_count"])
        return f"terms {terms or '?'}  jobs {len(self.inserted)}"

    # -- afterwards

    async def _recover(self) -> None:
        """End all faults, and wait until the fleet works."""
        await self._end_faults()
        calm_since = datetime.now(UTC)
        limit = time.monotonic() + CALM_LIMIT + 5 * self._settings.dead_after
        while missing := await self._what_is_missing(calm_since):
            if time.monotonic() > limit:
                self.violations.append(Violation("the fleet recovers", missing))
                return
            await anyio.sleep(0.2)

    async def _what_is_missing(self, calm_since: datetime) -> str:
        if unfinished := await self._fetch_value(STATEMENTS["unfinished"]):
            return f"{unfinished} jobs are not finished"
        alive = await self._fetch_value(STATEMENTS["alive_since"], calm_since)
        if alive != len(self._fleet.workers):
            return f"{alive} workers send heartbeats"
        policies = await self._fetch_value(STATEMENTS["policies_since"], calm_since)
        missing = sorted(set(POLICIES) - set(policies or ()))
        return f"no slot is inserted for {', '.join(missing)}" if missing else ""


# --- the command


async def run_chaos(
    seed: int, *, seconds: float, workers: int, settings: WorkerSettings
) -> dict[str, Any]:
    """Run once, and return figures and violations."""
    plan = make_plan(seed, seconds=seconds, workers=workers, ttl=settings.leader_ttl)
    async with running_fleet(make_server) as fleet:
        chaos = Chaos(fleet, settings, plan)
        history = await chaos.run(workers, seconds)
        violations = [*chaos.violations, *check(history)]
        if violations:
            fleet.keep("history.json", msgspec.json.format(msgspec.json.encode(history)))
        gaps = history.gaps()
        return {
            "seed": seed,
            "seconds": seconds,
            "workers": workers,
            "terms": len(history.spans()),
            "gap_median_s": round(statistics.median(gaps), 3) if gaps else None,
            "gap_max_s": round(max(gaps), 3) if gaps else None,
            "faults": dict(sorted(chaos.done.items())),
            "writes": len(history.writes),
            "slots": len(history.slots),
            "jobs": len(history.jobs),
            "rescues": sum(job.rescues for job in history.jobs),
            "violations": [msgspec.structs.asdict(violation) for violation in violations],
            "logs": str(fleet.directory) if violations else None,
        }


def show(found: dict[str, Any]) -> None:
    """Print the result as text."""
    print(
        f"{found['terms']} terms; without a leader {found['gap_median_s']} s (median), "
        f"{found['gap_max_s']} s (max)"
    )
    print("faults: " + ", ".join(f"{count} {name}" for name, count in found["faults"].items()))
    print(
        f"{found['writes']} writes of terms, {found['slots']} periodic slots, "
        f"{found['jobs']} jobs, {found['rescues']} of them rescued"
    )
