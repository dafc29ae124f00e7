"""Injects random faults into processes that hold leases, run singletons and lead domains."""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from scripts.chaos_fleet import ChaosOfFleet, make_plan
from tests.kit.bad_rows import LEASES as LEASES_TABLE
from tests.kit.fleet import running_fleet
from tests.kit.history import STATEMENTS as STATEMENTS_OF_FLEET
from tests.kit.history import Violation
from tests.kit.lease_chaos import DisabledProtection, LeaseChaosSettings
from tests.kit.lease_history import STATEMENTS, ClockStep, check, read, read_notes
from tests.kit.stepped_server import make_server

if TYPE_CHECKING:
    from tests.kit.bad_rows import Table
    from tests.kit.fleet import Worker
    from tests.kit.lease_history import LeaseHistory

LEASES = ("one", "two", "three")
SINGLETONS = ("projection", "automation")
DOMAINS = ("left", "right")
HELD = {*(f"s:{name}" for name in LEASES + SINGLETONS), *(f"d:{name}" for name in DOMAINS)}
"""The lease rows that a process must hold."""
TTL, INTERVAL = 1.5, 0.5
BOUND = 3.0
"""Seconds within which a free lease must be acquired. A process tries once in each interval, and a
try can wait for a transaction under the fence of the old term. The machine may be busy."""
CALM_LIMIT = 60.0
"""Seconds after the last fault until all leases must be held."""
CALM = 2 * TTL
"""Seconds for which each lease must then keep its holder, unless the holder releases it."""


class ChaosOfLeases(ChaosOfFleet):
    """One run against leases."""

    async def run(self, workers: int, seconds: float, bound: float) -> LeaseHistory:
        """Inject faults for this many seconds, let the fleet recover, stop it, and return its
        history."""
        await self._prepare(workers)
        await self._break(seconds)
        await self._end_faults()
        calm_since = time.time()
        await self._recover()
        await self._stop()
        async with self._fleet.server.connected() as connection:
            history = await read(connection)
            if held := await connection.fetch(STATEMENTS["held"]):
                self.violations.append(Violation("a stop releases all leases", str(held)))
        history.notes = read_notes(map(self._notes, self._fleet.workers))
        names = [worker.name for worker in self._fleet.workers]
        history.broken, history.workers = [*self.spans, *self.row_spans], names
        history.clock_steps = [
            ClockStep(step.began.timestamp(), step.ended.timestamp()) for step in self.clock_steps
        ]
        history.validity = TTL
        for number, domain in enumerate(DOMAINS):
            history.candidates[f"d:{domain}"] = names[number :: len(DOMAINS)]
        history.calm_since, history.bound = calm_since, bound
        return history

    async def _prepare(self, workers: int) -> None:
        assert isinstance(self._settings, LeaseChaosSettings)
        async with self._fleet.server.connected() as connection:
            await connection.execute(STATEMENTS["create"])
            if self._settings.broken is DisabledProtection.EPOCH:
                await connection.execute(STATEMENTS["break_epoch"])
        for number in range(workers):
            name, domain = f"w{number}", DOMAINS[number % len(DOMAINS)]
            notes = str(self._fleet.directory / f"{name}.notes")
            settings = msgspec.structs.replace(self._settings, notes=notes, domain=domain)
            worker = await self._fleet.add(name, settings)
            await worker.start()

    @property
    def _table(self) -> Table:
        return LEASES_TABLE

    def _notes(self, worker: Worker) -> Any:
        return worker.log.with_suffix(".notes")

    async def _leader_name(self) -> str:
        """Return a worker that holds one of the leases."""
        holder = await self._fetch_value(STATEMENTS["holder"]) or ""
        pids = {str(worker.pid): worker.name for worker in self._fleet.workers}
        return next((pids[part] for part in holder.split(":") if part in pids), "")

    async def _progress(self) -> str:
        return f"terms {await self._fetch_value(STATEMENTS['grant_count'])}"

    async def _recover(self) -> None:
        """Wait until all workers run and every lease is held."""
        calm_since = datetime.now(UTC)
        limit = time.monotonic() + CALM_LIMIT
        while missing := await self._what_is_missing(calm_since):
            if time.monotonic() > limit:
                self.violations.append(Violation("the fleet recovers", missing))
                return
            await anyio.sleep(0.1)
            await self._start_ended()  # its start may have begun before the faults ended
        await anyio.sleep(CALM)

    async def _what_is_missing(self, calm_since: datetime) -> str:
        if free := HELD - await self._held():
            return f"no process holds {', '.join(sorted(free))}"
        alive = await self._fetch_value(STATEMENTS_OF_FLEET["alive_since"], calm_since)
        count = len(self._fleet.workers)
        return "" if alive == count else f"{alive} of {count} workers send heartbeats"

    async def _held(self) -> set[str]:
        async with self._fleet.server.connected() as connection:
            return {row["name"] for row in await connection.fetch(STATEMENTS["held"])}


# --- the command


async def run_chaos(
    seed: int,
    *,
    seconds: float,
    workers: int,
    bound: float = BOUND,
    broken: DisabledProtection | None = None,
) -> dict[str, Any]:
    """Run once, and return figures and violations.

    Args: seed, seconds, workers: the plan. bound: seconds within which a free lease must be
    acquired. broken: the protection that is switched off.
    """
    plan = make_plan(seed, seconds=seconds, workers=workers, ttl=TTL)
    settings = LeaseChaosSettings(
        elect_interval=INTERVAL,
        leader_ttl=TTL,
        dead_after=3.0,
        leases=LEASES,
        singletons=SINGLETONS,
        broken=broken,
    )
    async with running_fleet(make_server) as fleet:
        chaos = ChaosOfLeases(fleet, settings, plan)
        history = await chaos.run(workers, seconds, bound)
        violations = [*chaos.violations, *check(history)]
        if violations and broken is None:
            fleet.keep("history.json", msgspec.json.format(msgspec.json.encode(history)))
        return {
            "seed": seed,
            "seconds": seconds,
            "workers": workers,
            "terms": len(history.grants),
            **_gaps(history),
            "faults": dict(sorted(chaos.done.items())),
            "writes": sum(write.is_fenced for write in history.writes),
            "refused": sum(note.what == "refused" for note in history.notes),
            "unfenced": sum(not write.is_fenced for write in history.writes),
            "unfenced_stale": len(history.stale_writes(is_fenced=False)),
            "violations": [msgspec.structs.asdict(violation) for violation in violations],
            "logs": str(fleet.directory) if fleet.is_kept else None,
        }


def _gaps(history: LeaseHistory) -> dict[str, float | int | None]:
    gaps = [seconds for _, seconds in history.takeovers()]
    return {
        "takeovers": len(gaps),
        "gap_median_s": round(statistics.median(gaps), 3) if gaps else None,
        "gap_max_s": round(max(gaps), 3) if gaps else None,
    }


def show(found: dict[str, Any]) -> None:
    """Print the result as text."""
    print(
        f"{found['terms']} terms, {found['takeovers']} takeovers; free for "
        f"{found['gap_median_s']} s (median), {found['gap_max_s']} s (max)"
    )
    print("faults: " + ", ".join(f"{count} {name}" for name, count in found["faults"].items()))
    print(
        f"{found['writes']} fenced writes, {found['refused']} refused by the fence; "
        f"{found['unfenced']} unfenced writes, {found['unfenced_stale']} of them stale"
    )
