"""Tests of a user with the test kit. They never run; pyright and mypy must accept them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, assert_type

import riverpy
import riverpy.sync
from riverpy.testing import (
    ExpectedJob,
    FixedClock,
    InsertedJobs,
    MadeJob,
    expect_job,
    inserted,
    make_job,
    recording,
    require_inserted,
    require_many_inserted,
    require_not_inserted,
    resumable_after,
)

if TYPE_CHECKING:
    import asyncpg
    import psycopg
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session


@dataclass
class Welcome:
    kind: ClassVar[str] = "welcome"
    user_id: int


async def welcome(job: riverpy.Job[Welcome]) -> None:
    """A handler."""


async def call_handler() -> None:
    """A made job is a `Job` of its args."""
    job = make_job(Welcome(1), resumable_after(None, "fetch"), attempt=2, tags=["a"])
    assert_type(job, MadeJob[Welcome])
    await welcome(job)
    assert_type(job.args.user_id, int)
    assert_type(make_job(riverpy.RawArgs("a", "{}")), MadeJob[Any])


async def assert_with_sessions(
    connection: asyncpg.Connection[Any],
    pool: asyncpg.Pool[Any],
    psycopg_connection: psycopg.AsyncConnection,
    session: AsyncSession,
    alchemy_connection: AsyncConnection,
    scoped: async_scoped_session[AsyncSession],
    client: riverpy.Client,
) -> None:
    """With a session for async code, the assertions are awaited."""
    assert_type(await require_inserted(Welcome, tx=connection, user_id=1), MadeJob[Welcome])
    assert_type(await require_inserted(Welcome(1), tx=pool, queue="a"), MadeJob[Welcome])
    assert_type(await require_inserted(Welcome, tx=psycopg_connection), MadeJob[Welcome])
    assert_type(await require_inserted(Welcome, tx=session), MadeJob[Welcome])
    assert_type(await require_inserted(Welcome, tx=alchemy_connection), MadeJob[Welcome])
    assert_type(await require_inserted(Welcome, tx=scoped), MadeJob[Welcome])
    assert_type(await inserted(Welcome, tx=client), list[MadeJob[Welcome]])
    await require_not_inserted(Welcome, tx=session, state="available")
    jobs = await require_many_inserted([Welcome, Welcome(1), expect_job("go")], tx=client)
    assert_type(jobs, list[MadeJob[Any]])
    assert_type(await InsertedJobs(session).require_inserted(Welcome), MadeJob[Welcome])


def assert_without_await(
    connection: psycopg.Connection,
    session: Session,
    scoped: scoped_session[Session],
    client: riverpy.sync.Client,
) -> None:
    """With a blocking session, the assertions have done their work when they return."""
    assert_type(require_inserted(Welcome, tx=connection), MadeJob[Welcome])
    assert_type(require_inserted(Welcome, tx=session).args, Welcome)
    assert_type(inserted(Welcome, tx=scoped), list[MadeJob[Welcome]])
    assert_type(require_inserted(Welcome(1), tx="default"), MadeJob[Welcome])
    require_not_inserted(Welcome, tx=client)
    assert_type(require_many_inserted([Welcome], tx="default"), list[MadeJob[Any]])


def record_without_a_database() -> None:
    """A recording has the same assertions."""
    clock = FixedClock(datetime.now().astimezone())
    client = riverpy.sync.Client(config=riverpy.Config(clock=clock))
    with recording() as recorded:
        client.insert(Welcome(1))
    assert_type(recorded.require_inserted(Welcome, user_id=1), MadeJob[Welcome])
    assert_type(expect_job(Welcome, user_id=1), ExpectedJob[Welcome])
    assert_type(expect_job("go"), ExpectedJob[riverpy.RawArgs])
