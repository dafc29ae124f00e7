"""Mistakes that strict type checking finds. Each marked line must be reported, or its ignore is
unused.

This is never imported.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.responses import Response

import riverpy
import riverpy.sync

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    import asyncpg
    import psycopg
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, sessionmaker

workers = riverpy.Workers()
client = riverpy.Client("postgres://localhost/app", workers=workers)


class Welcome(msgspec.Struct):
    """Correct args."""

    kind: ClassVar[str] = "welcome"
    user_id: int


class NoKind(msgspec.Struct):
    """Args without a kind."""

    user_id: int


@workers.job
async def wrong_field(job: riverpy.Job[Welcome]) -> None:
    print(job.args.user_name)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


# Only one of the decorators' two forms takes a function. So the type checker reports the mismatch
# itself (reportArgumentType), not a list of overloads (reportCallIssue).
@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
def not_async(job: riverpy.Job[Welcome]) -> None: ...


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def two_parameters(job: riverpy.Job[Welcome], other: int) -> None: ...


@workers.job()  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def returns_a_set(job: riverpy.Job[Welcome]) -> set[NoKind]:
    return set()


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def returns_a_generator(job: riverpy.Job[Welcome]) -> Iterator[int]:
    return iter([1])


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def returns_no_json(job: riverpy.Job[Welcome]) -> list[object]:
    return [object()]


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def does_not_await(job: riverpy.Job[Welcome]) -> Coroutine[Any, Any, None]:
    return effect(job)


@workers.job  # pyright: ignore[reportUnknownArgumentType]
async def no_annotation(job):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
    ...


@workers.job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def takes_the_args(job: Welcome) -> None: ...


@workers.blocking_job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def not_blocking_either(job: riverpy.Job[Welcome]) -> None: ...


class SetWorker(riverpy.Worker[Welcome]):
    """A worker that returns a set."""

    async def work(self, job: riverpy.Job[Welcome]) -> set[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {1}


@workers.blocking_job()  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
async def not_blocking(job: riverpy.Job[Welcome]) -> None: ...


@workers.blocking_job  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
def blocking_response(job: riverpy.Job[Welcome]) -> Response:
    return Response()


@workers.blocking_job(executor="fork")  # pyright: ignore[reportArgumentType]
def no_executor(job: riverpy.Job[Welcome]) -> None: ...


@workers.job(timeout=30)  # pyright: ignore[reportArgumentType]
async def no_timedelta(job: riverpy.Job[Welcome]) -> None: ...


class WelcomeWorker(riverpy.Worker[Welcome]):
    """A worker for other args than its annotation says."""

    async def work(self, job: riverpy.Job[NoKind]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ...


class NoMiddleware:
    """A method without `do_inner`."""

    async def work(self, job: riverpy.Job[Welcome]) -> None: ...


async def effect(tx: object) -> None:
    """An effect for run_once."""


async def main(
    engine: AsyncEngine,
    sessions: async_sessionmaker[AsyncSession],
    blocking_engine: Engine,
    blocking_session: Session,
    blocking_connection: psycopg.Connection,
    pool: asyncpg.Pool[asyncpg.Record],
) -> None:
    """Make wrong calls."""
    riverpy.Config(middleware=[NoMiddleware()])  # pyright: ignore[reportArgumentType]
    riverpy.Config(hooks=[print])  # pyright: ignore[reportArgumentType]
    riverpy.HookMetricEmitFunc(main)  # pyright: ignore[reportArgumentType]
    await client.insert(NoKind(user_id=1))  # pyright: ignore[reportArgumentType]
    await client.insert({"user_id": 1})  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(user_id="1"))  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), riverpy.InsertOpts(priority="high"))  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx="connection")  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=1)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=engine)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=sessions)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=blocking_engine)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=blocking_session)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=blocking_connection)  # pyright: ignore[reportArgumentType]
    await client.insert(Welcome(1), tx=pool)  # pyright: ignore[reportArgumentType]
    await client.run_once("key", effect, tx=engine)  # pyright: ignore[reportCallIssue, reportArgumentType]
    await client.insert_many([Welcome(1)])  # pyright: ignore[reportArgumentType]
    await client.job_list(order_by="kind")  # pyright: ignore[reportArgumentType]
    await client.job_list(priorities=["high"])  # pyright: ignore[reportArgumentType]
    await client.job_retry_many(kind=["welcome"])  # pyright: ignore[reportCallIssue]
    client.subscribe("job_completed")  # pyright: ignore[reportArgumentType]
    riverpy.QueueConfig(max_workers="many")  # pyright: ignore[reportArgumentType]
    riverpy.JobSnooze(5)  # pyright: ignore[reportArgumentType]
    riverpy.Config(job_timeout=timedelta(1), soft_stop_timeout=3)  # pyright: ignore[reportArgumentType]
    print((await client.insert(Welcome(1))).job.identity)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def call_without_await(
    sessions: sessionmaker[Session],
    engine: Engine,
    async_engine: AsyncEngine,
    async_session: AsyncSession,
    async_scoped: async_scoped_session[AsyncSession],
    async_connection: AsyncConnection,
    async_psycopg: psycopg.AsyncConnection,
    async_cursor: psycopg.AsyncCursor,
    connection: asyncpg.Connection[asyncpg.Record],
) -> None:
    """Make wrong calls of the blocking client."""
    client = riverpy.sync.Client()
    client.insert(Welcome(1), tx=1)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=engine)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=sessions)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=async_session)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=async_scoped)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=async_connection)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=async_psycopg)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=async_cursor)  # pyright: ignore[reportArgumentType]
    client.insert(Welcome(1), tx=connection)  # pyright: ignore[reportArgumentType]
    client.run_once("key", effect, tx=async_session)  # pyright: ignore[reportCallIssue, reportArgumentType]
    riverpy.sync.Client(1)  # pyright: ignore[reportArgumentType]
    riverpy.sync.Client(async_engine)  # pyright: ignore[reportArgumentType]
    riverpy.sync.Client(async_psycopg)  # pyright: ignore[reportArgumentType]
