"""A program of a user of riverpy. Strict type checking accepts it without a cast.

It is checked, and imported by a test, but never runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict, assert_type

import asyncpg
import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel

import riverpy
import riverpy.sync
from riverpy.otel import OpenTelemetryPlugin
from riverpy.sentry import SentryPlugin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from decimal import Decimal
    from uuid import UUID

    import psycopg
    import psycopg_pool
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

workers = riverpy.Workers()


class Invoice(BaseModel):
    """Args as a pydantic model."""

    kind: ClassVar[str] = "invoice"
    number: Annotated[int, riverpy.Unique]


@workers.job
async def pay(job: riverpy.Job[Invoice]) -> None:
    assert_type(job.args.number, int)
    job.record_output(job.args)


async def insert_invoice(client: riverpy.Client) -> None:
    await client.insert(Invoice(number=1))
    await client.insert_many([riverpy.InsertManyParams(Invoice(number=2))])


class Welcome(msgspec.Struct, frozen=True):
    """Args as a Struct with a unique field, aliases and options."""

    kind: ClassVar[str] = "welcome"
    kind_aliases: ClassVar[tuple[str, ...]] = ("greet",)
    user_id: Annotated[int, riverpy.Unique]

    def insert_opts(self) -> riverpy.InsertOpts:
        return riverpy.InsertOpts(
            queue="mail", priority=2, unique_opts=riverpy.UniqueOpts(by_args=True)
        )


@dataclasses.dataclass
class Resize:
    """Args as a dataclass."""

    kind: ClassVar[str] = "resize"
    path: str


class Loose(dict[str, Any]):
    """Args as a dict."""

    kind: ClassVar[str] = "loose"


@workers.job(timeout=timedelta(seconds=30))
async def welcome(job: riverpy.Job[Welcome]) -> None:
    assert_type(job.args, Welcome)
    assert_type(job.args.user_id, int)
    assert_type(job.state, riverpy.JobState)
    assert_type(job.attempted_at, datetime | None)
    job.record_output({"sent": True})
    job.set_metadata("tries", job.attempt)
    if job.attempt == 1:
        raise riverpy.JobSnooze(timedelta(minutes=5))
    raise riverpy.JobCancel("no such user")


@workers.job
async def loose(job: riverpy.Job[Loose]) -> Invoice | list[Resize] | dict[str, datetime] | None:
    assert_type(job.args, Loose)
    return [Resize("/x")] if job.attempt == 1 else Invoice(number=1)


async def read_results(client: riverpy.Client, job_id: int) -> None:
    """Wait for jobs, and decode their outputs."""
    row = await client.wait(job_id, timeout=timedelta(seconds=5))
    assert_type(row, riverpy.JobRow)
    assert_type(riverpy.result(row, type=Invoice), Invoice)
    assert_type(riverpy.result(row, type=list[Resize]), list[Resize])
    assert_type(riverpy.result(row), Any)
    assert_type(await client.wait_many({job_id}, timeout=None), list[riverpy.JobRow])
    assert_type(await client.insert_and_wait(Resize("/x")), riverpy.JobRow)


@workers.job(next_retry=lambda job: timedelta(minutes=job.attempt), timeout=None, kind="other")
async def resize_later(job: riverpy.Job[Resize]) -> None:
    current: riverpy.Job[Any] = riverpy.current_job()
    assert current.id == job.id


class Totals(TypedDict):
    """An output with named values."""

    sum: int


@workers.blocking_job(executor="process", kind="crunch")
def crunch(job: riverpy.Job[dict[str, int]]) -> Totals | tuple[Decimal, UUID]:
    assert_type(job.args["n"], int)
    return {"sum": 1}


async def fetch(path: str, size: int) -> list[str]:
    """A step with a result."""
    return [path] * size


async def copy(cursor: dict[str, int] | None, job: riverpy.Job[Resize]) -> None:
    """A step with a cursor."""
    job.set_cursor({"page": 1})
    assert_type(await job.checkpoint(now=True), bool)


@workers.job(kind="long")
async def resize_in_steps(job: riverpy.Job[Resize]) -> None:
    assert_type(await job.step("plain", fetch, "x", 1), list[str] | None)
    assert_type(await job.step("none", copy, None, job), None)
    assert_type(await job.step("sync", len, "abc"), int | None)
    assert_type(await job.step("kept", fetch, "x", 1, keep=True), list[str])
    assert_type(await job.step("kept sync", lambda: 1, keep=True), int)
    resize = await job.step("made", Resize, "/x", keep=True, result_type=Resize)
    assert_type(resize, Resize)
    assert_type(await job.step("rows", copy, job, cursor=dict[str, int]), None)


@workers.job(kind="billed")
async def complete(job: riverpy.Job[Resize]) -> None:
    connection = await asyncpg.connect()
    async with connection.transaction():
        assert_type(await job.complete_tx(connection), riverpy.JobRow)


async def count_objects(session: AsyncSession) -> int:
    """An effect in the caller's own session."""
    return len(session.new)


