"""Measures the limits of one PostgreSQL, and ways beyond them.

Each measurement compares variants in turns on one embedded server with default durability. Other
load on the machine affects all variants alike, so the ratios mean more than the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

import riverpy
from riverpy import InsertManyParams
from riverpy._tools.bench.process_cost import ServerProcesses
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from scripts._scaling_worker import LISTEN_URL_VARIABLE, Noop
from tests.kit.pgbouncer import is_installed, pooled
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
RIVERPY = Path(sys.executable).with_name("riverpy")
STATEMENTS = read_statements(Path(__file__).with_suffix(".sql"))
SCHEMAS = ("scaling_one", "scaling_two")
INSERTERS = 20
"""Number of connections that insert at the same time."""
POLLED_QUEUES = 20
WAL_JOBS = 5_000
"""The maximum number of jobs of the WAL measurement: all are claimed before the first is
completed."""
SETTLING = 3.0
"""Seconds for workers to open their connections."""
LIMIT = 120.0


class Size(NamedTuple):
    """The size of the measurements."""

    rounds: int
    jobs: int
    """Jobs that are worked in one turn."""
    seconds: float
    """How long one turn inserts jobs, in seconds."""
    pickups: int
    """The number of single inserts into each of the idle queues."""


FULL = Size(rounds=5, jobs=50_000, seconds=2.0, pickups=10)
QUICK = Size(rounds=3, jobs=20_000, seconds=1.0, pickups=3)


class ScalingServer:
    """The server, and its schemas with River's tables."""

    def __init__(self, url: str, size: Size) -> None:
        self.url = url
        self.size = size
        self.connections: dict[str, asyncpg.Connection] = {}
        """One connection for each schema, which is its search path."""
        self.server: ServerProcesses | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[ScalingServer]:
        """Connect, and create the schemas if they are missing."""
        async with AsyncExitStack() as stack:
            for schema in SCHEMAS:
                connection = await asyncpg.connect(
                    self.url, server_settings={"search_path": schema}, timeout=20
                )
                stack.callback(connection.terminate)
                await connection.execute(f'create schema if not exists "{schema}"')
                await migrate_all(connection, schema=schema)
                self.connections[schema] = connection
            pid, _ = await self.fetchrow("server")
            self.server = ServerProcesses.find_by_backend(pid)
            yield self

    async def fetchval(self, name: str, *values: object, schema: str = SCHEMAS[0]) -> Any:
        """Return the value of a statement in one schema."""
        return await self.connections[schema].fetchval(STATEMENTS[name], *values)

    async def fetchrow(self, name: str, *values: object, schema: str = SCHEMAS[0]) -> Any:
        """Return the row of a statement in one schema."""
        return await self.connections[schema].fetchrow(STATEMENTS[name], *values)

    async def execute(self, name: str, *, schema: str = SCHEMAS[0]) -> None:
        """Execute a statement in one schema."""
        await self.connections[schema].execute(STATEMENTS[name])

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Poll until the condition holds."""
        async with asyncio.timeout(LIMIT):
            while not await holds():  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.02)

    def client(self, schema: str = SCHEMAS[0], **config: Any) -> riverpy.Client:
        """Open a client that only inserts and pauses."""
        return riverpy.Client(self.url, config=riverpy.Config(schema=schema, **config))

    def server_cpu(self) -> float:
        """Return the CPU time of the server in seconds."""
        assert self.server is not None, "the server's processes cannot be read"
        return self.server.read_cpu_seconds()


Measurement = dict[str, Any]


def in_turns(rounds: int, names: Sequence[str]) -> list[str]:
    """Yield the names once a round. Another name is first in each round."""
    return [
        name
        for number in range(rounds)
        for name in [*names[number % len(names) :], *names[: number % len(names)]]
    ]


def compared(found: dict[str, list[float]], base: str) -> Measurement:
    """Return medians, and the median and range of the ratios to `base` per round."""
    result: Measurement = {}
    for name, values in found.items():
        ratios = [value / other for value, other in zip(values, found[base], strict=True)]
        result[name] = {
            "per_s": round(statistics.median(values)),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(min(ratios), 2),
            "ratio_max": round(max(ratios), 2),
        }
    return result


# --- inserting


async def measure_notify(scaling: ScalingServer) -> Measurement:
    """Measure the cost of notifications, with single inserts on 20 connections at a time."""
    variants: dict[str, tuple[bool, bool]] = {
        "tx, no notification": (True, False),
        "tx, one notification each": (True, True),
        "own pool, no notification": (False, False),
        "own pool, as by default": (False, True),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    for name in in_turns(scaling.size.rounds, list(variants)):
        in_tx, notifies = variants[name]
        await scaling.execute("empty")
        async with scaling.client(insert_notify=notifies, pool_size=INSERTERS) as client:
            found[name].append(await _insert_rate(scaling, client, in_tx=in_tx))
    return {
        **compared({name: found[name] for name in list(variants)[:2]}, "tx, no notification"),
        **compared({name: found[name] for name in list(variants)[2:]}, "own pool, no notification"),
    }


async def _insert_rate(scaling: ScalingServer, client: riverpy.Client, *, in_tx: bool) -> float:
    count, began = 0, time.perf_counter()

    async def insert_on(connection: asyncpg.Connection | None) -> None:
        nonlocal count
        while True:
            if connection is None:
                await client.insert(Noop())
            else:
                async with connection.transaction():
                    await client.insert(Noop(), tx=connection)
            count += 1
            if time.perf_counter() - began > scaling.size.seconds:
                return

    async def insert() -> None:
        if not in_tx:
            await insert_on(None)
            return
        connection = await asyncpg.connect(scaling.url, timeout=20)
        try:
            await insert_on(connection)
        finally:
            connection.terminate()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(INSERTERS):
            tasks.create_task(insert())
    return count / (time.perf_counter() - began)


# --- the log


async def measure_wal(scaling: ScalingServer) -> Measurement:
    """Measure the bytes of WAL per job, by operation."""
    found: dict[str, list[float]] = {}
    for _ in range(scaling.size.rounds):
        for name, value in (await _wal_of_one_round(scaling)).items():
            found.setdefault(name, []).append(value)
    result = {name: round(statistics.median(values)) for name, values in found.items()}
    index_ratio = await scaling.fetchval("index_bytes")
    return {
        **result,
        "in all": result["insert_many"] + result["claim"] + result["complete"],
        "index bytes to table bytes": round(index_ratio, 2),
    }


async def _wal_of_one_round(scaling: ScalingServer) -> dict[str, float]:
    count = min(scaling.size.jobs, WAL_JOBS)
    single_count = count // 10
    params = [InsertManyParams(Noop()) for _ in range(count)]
    found: dict[str, float] = {}
    last = 0

    async def note(name: str, jobs: int) -> None:
        nonlocal last
        now = await scaling.fetchval("wal_bytes")
        found[name] = (now - last) / jobs
        last = now

    workers = riverpy.Workers()
    may_end = asyncio.Event()

    async def wait(_job: riverpy.Job[Noop]) -> None:
        await may_end.wait()

    workers.job(timeout=None)(wait)
    await scaling.execute("empty")
    await scaling.execute("settle")
    async with scaling.client() as inserting:
        last = await scaling.fetchval("wal_bytes")
        for _ in range(single_count):
            await inserting.insert(Noop())
        await note("insert", single_count)
        await inserting.insert_many_fast(params)
        await note("insert_many_fast", count)
        await scaling.execute("empty")
        last = await scaling.fetchval("wal_bytes")
        await inserting.insert_many(params)
        await note("insert_many", count)
    await scaling.execute("settle")
    client = riverpy.Client(
        scaling.url,
        workers=workers,
        queues={"default": riverpy.QueueConfig(max_workers=count)},
        config=riverpy.Config(schema=SCHEMAS[0], candidate=False),
    )
    async with client:
        last = await scaling.fetchval("wal_bytes")
        async with client.working():
            await scaling.until(lambda: _is(scaling, "running", count))
            await note("claim", count)
            may_end.set()
            await scaling.until(lambda: _is(scaling, "completed", count))
            await note("complete", count)
    return found


async def _is(scaling: ScalingServer, name: str, value: int) -> bool:
    return await scaling.fetchval(name) == value


# --- worker processes


class WorkerGroup:
    """Worker processes, the same number for each of the schemas."""

    def __init__(
        self,
        scaling: ScalingServer,
        count: int,
        schemas: Sequence[str],
        *,
        pooler_url: str | None = None,
    ) -> None:
        self._site, self._count, self.schemas = scaling, count, schemas
        self._url = pooler_url or scaling.url
        self._environment = dict(os.environ)
        if pooler_url is not None:
            self._environment[LISTEN_URL_VARIABLE] = scaling.url
        self._processes: list[asyncio.subprocess.Process] = []

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[WorkerGroup]:
        """Start the worker processes, which wait for jobs. Stop them at the end of the block."""
        began = datetime.now(UTC)
        try:
            for schema in self.schemas:
                for _ in range(self._count):
                    self._processes.append(await self._start(schema))
            for schema in self.schemas:
                await self._site.until(lambda schema=schema: self._are_up(schema, began))
            yield self
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.terminate()
            for process in self._processes:
                await process.wait()

    async def _start(self, schema: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(RIVERPY, "worker", "scripts._scaling_worker:client"),
            *("--database-url", self._url, "--schema", schema, "--log-level", "error"),
            cwd=ROOT,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
        )

    async def _are_up(self, schema: str, since: datetime) -> bool:
        return await self._site.fetchval("alive", since, schema=schema) == self._count

    async def drain(self) -> tuple[float, float]:
        """Return jobs per second from the first claim to the last stored result, and the server's
        CPU time in microseconds per job."""
        scaling, jobs = self._site, self._site.size.jobs
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(scaling.client(one)) for one in self.schemas]
            for client in clients:
                await client.queue_pause("default")
            params = [InsertManyParams(Noop()) for _ in range(jobs // len(clients))]
            for schema, client in zip(self.schemas, clients, strict=True):
                await scaling.execute("empty", schema=schema)
                await client.insert_many_fast(params)
                await scaling.execute("settle", schema=schema)
            cpu = scaling.server_cpu()
            for client in clients:
                await client.queue_resume("default")
            await scaling.until(self._is_idle)
            cpu = scaling.server_cpu() - cpu
        spans = [await scaling.fetchrow("span", schema=schema) for schema in self.schemas]
        assert sum(span[2] for span in spans) == len(params) * len(spans)
        seconds = max(span[1] for span in spans) - min(span[0] for span in spans)
        return jobs / seconds.total_seconds(), cpu / jobs * 1e6

    async def _is_idle(self) -> bool:
        await asyncio.sleep(0.1)
        for schema in self.schemas:
            if await self._site.fetchval("unfinished", schema=schema):
                return False
        return True


async def _compare_groups(
    scaling: ScalingServer, groups: dict[str, Callable[[], WorkerGroup]]
) -> Measurement:
    """Compare groups of worker processes with the first one."""
    rates: dict[str, list[float]] = {name: [] for name in groups}
    cpu: dict[str, list[float]] = {name: [] for name in groups}
    for name in in_turns(scaling.size.rounds, list(groups)):
        async with groups[name]().working() as group:
            rate, microseconds = await group.drain()
        rates[name].append(rate)
        cpu[name].append(microseconds)
    result = compared(rates, next(iter(groups)))
    for name, one in result.items():
        one["server_cpu_us_per_job"] = round(statistics.median(cpu[name]), 1)
    return result


async def measure_processes(scaling: ScalingServer) -> Measurement:
    """Measure several worker processes on one schema."""
    return await _compare_groups(
        scaling,
        {
            f"{count} worker process{'es' * (count > 1)}": lambda count=count: WorkerGroup(
                scaling, count, SCHEMAS[:1]
            )
            for count in (1, 2, 3)
        },
    )


async def measure_schemas(scaling: ScalingServer) -> Measurement:
    """Measure two worker processes on one schema, and on a schema each."""
    return await _compare_groups(
        scaling,
        {
            "2 processes, 1 schema": lambda: WorkerGroup(scaling, 2, SCHEMAS[:1]),
            "2 processes, a schema each": lambda: WorkerGroup(scaling, 1, SCHEMAS),
        },
    )


async def measure_pooler(scaling: ScalingServer) -> Measurement:
    """Measure one worker process, directly and through PgBouncer in transaction mode."""
    if not is_installed():
        return {}
    with pooled(scaling.url) as url:
        return await _compare_groups(
            scaling,
            {
                "directly": lambda: WorkerGroup(scaling, 1, SCHEMAS[:1]),
                "through PgBouncer": lambda: WorkerGroup(scaling, 1, SCHEMAS[:1], pooler_url=url),
            },
        )


async def measure_connections(scaling: ScalingServer) -> Measurement:
    """Count the connections of two idle worker processes, one of which is the leader."""
    async with WorkerGroup(scaling, 2, SCHEMAS[:1]).working():
        await asyncio.sleep(SETTLING)
        rows = await scaling.connections[SCHEMAS[0]].fetch(STATEMENTS["connections"])
    return dict(rows)


# --- pickup


async def measure_pickup(scaling: ScalingServer) -> Measurement:
    """Measure the milliseconds from insert to claim of single jobs in idle queues, by the server's
    clock."""
    return {
        "LISTEN": await _pick_up(scaling),
        "polling every second": await _pick_up(scaling, poll_only=True),
        "polling every 100 ms": await _pick_up(
            scaling, poll_only=True, fetch_poll_interval=timedelta(milliseconds=100)
        ),
    }


async def _pick_up(scaling: ScalingServer, **config: Any) -> Measurement:
    workers = riverpy.Workers()

    async def noop(_job: riverpy.Job[Noop]) -> None:
        pass

    workers.job(noop)
    names = [f"q{number}" for number in range(POLLED_QUEUES)]
    client = riverpy.Client(
        scaling.url,
        workers=workers,
        queues={name: riverpy.QueueConfig(max_workers=10) for name in names},
        config=riverpy.Config(schema=SCHEMAS[0], candidate=False, **config),
    )
    await scaling.execute("empty")
    async with client, client.working():
        for _ in range(scaling.size.pickups):
            for name in random.sample(names, len(names)):
                await asyncio.sleep(random.uniform(0.03, 0.1))
                await client.insert(Noop(), riverpy.InsertOpts(queue=name))
        total = scaling.size.pickups * len(names)
        await scaling.until(lambda: _is(scaling, "completed", total))
    rows = await scaling.connections[SCHEMAS[0]].fetch(STATEMENTS["waits"])
    waits = sorted(float(row[0]) * 1e3 for row in rows)
    return {
        "p50_ms": round(statistics.median(waits), 1),
        "p99_ms": round(waits[int(len(waits) * 0.99)], 1),
        "max_ms": round(waits[-1], 1),
    }


# --- the command

MEASUREMENTS: dict[str, Callable[[ScalingServer], Awaitable[Measurement]]] = {
    "notify": measure_notify,
    "wal": measure_wal,
    "processes": measure_processes,
    "schemas": measure_schemas,
    "pooler": measure_pooler,
    "connections": measure_connections,
    "pickup": measure_pickup,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/scaling", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)} (all)"
    )
    parser.add_argument("--quick", action="store_true", help="smaller, with fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(MEASUREMENTS):
        parser.error(f"no measurement {', '.join(sorted(unknown))}: {', '.join(MEASUREMENTS)}")
    return arguments


async def measure(url: str, arguments: argparse.Namespace) -> Measurement:
    """Run the chosen measurements."""
    async with ScalingServer(url, QUICK if arguments.quick else FULL).opened() as scaling:
        _, version = await scaling.fetchrow("server")
        found: Measurement = {
            "machine": f"{os.cpu_count()} cores, {platform.system()}",
            "python": platform.python_version(),
            "postgres": version.split()[0],
            "load": os.getloadavg()[0],
        }
        for name in arguments.names or MEASUREMENTS:
            print(f"measuring {name}", file=sys.stderr)
            found[name] = await MEASUREMENTS[name](scaling)
        return found


def show(found: Measurement) -> None:
    """Print the rows of the two tables in docs/scaling.md."""
    rates, others = [], []
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name}: {value}")
            continue
        for variant, figures in value.items():
            if not isinstance(figures, dict):
                others.append(f"| `{name}` | {variant} | {figures:,} |")
            elif "ratio" in figures:
                rates.append(f"| `{name}` | {variant} | {_rate_cells(figures)} |")
            else:
                cells = ", ".join(f"{key} {figure:,}" for key, figure in figures.items())
                others.append(f"| `{name}` | {variant} | {cells} |")
    print("", *rates, "", *others, sep="\n")


def _rate_cells(figures: Measurement) -> str:
    ratio = f"{figures['ratio']:.2f} ({figures['ratio_min']:.2f} to {figures['ratio_max']:.2f})"
    cpu = figures.get("server_cpu_us_per_job")
    return f"{figures['per_s']:,}/s | {ratio} | {'' if cpu is None else f'{cpu} µs'}"


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    with EmbeddedPostgres("scaling") as url:
        found = asyncio.run(measure(url, arguments))
    print(json.dumps(found)) if arguments.json else show(found)


if __name__ == "__main__":
    main()
