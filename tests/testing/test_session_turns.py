"""Sessions of the application that share the connection of a test."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

import riverpy
from riverpy import Config, Job, TransactionError, Workers
from riverpy.testing import TestWorker, inserted
from riverpy.testing import _session_turns as session_turns
from riverpy.testing.async_fixtures import open_session
from tests.sessions.kinds import make_engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    import asyncpg

    from riverpy.testing import WorkResult
    from tests._database import Schema

    Code = Callable[[], Awaitable[object]]

INSERT = text("insert into note values (:name)")


class Task(msgspec.Struct, frozen=True):
    """The args of the jobs here."""

    kind: ClassVar[str] = "task"
    name: str = ""


class Notes:
    """An application with one table, as a test sees it."""

    def __init__(self, session: AsyncSession, new_session: Any, schema: str) -> None:
        self.session, self.new_session, self.schema = session, new_session, schema

    async def work(self, code: Code, timeout: timedelta | None = None) -> WorkResult:
        """Work a job with this code in the session of the test."""
        workers = Workers()

        @workers.job(timeout=timeout)
        async def work(job: Job[Task]) -> None:
            await code()

        worker = TestWorker(workers, Config(schema=self.schema))
        return await worker.work(Task(), tx=self.session)

    async def write(self, name: str, *, inner: Code | None = None, fails: bool = False) -> None:
        """Write a note in a transaction of its own. `inner` is called in this transaction."""
        async with self.new_session.begin() as session:
            await session.execute(INSERT, {"name": name})
            await riverpy.current_client().insert(Task(name))
            await session.execute(text("select pg_sleep(0)"))
            if inner is not None:
                await inner()
            if fails:
                await session.rollback()

    async def list_names(self) -> list[str]:
        """Return the names of the notes, in the order of the writes."""
        return [*await self.session.scalars(text("select name from note"))]


@pytest.fixture(params=["asyncpg", "psycopg"])
async def notes(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Notes]:
    """The application with each driver."""
    engine = make_engine(schema.url, request.param)
    new_session = async_sessionmaker(engine)
    async with open_session(engine, [new_session]) as session:
        await session.execute(text("create temporary table note (name text)"))
        yield Notes(session, new_session, schema.name)


async def test_transactions_of_tasks_follow_each_other(notes: Notes) -> None:
    """Transactions of several tasks do not overlap, with the calls of the client in them. One that
    a task begins in its own transaction, or in that of its parent, does not wait."""

    async def write_two() -> None:
        await asyncio.gather(notes.write("b"), notes.write("c"))

    async def code() -> None:
        await asyncio.gather(
            notes.write("a", inner=write_two),
            notes.write("d", fails=True),
            notes.write("e", inner=lambda: notes.write("f")),
        )

    (await notes.work(code)).require_completed()
    assert await notes.list_names() == ["a", "b", "c", "e", "f"]
    jobs = await inserted(Task, tx=notes.session, schema=notes.schema)
    # The rollback of "d" has undone the insert that the client has done in the meantime.
    assert [job.args.name for job in jobs] == ["", "a", "b", "c", "e", "f"]


async def test_tasks_that_wait_for_each_other(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that waits for the task whose transaction holds the connection does not wait
    for ever. A transaction that an ended task has left open does not block others."""
    monkeypatch.setattr(session_turns, "TURN_TIMEOUT", 0.001)
    left_open: list[AsyncSession] = []

    async def leave_open() -> None:
        left_open.append(notes.new_session())
        await left_open[0].execute(text("select 1"))

    async def code() -> None:
        may_begin, may_end = anyio.Event(), anyio.Event()

        async def write_later() -> None:
            await may_begin.wait()
            await notes.write("inner")
            may_end.set()

        async def let_write() -> None:
            may_begin.set()
            await may_end.wait()

        await asyncio.gather(write_later(), notes.write("outer", inner=let_write))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave_open)
    (await notes.work(code)).require_completed()
    assert await notes.list_names() == ["outer", "inner"]
    await left_open[0].close()


async def test_timeout_in_a_statement(notes: Notes) -> None:
    """A statement that the job's timeout cancels does not end the connection of the test: what the
    job wrote is undone, and its failure is stored."""

    async def code() -> None:
        async with notes.new_session.begin() as session:
            await session.execute(INSERT, {"name": "undone"})
            await session.execute(text("select pg_sleep(60)"))

    await notes.session.execute(INSERT, {"name": "kept"})
    result = await notes.work(code, timedelta(milliseconds=50))
    assert isinstance(result.error, TimeoutError)
    assert result.job.state == "available"
    assert await notes.list_names() == ["kept"]


async def test_connection_that_a_timeout_ends(schema: Schema) -> None:
    """If the connection ends all the same, the error names the timeout."""
    workers = Workers()

    @workers.job(timeout=timedelta(milliseconds=1))
    async def work(job: Job[Task]) -> None:
        try:
            await anyio.Event().wait()
        finally:
            tx.terminate()

    tx: asyncpg.Connection[Any]
    async with schema.connected() as tx:
        await tx.execute("begin")
        with pytest.raises(TransactionError, match=r"its timeout of 0\.001 s, and this has ended"):
            await TestWorker(workers).work(Task(), tx=tx)
