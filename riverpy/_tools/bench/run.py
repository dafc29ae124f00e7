"""One measurement of `riverpy bench` on an empty table: insert rate, work rate and pickup time. The
pickup time of a job is the time from its insert to its start."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import anyio
import msgspec

from riverpy._postgres.driver import close_connection, connect
from riverpy._postgres.schema import check_schema
from riverpy._postgres.sql_files import get_query
from riverpy._tools.bench.process_cost import (
    ServerProcesses,
    read_process_memory_mib,
    reduce_garbage_collection,
)
from riverpy._tools.errors import ToolError
from riverpy._version import VERSION
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

BENCH_QUEUE = "riverpy_bench"
"""The queue of the benchmark. During a measurement, no other process may work this queue."""
JOBS_PER_COPY = 10_000
PICKUP_JOB_COUNT = 200
"""The number of jobs for measuring the pickup time. They are inserted one by one while the worker
is idle."""
PICKUP_INSERT_INTERVAL = 0.02
"""Seconds between two inserts of pickup jobs."""
STALL_TIMEOUT = 30.0
"""If no job ends for this many seconds, the measurement fails."""
STATEMENT_TIMEOUT = 60.0


class BenchResult(msgspec.Struct, frozen=True):
    """The result of one run of the benchmark. The names of the fields contain the units."""

    jobs: int
    slots: int
    insert_per_s: float
    work_per_s: float
    """The number of worked jobs per second, from the first claim to the last stored completion."""
    client_cpu_us_per_job: float
    """The processor time of this process per job, in microseconds, while the process works the
    jobs."""
    server_cpu_us_per_job: float | None
    """The processor time of the server per job, in microseconds, while this process works the jobs.
    None: the server is on another machine."""
    occupancy: float | None
    """The fraction of the slots that run jobs, from 0 to 1, while there is work for all slots. The
    first and the last jobs are left out: with N slots, the measurement starts when N jobs have
    ended, and it ends when only N jobs have not started yet. None: jobs do not sleep, or there are
    too few jobs."""
    pickup_p50_ms: float
    """The median time from the start of an insert to the start of its job in an idle worker."""
    pickup_p99_ms: float
    rss_mib: float | None
    """The resident memory of this process after it has worked the jobs. None: the system does not
    report it."""
    riverpy_version: str
    postgres_version: str


class _NoopArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_noop"


class _PickupArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_pickup"
    job_number: int


class _SleepArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "riverpy_bench_sleep"
    seconds: float


def compute_slot_occupancy(
    starts: Sequence[float], ends: Sequence[float], slots: int
) -> float | None:
    """Return the fraction of the slots that run jobs, from 0 to 1, while there is work for all
    slots. Return None if there are too few jobs.

    Args:
        starts: the times at which the jobs started, in ascending order.
        ends: the times at which the jobs ended, in ascending order.
        slots: the number of slots.
    """
    if len(starts) <= slots:
        return None
    since, until = ends[slots - 1], starts[-slots - 1]
    if until <= since:
        return None
    used = sum(min(max(end, since), until) for end in ends)
    used -= sum(min(max(begin, since), until) for begin in starts)
    return used / (until - since) / slots


class BenchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of a measurement, and the client's settings for them."""

    job_count: int
    max_workers: int
    mean_sleep: float = 0.0
    """The mean time for which a job sleeps, in seconds. Each job sleeps 0.5 to 1.5 times as long.
    0: jobs do nothing."""
    prefetch: bool = False
    """Whether the client claims jobs before slots are free."""