async def count_queues(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    return len(await connection.fetch("select 1"))


async def count_rows(connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record]) -> int:
    """An effect in a transaction of the client."""
    return len(await connection.fetch("select 1"))


async def insert_in_transactions(
    client: riverpy.Client,
    pooled: asyncpg.pool.PoolConnectionProxy[asyncpg.Record],
    connection: psycopg.AsyncConnection[dict[str, object]],
    cursor: psycopg.AsyncCursor[Any],
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    core: AsyncConnection,
) -> None:
    """Each kind of transaction is accepted without a cast."""
    await client.insert(Resize("/x"), tx=pooled)
    await client.insert(Resize("/x"), tx=connection)
    await client.insert(Resize("/x"), tx=cursor)
    await client.insert(Resize("/x"), tx=session)
    await client.insert(Resize("/x"), tx=scoped)
    await client.queue_pause("mail", tx=core)
    await client.job_cancel(1, tx=connection)
    assert_type(await client.run_once("key", count_objects, tx=session), riverpy.Execution[int])
    assert_type(await client.run_once("key", count_rows), riverpy.Execution[int])
    assert_type(await client.run_once("key", count_queues), riverpy.Execution[int])


async def insert_anywhere(client: riverpy.Client, tx: riverpy.Transaction) -> None:
    """The type of `tx` has a name, to annotate parameters."""
    await client.insert(Resize("/x"), tx=tx)


def insert_in_any_session(client: riverpy.sync.Client, tx: riverpy.sync.Transaction) -> int:
    """The type of `tx` for code that is not async."""
    return client.insert(Resize("/x"), tx=tx).job.id


def count_new(session: Session) -> int:
    """An effect in the caller's own session."""
    return len(session.new)


def insert_without_await(
    engine: Engine,
    pool: psycopg_pool.ConnectionPool[psycopg.Connection[tuple[Any, ...]]],
    connection: psycopg.Connection[dict[str, object]],
    cursor: psycopg.Cursor[Any],
    session: Session,
    scoped: scoped_session[Session],
    core: Connection,
) -> None:
    """Each kind of blocking database and transaction is accepted without a cast."""
    for database in (engine, pool, connection, "postgres://localhost/app"):
        with riverpy.sync.Client(database, workers=workers) as client:
            assert_type(client.insert(Resize("/x")), riverpy.InsertResult)
    client = riverpy.sync.Client()
    client.insert(Resize("/x"), tx=connection)
    client.insert(Resize("/x"), tx=cursor)
    client.insert(Resize("/x"), tx=session)
    client.queue_pause("mail", tx=core)
    client.insert(Resize("/x"), tx="default")
    assert_type(client.job_get(1, tx=scoped), riverpy.JobRow)
    assert_type(client.run_once("key", count_new, tx=session), riverpy.Execution[int])
    for row in client.jobs(kinds=["resize"], tx=core):
        assert_type(row, riverpy.JobRow)


def complete_without_await(job: riverpy.Job[Resize], session: Session) -> None:
    """A blocking job completes itself in its own session."""
    assert_type(job.complete_tx(session), riverpy.JobRow)
    assert_type(job.checkpoint(session), bool)


async def fence_both(
    lease: riverpy.Lease, session: Session, connection: psycopg.AsyncConnection
) -> None:
    """A fence of an async session is awaited."""
    await lease.fence(connection)
    assert_type(lease.fence(session), None)


class ResizeWorker(riverpy.Worker[Resize]):
    """A worker with state, a timeout for each job, and its own retries."""

    def __init__(self, root: str) -> None:
        self.root = root

    async def work(self, job: riverpy.Job[Resize]) -> None:
        assert_type(job.args.path, str)

    def timeout(self, job: riverpy.Job[Resize]) -> timedelta | UnsetType | None:
        return timedelta(minutes=5) if job.args.path else UNSET

    def next_retry(self, job: riverpy.Job[Resize]) -> timedelta | None:
        return None


workers.add(ResizeWorker("/"))


class Policy:
    """A retry policy is any class with this method."""

    def next_retry(self, job: riverpy.JobRow, /) -> timedelta:
        return timedelta(seconds=job.error_count)


class Handler:
    """An error handler is any class with these methods."""

    async def handle_error(self, job: riverpy.JobRow, error: BaseException, /) -> bool | None:
        return isinstance(error, LookupError)


