"""drain: all due jobs, without a running client."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

import riverpy
from riverpy import Client, Config, EventKind, InsertOpts, Job, JobSnooze, QueueConfig, Workers
from riverpy.testing import drain

if TYPE_CHECKING:
    from tests._database import Schema

HOUR = timedelta(hours=1)


class Step(msgspec.Struct, frozen=True):
    """The args of a job that inserts jobs."""

    kind: ClassVar[str] = "step"
    name: str
    then: tuple[str, ...] = ()


def make_client(schema: Schema, seen: list[str], **settings: Any) -> Client:
    """Return a client whose jobs write their names into `seen`."""
    workers = Workers()

    @workers.job(next_retry=lambda job: HOUR)
    async def work(job: Job[Step]) -> None:
        seen.append(job.args.name)
        for name in job.args.then:
            await riverpy.current_client().insert(Step(name))
        match job.args.name:
            case "fail":
                raise ValueError("no luck")
            case "snooze":
                raise JobSnooze(timedelta(0))
            case "endless":
                await riverpy.current_client().insert(job.args)
            case _:
                pass

    config = Config(schema=schema.name, **settings)
    return Client(schema.url, workers=workers, queues={"default": QueueConfig()}, config=config)


@pytest.mark.parametrize("has_tx", [False, True])
async def test_order_and_retries(schema: Schema, has_tx: bool) -> None:
    """Due jobs are worked in the order of claims, with the jobs that they insert. `with_scheduled`
    also works later jobs, and failed ones until their last attempt."""
    seen: list[str] = []
    async with make_client(schema, seen) as client, schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        tx = connection if has_tx else None
        later = datetime.now(UTC) + timedelta(minutes=10)
        for args, opts in (
            (Step("later"), InsertOpts(scheduled_at=later)),
            (Step("fail"), InsertOpts(max_attempts=3)),
            (Step("parent", ("child",)), None),
            (Step("first"), None),
            (Step("urgent"), InsertOpts(scheduled_at=datetime.now(UTC) - HOUR)),
            (Step("elsewhere"), InsertOpts(queue="other")),
        ):
            opts = opts or InsertOpts()
            if args.name != "first":
                opts = msgspec.structs.replace(opts, priority=2)
            await client.insert(args, opts, tx=tx)
        results = await drain(client, tx=tx)
        assert seen == ["first", "urgent", "fail", "parent", "child"]
        assert [result.event.kind for result in results].count(EventKind.JOB_FAILED) == 1
        seen.clear()
        results = await drain(client, with_scheduled=True, tx=tx)
        assert seen == ["later", "fail", "fail"]
        assert [str(result.job.state) for result in results] == [
            "completed",
            "retryable",
            "discarded",
        ]
        assert [len(result.job.attempted_by) for result in results] == [1, 2, 3]
        assert await drain(client, tx=tx) == []
        assert len(await drain(client, ["other"], tx=tx)) == 1
        await transaction.rollback()
    assert len(await schema.jobs()) == (0 if has_tx else 7)


async def test_refusals(schema: Schema) -> None:
    """Jobs that never end, a running or closed client, and bad arguments are clear errors."""
    seen: list[str] = []
    async with make_client(schema, seen) as client:
        for name in ("endless", "snooze"):
            await client.insert(Step(name))
            with pytest.raises(riverpy.ClientStateError, match=r"worked 5 attempts.*step job_"):
                await drain(client, max_jobs=5)
            await schema.execute("delete from river_job")
        for queues, max_jobs in ((["a b"], 1), ("default", 1), (None, 0)):
            with pytest.raises(riverpy.ConfigError):
                await drain(client, queues, max_jobs=max_jobs)
        async with client.working():
            with pytest.raises(riverpy.ClientStateError, match="not running"):
                await drain(client)
    with pytest.raises(riverpy.ClientStateError, match="not open"):
        await drain(client)
    with pytest.raises(riverpy.ConfigError, match="needs workers"):
        await drain(Client(schema.url))
