"""One measurement of `riverpy bench`: insert rate, work rate and pickup time on an empty table."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

import anyio
import msgspec

from riverpy._names import PYPI_PACKAGE_NAME
from riverpy._postgres.driver import close, connect
from riverpy._postgres.schema import check_schema
from riverpy._postgres.sql_files import query
from riverpy._tools.bench.process_cost import ServerProcesses, memory_mib, relax_garbage_collector
from riverpy._tools.errors import ToolError
from riverpy.client import Client
from riverpy.config import Config, QueueConfig
from riverpy.events import EventKind
from riverpy.insert_opts import InsertManyParams, InsertOpts
from riverpy.job import Job  # noqa: TC001 (the annotations of the jobs are read at run time)
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Connection

QUEUE = "riverpy_bench"
"""The queue of the benchmark. No other worker may work it."""
COPY_SIZE = 10_000
"""The number of jobs in one COPY."""
PICKUPS = 200
"""The number of jobs inserted one by one while the worker is idle."""
PICKUP_INTERVAL = 0.02
"""Seconds between two of the `PICKUPS` inserts."""
STALL_TIMEOUT = 30.0
"""If no job ends for this many seconds, the measurement fails."""
STATEMENT_TIMEOUT = 60.0


class Measurement(msgspec.Struct, frozen=True):
    """The results of one run. The unit of each value is in its name."""

    jobs: int
    slots: int
    insert_per_s: float
    work_per_s: float
    """The rate from the first claim to the last stored completion."""
    client_cpu_us_per_job: float
    """The processor time of this process while it works the jobs."""
    server_cpu_us_per_job: float | None
    """The processor time of the server while this process works the jobs. None: the server is on
    another machine."""
    occupancy: float | None
    """The fraction of the slots that run jobs, from 0 to 1, while there is work for all slots. The
    measurement starts when `slots` jobs have ended, and ends when only `slots` jobs have not
    started. None: jobs do not sleep, or there are too few jobs."""
    pickup_p50_ms: float
    """The median time from the start of an insert to the start of its job in an idle worker."""
    pickup_p99_ms: float
    rss_mib: float | None
    """The memory of this process after it has worked the jobs."""
    riverpy_version: str
    postgres_version: str


class _Noop(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_noop"


class _Pickup(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_pickup"
    number: int


class _Sleep(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_sleep"
    seconds: float


def occupancy(begun: Sequence[float], ended: Sequence[float], slots: int) -> float | None:
    """Return the fraction of the slots that run jobs, from 0 to 1, while there is work for all
    slots.

    Args:
        begun: the times at which the jobs began, in ascending order.
        ended: the times at which the jobs ended, in ascending order.
        slots: the number of slots.
    """
    if len(begun) <= slots:
        return None
    since, until = ended[slots - 1], begun[-slots - 1]
    if until <= since:
        return None
    used = sum(min(max(end, since), until) for end in ended)
    used -= sum(min(max(begin, since), until) for begin in begun)
    return used / (until - since) / slots


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of a measurement, and the client's settings for them."""

    jobs: int
    """The number of jobs."""
    slots: int
    """The number of jobs that may run at once."""
    sleep: float = 0.0
    """The mean sleep of a job, in seconds. A job sleeps 0.5 to 1.5 times this. 0: jobs do
    nothing."""
    prefetch: bool = False
    """Whether the client claims jobs before slots are free."""


