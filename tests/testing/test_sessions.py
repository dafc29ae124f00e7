"""TestWorker, drain and advance with every kind of connection and session."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

import riverpy
import riverpy.sync
from riverpy import Client, Config, Job, PeriodicJob, Workers, every
from riverpy._postgres.transactions import validate_and_adapt_tx
from riverpy._without_loop import run_without_loop
from riverpy.testing import TestWorker, advance, drain
from tests.sessions.kinds import ALL_KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests._database import Schema
    from tests.sessions.kinds import Caller

HOUR = timedelta(hours=1)


class Task(msgspec.Struct, frozen=True):
    """The args of the jobs here."""

    kind: ClassVar[str] = "task"
    name: str = ""


class Blocking(Task, frozen=True):
    """The args of a blocking job."""

    kind: ClassVar[str] = "blocking"


@pytest.fixture(params=ALL_KINDS)
async def caller(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Caller]:
    """A caller of each kind, in a transaction."""
    async with ALL_KINDS[request.param](schema.url) as caller:
        yield caller


async def call(caller: Caller, function: Callable[[], Any]) -> Any:
    """Call a function with the caller's session, where that is used."""
    returned = await caller.call(function)
    return await returned if inspect.isawaitable(returned) else returned


async def fail_in_statement(tx: Any, schema: str) -> None:
    """Delete all jobs, then fail in a statement, which aborts the transaction."""
    connection = validate_and_adapt_tx(tx)
    await connection.execute(f"delete from {schema}.river_job")
    await connection.execute("select 1 / 0")


async def test_each_kind(caller: Caller, schema: Schema) -> None:
    """A job completes, one fails in a statement, and what it did is undone. Jobs that jobs insert
    are drained, a slot inserts its job, and nothing is committed."""
    workers, config = Workers(), Config(schema=schema.name)

    @workers.job
    async def work(job: Job[Task]) -> None:
        if job.args.name == "fail":
            await fail_in_statement(caller.tx, schema.name)
        if job.args.name == "parent":
            await riverpy.current_client().insert(Task("child"))

    @workers.blocking_job
    def work_blocking(job: Job[Blocking]) -> None:
        riverpy.sync.current_client().insert(Task("blocking child"))
        if job.args.name == "fail":
            run_without_loop(fail_in_statement(caller.tx, schema.name))
        if caller.is_blocking:
            job.complete_tx(caller.tx)

    worker: Any = TestWorker(workers, config)
    tx: Any = caller.tx
    done = await call(caller, lambda: worker.work(Task("parent"), tx=tx))
    assert done.require_completed().event.kind == "job_completed"
    blocking = await call(caller, lambda: worker.work(Blocking(), tx=tx))
    assert blocking.require_completed().event.kind == "job_completed"
    failing = Blocking("fail") if caller.is_blocking else Task("fail")
    failed = await call(caller, lambda: worker.work(failing, tx=tx))
    assert (failed.job.state, failed.event.kind) == ("available", "job_failed")
    assert "division by zero" in failed.job.errors[0].error
    client = Client(
        workers=workers,
        config=config,
        periodic_jobs=[PeriodicJob(every(HOUR), Task("hourly"), id="hourly")],
    )
    await call(caller, lambda: advance(2 * HOUR, client=client, tx=tx))
    results = await call(caller, lambda: drain(client, tx=tx))
    names = [msgspec.json.decode(result.job.encoded_args)["name"] for result in results]
    # The failed job is due again by now.
    assert sorted(names) == ["blocking child", "child", "fail", "hourly", "hourly"]
    assert await caller.value(f"select count(*) from {schema.name}.river_job") >= 6
    await caller.rollback()
    assert await schema.jobs() == []


def test_no_transaction() -> None:
    """A wrong session is refused, by a call that is not async too."""
    worker = TestWorker(Workers())
    with pytest.raises(TypeError, match="tx must be"):
        asyncio.run(worker.work(Task(), tx=object()))  # type: ignore[arg-type]