class Audit:
    """Hooks and middleware are any classes with these methods, and one class may be several of
    them."""

    async def insert_begin(self, params: riverpy.JobInsertParams, /) -> None:
        params.tags.append("audited")

    async def insert_many(
        self, params: Sequence[riverpy.JobInsertParams], do_inner: riverpy.InsertInner, /
    ) -> None:
        results = await do_inner()
        assert_type(results, Sequence[riverpy.InsertResult])

    async def work_end(self, job: riverpy.Job[Any], error: BaseException | None, /) -> bool | None:
        return isinstance(error, LookupError)


class Timed:
    """One method is enough, and its parameters may be keywords too."""

    async def work(self, job: riverpy.Job[Any], do_inner: riverpy.WorkInner) -> None:
        await do_inner()


async def tell_end(job: riverpy.Job[Any], error: BaseException | None) -> None: ...


@riverpy.WorkerMiddlewareFunc
async def locked(job: riverpy.Job[Any], do_inner: riverpy.WorkInner) -> None:
    await do_inner()


def count(metric: riverpy.Metric) -> None:
    if isinstance(metric, riverpy.JobGetAvailableCount):
        assert_type(metric.count, int)
    else:
        assert_type(metric.duration, timedelta)


class Audited(msgspec.Struct):
    """Args with hooks and plugins."""

    kind: ClassVar[str] = "audited"
    hooks: ClassVar[Sequence[riverpy.Hook]] = (riverpy.HookWorkEndFunc(tell_end), Audit())
    plugins: ClassVar[Sequence[riverpy.Plugin]] = (Audit(), Timed())


@workers.job(middleware=[Timed(), locked])
async def audited(job: riverpy.Job[Audited]) -> None: ...


class AuditedWorker(riverpy.Worker[Resize]):
    """A worker whose middleware depends on the job."""

    async def work(self, job: riverpy.Job[Resize]) -> None: ...

    def middleware(self, job: riverpy.Job[Any]) -> Sequence[riverpy.WorkerMiddleware]:
        return [Timed()] if job.attempt > 1 else []


hooked = riverpy.Config(
    hooks=[Audit(), riverpy.HookMetricEmitFunc(count)],
    middleware=[Timed(), locked, Audit()],
    plugins=[OpenTelemetryPlugin(), SentryPlugin(final_only=True), Audit(), Timed()],
)

client = riverpy.Client(
    "postgres://localhost/app",
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=100), "mail": riverpy.QueueConfig()},
    config=riverpy.Config(retry_policy=Policy(), error_handler=Handler(), job_timeout=None),
)


@asynccontextmanager
async def lifespan(app: object) -> AsyncGenerator[None]:
    """The lifespan of a web application."""
    async with client, client.working():
        yield


async def main() -> None:
    """Call each function once."""
    async with client:
        result = await client.insert(Welcome(user_id=1))
        assert_type(result.job, riverpy.JobRow)
        assert_type(result.job.id, int)
        at = datetime.now(UTC) + timedelta(hours=1)
        unique = riverpy.UniqueOpts(by_args=True, by_period=timedelta(hours=1))
        opts = riverpy.InsertOpts(scheduled_at=at, tags=["a"], unique_opts=unique)
        await client.insert(Resize("x"), opts)
        await client.insert(Loose(x=1))
        await client.insert(riverpy.RawArgs("raw_kind", '{"a": 1}'))
        params = [riverpy.InsertManyParams(Welcome(user_id=2)), riverpy.InsertManyParams(Loose())]
        results: list[riverpy.InsertResult] = await client.insert_many(params)
        assert results
        count: int = await client.insert_many_fast(params)
        assert count
        page = await client.job_list(
            kinds=["welcome"], states=[riverpy.JobState.DISCARDED], limit=5
        )
        assert_type(page, riverpy.JobPage)
        filters: riverpy.JobFilters = {"queues": ("mail",), "metadata": {"tenant": 7}}
        async for listed in client.jobs(order_by="time", after=page.cursor, **filters):
            assert_type(listed, riverpy.JobRow)
        assert_type(await client.job_retry_many(on_progress=print, **filters), riverpy.JobChanges)
        row = await client.job_get(1)
        for error in row.errors:
            assert_type(error, riverpy.AttemptError)
        await client.job_cancel(row.id)
        await client.queue_pause("default")
        kinds = riverpy.EventKind.JOB_COMPLETED, riverpy.EventKind.JOB_FAILED
        async with client.working(), client.subscribe(*kinds) as events:
            async for event in events:
                if event.job is not None and event.statistics is not None:
                    assert_type(event.statistics.run, timedelta)
                break
            assert_type(events.dropped, int)
        report: riverpy.StopReport = await client.run(drain=True)
        assert report.is_clean
