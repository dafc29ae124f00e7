"""Rig: workers, clients and jobs of one test, in a schema of its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec

from riverpy import Client, Config, EventKind, Job, QueueConfig, Workers
from riverpy._work import outcomes
from riverpy.testing import TestWorker, drain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import asyncpg

    from riverpy import Event, InsertResult, JobRow, StopReport, Subscription
    from riverpy.testing import WorkResult
    from tests._database import Schema

PATIENCE = 30.0
"""Seconds after which a test that waits for something fails."""
ALL_KINDS = tuple(EventKind)
FAR = timedelta(minutes=10)
"""A poll interval that is longer than any test."""


class Task(msgspec.Struct, frozen=True):
    """The args of most jobs here."""

    kind: ClassVar[str] = "task"
    n: int = 0


class InMoments:
    """A retry policy with a delay that is short enough for `available`, and too long for a retry
    within a test."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        return outcomes.AVAILABLE_STATE_DELAY_MAX - timedelta(milliseconds=100)


class Rig:
    """Makes clients with short timeouts, inserts jobs, and waits for their ends."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.url = schema.url
        self.workers = Workers()
        self.events: Subscription | None = None
        self.release = anyio.Event()
        """Jobs of the test can wait for this event."""
        self.last: WorkResult
        """How the job of `run_one` ended."""
        self.report: StopReport | None = None
        """The report of the last run that `working` ended."""

    def job(
        self, function: Callable[[Job[Any]], Any] | None = None, *, args: Any = Task, **options: Any
    ) -> Any:
        """Register a function of the test as a job. Its annotations need not be resolvable."""

        def register(function: Callable[[Job[Any]], Any]) -> Callable[[Job[Any]], Any]:
            function.__annotations__ = {"job": Job[args], "return": None}
            executor = options.pop("executor", None)
            if executor:
                return self.workers.blocking_job(executor=executor, **options)(function)
            return self.workers.job(**options)(function)

        return register if function is None else register(function)

    def register_task(self) -> None:
        """Register a job for `Task` that does nothing."""

        @self.workers.job
        async def work(job: Job[Task]) -> None: ...

    def client(
        self,
        *,
        queues: dict[str, QueueConfig] | None = None,
        slots: int = 20,
        url: str | None = None,
        workers: Workers | None = None,
        **settings: Any,
    ) -> Client:
        """Return a client on the test's schema that works `default`, unless other queues are
        given."""
        if queues is None:
            queues = {"default": QueueConfig(max_workers=slots)}
        return Client(
            url or self.url,
            workers=self.workers if workers is None else workers,
            queues=queues,
            config=self.config(**settings),
        )

    def config(self, **settings: Any) -> Config:
        """Return the settings of a client or a test worker on the test's schema."""
        settings = {
            "schema": self.schema.name,
            "fetch_poll_interval": FAR,
            "soft_stop_timeout": timedelta(seconds=10),
            "hard_stop_timeout": timedelta(seconds=10),
            "skip_unknown_job_check": True,
            "retry_policy": InMoments(),
        } | settings
        return Config(**settings)

    @asynccontextmanager
    async def running(self, client: Client, **options: Any) -> AsyncGenerator[Client]:
        """Open and run the client. Its events are in `events`, and at the end its report in
        `report`."""
        ended = anyio.Event()

        async def run(*, task_status: Any) -> None:
            try:
                self.report = await client.run(task_status=task_status, **options)
            finally:
                ended.set()

        async with (
            client,
            client.subscribe(*ALL_KINDS) as self.events,
            anyio.create_task_group() as tasks,
        ):
            await tasks.start(run)
            try:
                yield client
            finally:
                client.stop()
                with anyio.CancelScope(shield=True):
                    await ended.wait()

    @asynccontextmanager
    async def working(self, **settings: Any) -> AsyncGenerator[Client]:
        """Run a new client."""
        async with self.running(self.client(**settings)) as client:
            yield client

    async def event(self) -> Event:
        """Return the next event."""
        assert self.events is not None
        with anyio.fail_after(PATIENCE, reason="no event came"):
            return await anext(self.events)

    async def take(self, count: int) -> list[Event]:
        """Return the next events."""
        return [await self.event() for _ in range(count)]

    async def work(self, client: Client, *args: Any, **options: Any) -> list[asyncpg.Record]:
        """Insert jobs, wait for one event of each, and return their rows."""
        ids = [(await client.insert(one, **options)).job.id for one in args]
        await self.take(len(ids))
        return [await self.row(job_id) for job_id in ids]

    async def insert(
        self, args: Any = None, opts: Any = None, *, client: Client | None = None
    ) -> InsertResult:
        """Insert one job with a client that is not open, and commit."""
        connection = self.schema.connection
        async with connection.transaction():
            return await (client or self.client()).insert(args or Task(), opts, tx=connection)

    async def run_one(self, args: Any = None, opts: Any = None, **settings: Any) -> asyncpg.Record:
        """Insert one job, work it once with the test kit, and return its row."""
        connection = self.schema.connection
        worker = TestWorker(self.workers, self.config(**settings))
        async with connection.transaction():
            result = await worker.work(Task() if args is None else args, opts, tx=connection)
        self.last = result
        return await self.row(result.job.id)

    async def run_one_on_pool(
        self, args: Any = None, opts: Any = None, **settings: Any
    ) -> asyncpg.Record:
        """As `run_one`, for a job whose code uses sessions of its own: each step is committed."""
        async with self.client(**settings) as client:
            await client.insert(Task() if args is None else args, opts)
            (result,) = await drain(client)
        self.last = result
        return await self.row(result.job.id)

    async def work_in_order(self, *args: Any, **settings: Any) -> list[asyncpg.Record]:
        """Insert jobs, work each one once with the test kit, and return their rows."""
        return [await self.run_one(one, **settings) for one in args]

    async def work_due_jobs(
        self, *, with_scheduled: bool = False, **settings: Any
    ) -> list[WorkResult]:
        """Work all due jobs with the test kit."""
        connection, client = self.schema.connection, self.client(**settings)
        async with connection.transaction():
            return await drain(client, with_scheduled=with_scheduled, tx=connection)

    async def row(self, job_id: int) -> asyncpg.Record:
        """Return one row of river_job."""
        row = await self.schema.fetchrow("SELECT * FROM river_job WHERE id = $1", job_id)
        assert row is not None
        return row

    async def states(self) -> dict[str, int]:
        """Return how many jobs are in each state."""
        rows = await self.schema.fetch(
            "SELECT state::text AS state, count(*) AS n FROM river_job GROUP BY 1"
        )
        return {row["state"]: row["n"] for row in rows}

    async def until(self, sql: str, expected: object = True, *args: object) -> None:
        """Wait until a query returns this value."""
        value: object = None
        pauses = chain(repeat(0.005, 10), repeat(0.02))
        with anyio.move_on_after(PATIENCE):
            while (value := await self.schema.fetchval(sql, *args)) != expected:
                await asyncio.sleep(next(pauses))
            return
        raise AssertionError(f"{sql!r} stayed {value!r}, not {expected!r}")

    async def until_state(self, state: str, count: int = 1) -> None:
        """Wait until so many jobs are in a state."""
        await self.until("SELECT count(*) FROM river_job WHERE state::text = $1", count, state)

    async def insert_rows(
        self, count: int, *, kind: str = "task", queue: str = "default", **columns: object
    ) -> None:
        """Insert rows by SQL, without a notification."""
        names = "".join(f", {name}" for name in columns)
        values = "".join(f", ${index}" for index in range(4, 4 + len(columns)))
        await self.schema.execute(
            f"INSERT INTO river_job (kind, queue, max_attempts, args{names})"
            f" SELECT $1, $2, 25, json_build_object('n', i){values}"
            " FROM generate_series(1, $3::int) AS i",
            kind,
            queue,
            count,
            *columns.values(),
        )


def errors_of(row: asyncpg.Record) -> list[dict[str, Any]]:
    """Return the decoded error entries of a row."""
    return [json.loads(text) for text in row["errors"] or ()]


def metadata_of(row: asyncpg.Record) -> dict[str, Any]:
    """Return the decoded metadata of a row."""
    return json.loads(row["metadata"])
