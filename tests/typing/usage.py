"""Typical user code. It never runs; pyright strict must accept it without a cast.

Each `pyright: ignore` marks a line that must be a type error; pyright reports an ignore without an
error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, assert_type

import msgspec

import riverpy
import riverpy.django
import riverpy.sync

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg

workers = riverpy.Workers()


class Welcome(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "welcome"
    user_id: Annotated[int, riverpy.Unique]

    def insert_opts(self) -> riverpy.InsertOpts:
        return riverpy.InsertOpts(queue="mail", unique_opts=riverpy.UniqueOpts(by_args=True))


class Mutable(msgspec.Struct):
    kind: ClassVar[str] = "mutable"


@dataclass
class Resize:
    path: str
    kind: ClassVar[str] = "resize"


class NoKind(msgspec.Struct):
    user_id: int


@workers.job(timeout=timedelta(seconds=30))
async def welcome(job: riverpy.Job[Welcome]) -> None:
    assert_type(job.args, Welcome)
    assert_type(job.args.user_id, int)
    if job.attempt > 3:
        raise riverpy.JobCancel("enough")
    raise riverpy.JobSnooze(timedelta(minutes=5))


@workers.job
async def resize(job: riverpy.Job[Resize]) -> None:
    job.record_output({"path": job.args.path})
    assert_type(job.cancelled, riverpy.CancelFlag)
    assert_type(job.cancelled.is_set(), bool)
    assert_type(job.cancelled.wait(1.5), bool)
    print(job.args.size)  # pyright: ignore


@workers.blocking_job(executor="process")
def shrink(job: riverpy.Job[Mutable]) -> None: ...


@workers.blocking_job
def grow(job: riverpy.Job[Mutable]) -> None: ...


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
def plain(job: riverpy.Job[Mutable]) -> None: ...


class ResizeWorker(riverpy.Worker[Resize]):
    async def work(self, job: riverpy.Job[Resize]) -> None:
        assert_type(job.args, Resize)

    def timeout(self, job: riverpy.Job[Resize]) -> timedelta:
        return timedelta(seconds=len(job.args.path))

    def next_retry(self, job: riverpy.Job[Resize]) -> timedelta | None:
        return None


class WrongWorker(riverpy.Worker[Resize]):
    async def work(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, job: riverpy.Job[Welcome]
    ) -> None: ...


workers.add(ResizeWorker())

client = riverpy.Client(
    "postgres://localhost/app",
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=100)},
    config=riverpy.Config(schema="river", job_timeout=None),
)


async def fetch(path: str) -> Mutable: ...


async def copy(cursor: int | None) -> None: ...


@workers.job(kind="steps")
async def steps(job: riverpy.Job[Resize]) -> None:
    assert_type(await job.step("a", fetch, "x"), Mutable | None)
    assert_type(await job.step("b", fetch, "x", keep=True, result_type=Mutable), Mutable)
    assert_type(await job.step("c", copy, cursor=int), None)
    await job.step("d", fetch, "x", keep=True)  # pyright: ignore
    await job.step("e", fetch)  # pyright: ignore
    await job.step("f", fetch, 1)  # pyright: ignore
    await job.step("g", copy, cursor=str)  # pyright: ignore
    await job.step("h", copy, cursor=int, keep=True)  # pyright: ignore


async def insert(
    connection: asyncpg.Connection[asyncpg.Record], pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    async with connection.transaction():
        result = await client.insert(Welcome(user_id=1), tx=connection)
        assert_type(result.job, riverpy.JobRow)
        assert_type(result.unique_skipped_as_duplicate, bool)
    async with pool.acquire() as pooled:
        await client.insert(Resize(path="/a"), riverpy.InsertOpts(priority=2), tx=pooled)
    await client.insert(Mutable())
    await client.insert(riverpy.RawArgs("raw", "{}"))
    await client.insert(NoKind(1))  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome("1"))  # pyright: ignore[reportArgumentType]
    many = await client.insert_many(
        [riverpy.InsertManyParams(Welcome(1)), riverpy.InsertManyParams(Resize("/a"))]
    )
    assert_type(many, list[riverpy.InsertResult])
    assert_type(await client.insert_many_fast([riverpy.InsertManyParams(Mutable())]), int)


@asynccontextmanager
async def lifespan(app: object) -> AsyncGenerator[dict[str, Any]]:
    async with client, client.working():
        yield {"riverpy": client}


async def watch() -> None:
    kinds = riverpy.EventKind
    async with client.subscribe(kinds.JOB_COMPLETED, kinds.QUEUE_PAUSED) as events:
        async for event in events:
            assert_type(event, riverpy.Event)
            if event.job is not None and event.statistics is not None:
                assert_type(event.statistics.run, timedelta)


async def run() -> None:
    assert_type(await client.run(drain=True), riverpy.StopReport)


def insert_in_django(blocking: riverpy.sync.Client) -> None:
    from django.db import connection, transaction

    blocking.insert(Welcome(1), tx="default")
    blocking.insert(Welcome(1), tx=transaction.get_connection("default"))
    blocking.insert(Welcome(1), tx=connection.cursor())  # pyright: ignore[reportArgumentType]
    assert_type(riverpy.django.insert(Welcome(1), using="default"), riverpy.InsertResult)
    riverpy.django.insert(NoKind(1))  # pyright: ignore[reportArgumentType]
    assert_type(riverpy.django.client().job_cancel(1), riverpy.JobRow)