class Bench:
    """Inserts and works jobs, and measures how fast.

    Args:
        url: the database. It must have River's tables.
        schema: the schema of the tables. None: the schema of the search path.
        load: the jobs, and the client's settings for them.
    """

    def __init__(self, url: str, schema: str | None, load: Load) -> None:
        self._url, self._schema, self._load = url, schema, load
        self._began_at: list[float] = []
        self._ended_at: list[float] = []
        self._opts = InsertOpts(queue=QUEUE)
        self._worked = 0
        self._last_id = 0
        self._all_worked = anyio.Event()
        self._picked_up_at: dict[int, float] = {}
        self._all_picked_up = anyio.Event()
        self._server: ServerProcesses | None = None
        self._started_at = (0.0, 0.0, 0.0)
        workers = Workers()
        workers.job(self._work_noop)
        workers.job(self._work_sleep)
        workers.job(self._record_pickup)
        self._client = Client(
            url,
            workers=workers,
            queues={QUEUE: QueueConfig(max_workers=load.slots, prefetch=load.prefetch)},
            config=Config(schema=schema),
        )

    async def _work_noop(self, job: Job[_Noop]) -> None:
        self._count_worked_job(job.id)

    async def _work_sleep(self, job: Job[_Sleep]) -> None:
        self._began_at.append(time.perf_counter())
        await asyncio.sleep(job.args.seconds)  # noqa: TID251 (most jobs wait with it)
        self._ended_at.append(time.perf_counter())
        self._count_worked_job(job.id)

    def _count_worked_job(self, job_id: int) -> None:
        self._worked += 1
        if self._worked == self._load.jobs:
            self._last_id = job_id
            self._all_worked.set()

    async def _record_pickup(self, job: Job[_Pickup]) -> None:
        self._picked_up_at[job.args.number] = time.perf_counter()
        if len(self._picked_up_at) == PICKUPS:
            self._all_picked_up.set()

    async def ensure_no_jobs(self, *, force: bool) -> int:
        """Raise ToolError if there are jobs. If `force` is true, delete them instead. Return the
        number of deleted jobs."""
        async with self._open_connection() as connection:
            await check_schema(connection, self._schema, url=self._url)
            ((count,),) = await self._fetch(connection, "bench_job_count")
            if count and not force:
                raise ToolError(
                    f"river_job has {count:,} jobs: use --force to delete all of them "
                    "(TRUNCATE), or another database or schema"
                )
            if count:
                await self._fetch(connection, "bench_truncate")
        return count

    async def measure(self) -> Measurement:
        """Insert jobs, work them, and return the results."""
        async with self._open_connection() as connection:
            ((pid, is_local, postgres),) = await self._fetch(connection, "bench_server")
            self._server = ServerProcesses.of_backend(pid) if is_local else None
            async with self._client:
                insert_seconds = await self._insert_jobs()
                await self._fetch(connection, "bench_settle")
                relax_garbage_collector()
                work_seconds, client_cpu, server_cpu = await self._work_jobs()
                rss = memory_mib()
                await self._check_completed(connection)
                pickups = statistics.quantiles(
                    await self._measure_pickups(), n=100, method="inclusive"
                )
        jobs, slots = self._load.jobs, self._load.slots
        share = occupancy(self._began_at, self._ended_at, slots)
        return Measurement(
            jobs=jobs,
            slots=slots,
            insert_per_s=round(jobs / insert_seconds, 1),
            work_per_s=round(jobs / work_seconds, 1),
            client_cpu_us_per_job=round(client_cpu * 1e6 / jobs, 2),
            server_cpu_us_per_job=round(server_cpu * 1e6 / jobs, 2) if self._server else None,
            occupancy=None if share is None else round(share, 4),
            pickup_p50_ms=round(pickups[49] * 1e3, 3),
            pickup_p99_ms=round(pickups[98] * 1e3, 3),
            rss_mib=None if rss is None else round(rss, 1),
            riverpy_version=version(PYPI_PACKAGE_NAME),
            postgres_version=postgres.split()[0],
        )

    @asynccontextmanager
    async def _open_connection(self) -> AsyncGenerator[Connection]:
        connection = await connect(self._url, application_name="riverpy bench")
        try:
            yield connection
        finally:
            await close(connection)

    async def _fetch(self, connection: Connection, block: str, **values: object) -> list[Record]:
        with anyio.fail_after(STATEMENT_TIMEOUT):
            return await query("bench", block, self._schema).fetch(connection, **values)

    async def _insert_jobs(self) -> float:
        """Insert the jobs, and return the duration in seconds."""
        began = time.perf_counter()
        for start in range(0, self._load.jobs, COPY_SIZE):
            count = min(COPY_SIZE, self._load.jobs - start)
            await self._client.insert_many_fast(
                [InsertManyParams(self._new_args(), self._opts) for _ in range(count)]
            )
        return time.perf_counter() - began

    def _new_args(self) -> _Noop | _Sleep:
        if not self._load.sleep:
            return _Noop()
        return _Sleep(self._load.sleep * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)

    async def _work_jobs(self) -> list[float]:
        """Work the jobs. Return the duration and the processor times of this process and of the
        server, in seconds, from the first claim to the last stored result.

        The result of the last job is stored with the last batch, so the event of this job marks the
        last completion. The subscription to events opens after all jobs have run, so that events
        cost no time while the jobs run.
        """
        costs: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(self._client.run, task_status=self))
            await self._wait_until_all_worked()
            await self._wait_until_last_stored()
            ended_at = self._read_clocks()
            self._client.stop()
            pairs = zip(self._started_at, ended_at, strict=True)
            costs += [end - start for start, end in pairs]
        return costs

    def started(self, value: None = None) -> None:
        """Read the clocks. The client calls this method, as `started` of anyio's TaskStatus, when
        it starts to claim jobs."""
        self._started_at = self._read_clocks()

    def _read_clocks(self) -> tuple[float, float, float]:
        """Return the time, the processor time of this process, and that of the server."""
        server_cpu = self._server.cpu_seconds() if self._server else 0.0
        return time.perf_counter(), time.process_time(), server_cpu

    async def _wait_until_all_worked(self) -> None:
        worked = -1
        while not self._all_worked.is_set():
            if worked == self._worked:
                raise ToolError(
                    f"{self._load.jobs - self._worked:,} jobs of queue {QUEUE} are left and no job "
                    f"was worked for {STALL_TIMEOUT:.0f} s: is the queue paused, or does another "
                    "process work it?"
                )
            worked = self._worked
            with anyio.move_on_after(STALL_TIMEOUT):
                await self._all_worked.wait()

    async def _wait_until_last_stored(self) -> None:
        with anyio.fail_after(STALL_TIMEOUT):
            async with self._client.subscribe(EventKind.JOB_COMPLETED) as events:
                async for event in events:
                    if event.job is not None and event.job.id == self._last_id:
                        return

    async def _check_completed(self, connection: Connection) -> None:
        ((completed,),) = await self._fetch(connection, "bench_completed", queue=QUEUE)
        if completed != self._load.jobs:
            raise ToolError(
                f"{completed:,} of {self._load.jobs:,} jobs were completed at their first attempt, "
                "so the measurement is not valid"
            )

    async def _measure_pickups(self) -> list[float]:
        """Insert single jobs for the idle worker. Return the seconds from insert to start of each
        job.

        An insert does not wait for the previous job, so a slow job does not delay other inserts.
        """
        inserted_at: list[float] = []
        async with self._client.working():
            began = time.perf_counter()
            for number in range(PICKUPS):
                due = began + number * PICKUP_INTERVAL
                await anyio.sleep(max(0.0, due - time.perf_counter()))
                inserted_at.append(time.perf_counter())
                await self._client.insert(_Pickup(number), self._opts)
            with anyio.fail_after(STALL_TIMEOUT):
                await self._all_picked_up.wait()
        return [self._picked_up_at[number] - at for number, at in enumerate(inserted_at)]