class BenchRun:
    """Inserts and works jobs, and measures how fast this is.

    Args:
        url: the database. It must have River's tables.
        schema: the schema of the tables. None: the schema of the search path.
        load: the jobs, and the client's settings for them.
    """

    def __init__(self, url: str, schema: str | None, load: BenchLoad) -> None:
        self._url, self._schema, self._load = url, schema, load
        self._job_start_times: list[float] = []
        self._job_end_times: list[float] = []
        self._insert_opts = InsertOpts(queue=BENCH_QUEUE)
        self._worked_job_count = 0
        self._last_worked_job_id = 0
        self._all_jobs_worked = anyio.Event()
        self._pickup_time_by_number: dict[int, float] = {}
        self._all_pickups_recorded = anyio.Event()
        self._server: ServerProcesses | None = None
        self._time_and_cpu_at_start = (0.0, 0.0, 0.0)
        workers = Workers()
        workers.job(self._work_noop_job)
        workers.job(self._work_sleep_job)
        workers.job(self._record_pickup_time)
        self._client = Client(
            url,
            workers=workers,
            queues={BENCH_QUEUE: QueueConfig(max_workers=load.max_workers, prefetch=load.prefetch)},
            config=Config(schema=schema),
        )

    async def _work_noop_job(self, job: Job[_NoopArgs]) -> None:
        self._count_worked_job(job.id)

    async def _work_sleep_job(self, job: Job[_SleepArgs]) -> None:
        self._job_start_times.append(time.perf_counter())
        await asyncio.sleep(job.args.seconds)  # noqa: TID251 (most jobs wait with it)
        self._job_end_times.append(time.perf_counter())
        self._count_worked_job(job.id)

    def _count_worked_job(self, job_id: int) -> None:
        self._worked_job_count += 1
        if self._worked_job_count == self._load.job_count:
            self._last_worked_job_id = job_id
            self._all_jobs_worked.set()

    async def _record_pickup_time(self, job: Job[_PickupArgs]) -> None:
        self._pickup_time_by_number[job.args.job_number] = time.perf_counter()
        if len(self._pickup_time_by_number) == PICKUP_JOB_COUNT:
            self._all_pickups_recorded.set()

    async def require_empty_job_table(self, *, delete_jobs: bool) -> int:
        """Make sure that the table of jobs is empty. Return the number of deleted jobs.

        If `delete_jobs` is True, all jobs are deleted.

        Raises:
            ToolError: the table has jobs, and `delete_jobs` is False.
        """
        async with self._open_connection() as connection:
            await check_schema(connection, self._schema, url=self._url)
            ((count,),) = await self._fetch_rows(connection, "bench_job_count")
            if count and not delete_jobs:
                raise ToolError(
                    f"river_job has {count:,} jobs: use --force to delete all of them "
                    "(TRUNCATE), or another database or schema"
                )
            if count:
                await self._fetch_rows(connection, "bench_truncate")
        return count

    async def measure(self) -> BenchResult:
        """Insert jobs, work them, and return the results."""
        async with self._open_connection() as connection:
            ((pid, is_local, postgres),) = await self._fetch_rows(connection, "bench_server")
            self._server = ServerProcesses.find_by_backend(pid) if is_local else None
            async with self._client:
                insert_seconds = await self._measure_insert_seconds()
                await self._fetch_rows(connection, "bench_settle")
                reduce_garbage_collection()
                work_seconds, client_cpu, server_cpu = await self._measure_work_time_and_cpu()
                rss = read_process_memory_mib()
                await self._check_all_jobs_completed(connection)
                pickups = statistics.quantiles(
                    await self._measure_pickup_seconds(), n=100, method="inclusive"
                )
        jobs, slots = self._load.job_count, self._load.max_workers
        share = compute_slot_occupancy(self._job_start_times, self._job_end_times, slots)
        return BenchResult(
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
            riverpy_version=VERSION,
            postgres_version=postgres.split()[0],
        )

    @asynccontextmanager
    async def _open_connection(self) -> AsyncGenerator[Connection]:
        connection = await connect(self._url, application_name="riverpy bench")
        try:
            yield connection
        finally:
            await close_connection(connection)

    async def _fetch_rows(
        self, connection: Connection, sql_name: str, **values: object
    ) -> list[Record]:
        with anyio.fail_after(STATEMENT_TIMEOUT):
            return await get_query("bench", sql_name, self._schema).fetch(connection, **values)

    async def _measure_insert_seconds(self) -> float:
        """Insert the jobs, and return the duration in seconds."""
        began = time.perf_counter()
        for start in range(0, self._load.job_count, JOBS_PER_COPY):
            count = min(JOBS_PER_COPY, self._load.job_count - start)
            await self._client.insert_many_fast(
                [InsertManyParams(self._make_job_args(), self._insert_opts) for _ in range(count)]
            )
        return time.perf_counter() - began

    def _make_job_args(self) -> _NoopArgs | _SleepArgs:
        if not self._load.mean_sleep:
            return _NoopArgs()
        return _SleepArgs(self._load.mean_sleep * random.uniform(0.5, 1.5))  # noqa: S311 (no secret)

    async def _measure_work_time_and_cpu(self) -> list[float]:
        """Work the jobs. Return the duration and the processor times of this process and of the
        server, in seconds, from the first claim to the last stored result.

        The client sends an event for each job when it has stored the result of the job. The last
        batch of results contains the result of the last job, so the measurement ends with the event
        of this job. This method subscribes to events only when the functions of all jobs have run.
        Otherwise the events of the other jobs would lengthen the measured time.
        """
        costs: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(self._client.run, task_status=self))
            await self._wait_until_all_jobs_worked()
            await self._wait_until_last_job_stored()
            ended_at = self._read_time_and_cpu()
            self._client.stop()
            pairs = zip(self._time_and_cpu_at_start, ended_at, strict=True)
            costs += [end - start for start, end in pairs]
        return costs

    def started(self, value: None = None) -> None:
        """Record the time and the processor times at the start of the measurement.

        `Client.run` gets this BenchRun as its argument `task_status`. The client calls
        `task_status.started` when it starts to claim jobs.
        """
        self._time_and_cpu_at_start = self._read_time_and_cpu()

    def _read_time_and_cpu(self) -> tuple[float, float, float]:
        """Return the time, and the processor times of this process and of the server."""
        server_cpu = self._server.read_cpu_seconds() if self._server else 0.0
        return time.perf_counter(), time.process_time(), server_cpu

    async def _wait_until_all_jobs_worked(self) -> None:
        worked = -1
        while not self._all_jobs_worked.is_set():
            if worked == self._worked_job_count:
                raise ToolError(
                    f"{self._load.job_count - self._worked_job_count:,} jobs of queue "
                    f"{BENCH_QUEUE} are left and no job was worked for {STALL_TIMEOUT:.0f} s: "
                    "is the queue paused, or does another process work it?"
                )
            worked = self._worked_job_count
            with anyio.move_on_after(STALL_TIMEOUT):
                await self._all_jobs_worked.wait()

    async def _wait_until_last_job_stored(self) -> None:
        with anyio.fail_after(STALL_TIMEOUT):
            async with self._client.subscribe(EventKind.JOB_COMPLETED) as events:
                async for event in events:
                    if event.job is not None and event.job.id == self._last_worked_job_id:
                        return

    async def _check_all_jobs_completed(self, connection: Connection) -> None:
        ((completed,),) = await self._fetch_rows(connection, "bench_completed", queue=BENCH_QUEUE)
        if completed != self._load.job_count:
            raise ToolError(
                f"{completed:,} of {self._load.job_count:,} jobs were completed at their first "
                "attempt, so the measurement is not valid"
            )

    async def _measure_pickup_seconds(self) -> list[float]:
        """Insert single jobs for the idle worker. Return the seconds from insert to start of each
        job.

        An insert does not wait for the previous job, so a slow job does not delay other inserts.
        """
        inserted_at: list[float] = []
        async with self._client.working():
            began = time.perf_counter()
            for number in range(PICKUP_JOB_COUNT):
                due = began + number * PICKUP_INSERT_INTERVAL
                await anyio.sleep(max(0.0, due - time.perf_counter()))
                inserted_at.append(time.perf_counter())
                await self._client.insert(_PickupArgs(number), self._insert_opts)
            with anyio.fail_after(STALL_TIMEOUT):
                await self._all_pickups_recorded.wait()
        return [self._pickup_time_by_number[number] - at for number, at in enumerate(inserted_at)]
