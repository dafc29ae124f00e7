"""Hooks and middleware around inserts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import anyio
import asyncpg
import msgspec
import pytest

import riverpy
from riverpy import (
    Client,
    Config,
    HookInsertBeginFunc,
    InsertInner,
    InsertManyParams,
    InsertOpts,
    InsertResult,
    JobInsertMiddlewareFunc,
    JobInsertParams,
    JobState,
    RawArgs,
    UniqueOpts,
)
from riverpy._insert import inserter as _insert
from riverpy._log_events import CONNECTION_LOST
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from riverpy.testing import advance, recording, require_inserted
from tests.periodic.enqueuing import enqueuing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._database import Schema

calls: list[str] = []


class Recorder:
    """A plugin that records its calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def insert_begin(self, params: JobInsertParams, /) -> None:
        calls.append(f"{self.name} begin {params.kind}")

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        calls.append(f"{self.name} in {len(params)}")
        results = await do_inner()
        calls.append(f"{self.name} out {len(results)}")


class Plain(msgspec.Struct, frozen=True):
    """Args without hooks or plugins."""

    kind: ClassVar[str] = "plain"
    n: Annotated[int, riverpy.Unique] = 0


class Traced(msgspec.Struct, frozen=True):
    """Args with hooks and plugins."""

    kind: ClassVar[str] = "traced"
    hooks: ClassVar[Sequence[riverpy.Hook]] = (Recorder("args hook"),)
    plugins: ClassVar[Sequence[riverpy.Plugin]] = (Recorder("args plugin"),)
    n: int = 0


@pytest.fixture(autouse=True)
def _forget() -> None:
    calls.clear()


def client_on(schema: Schema, **settings: Any) -> Client:
    """Open a client that only inserts."""
    return Client(schema.url, config=Config(schema=schema.name, **settings))


async def insert(client: Client, args: Any, opts: InsertOpts | None = None) -> None:
    """Insert with `insert`."""
    await client.insert(args, opts)


async def insert_many(client: Client, args: Any, opts: InsertOpts | None = None) -> None:
    """Insert with `insert_many`."""
    await client.insert_many([InsertManyParams(args, opts)])


async def insert_many_fast(client: Client, args: Any, opts: InsertOpts | None = None) -> None:
    """Insert with `insert_many_fast`."""
    assert await client.insert_many_fast([InsertManyParams(args, opts)]) == 1


WAYS = [insert, insert_many, insert_many_fast]


@pytest.mark.parametrize("way", WAYS)
async def test_each_kind_of_insert(schema: Schema, way: Callable[..., Any]) -> None:
    """Hooks and middleware run for each kind of insert. For COPY, `do_inner` returns an empty list
    (TY-07)."""
    async with client_on(schema, plugins=[Recorder("p")]) as client:
        await way(client, Plain())
    rows = 0 if way is insert_many_fast else 1
    assert calls == ["p in 1", "p begin plain", f"p out {rows}"]
    assert len(await schema.jobs()) == 1


async def test_transaction(schema: Schema) -> None:
    """They run for inserts with `tx`. An error in them leaves the transaction usable (TY-07)."""

    async def refuse(params: JobInsertParams) -> None:
        raise ZeroDivisionError

    client = client_on(schema, plugins=[Recorder("p")])
    refusing = client_on(schema, hooks=[HookInsertBeginFunc(refuse)])
    async with schema.connected() as connection, connection.transaction():
        await client.insert(Plain(), tx=connection)
        with pytest.raises(ZeroDivisionError):
            await refusing.insert(Plain(), tx=connection)
        await client.insert(Plain(), tx=connection)
    assert len(await schema.jobs()) == 2


async def test_periodic(schema: Schema) -> None:
    """They run for periodic jobs and may change them (TY-07)."""

    async def tag(params: JobInsertParams) -> None:
        params.tags.append("by-hook")

    job = PeriodicJob(every(timedelta(minutes=1)), Traced(1), id="ticks")
    config = Config(schema=schema.name, plugins=[Recorder("p")], hooks=[HookInsertBeginFunc(tag)])
    client = Client(periodic_jobs=[job], config=config)
    async with schema.connection.transaction():
        await advance(timedelta(minutes=1), client=client, tx=schema.connection)
    (row,) = await schema.jobs()
    assert row["tags"] == ["by-hook"]
    assert json.loads(row["metadata"])["river:periodic_job_id"] == "ticks"
    assert calls == [
        "p in 1",
        "args plugin in 1",
        "p begin traced",
        "args plugin begin traced",
        "args hook begin traced",
        "args plugin out 1",
        "p out 1",
    ]


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("bad"),
        SystemExit(1),
        TimeoutError("slow"),
        ConnectionRefusedError("another server"),
        asyncpg.PostgresError("another database"),
        asyncio.CancelledError(),
        None,
    ],
    ids=lambda raised: type(raised).__name__,
)
async def test_periodic_error(
    schema: Schema,
    log: list[dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException | None,
) -> None:
    """If a hook fails or hangs, its periodic job is retried later and the others are inserted. No
    exception of a hook stops the service or counts as a database error."""
    monkeypatch.setattr(_insert, "INSERT_HOOKS_TIMEOUT", 0.1)
    is_failing = True

    async def refuse(params: JobInsertParams) -> None:
        if is_failing and params.metadata["river:periodic_job_id"] == "bad":
            if raised is None:
                await anyio.sleep_forever()
            else:
                raise raised

    jobs = [PeriodicJob(every(timedelta(minutes=1)), Plain(), id=name) for name in ("bad", "good")]
    async with enqueuing(schema, *jobs, hooks=[HookInsertBeginFunc(refuse)]) as one:
        for name in ("bad", "good"):
            await one.move(name, timedelta(seconds=1))
        await one.run()
        assert one.held.context.connection.is_connected
        assert CONNECTION_LOST not in [entry["event"] for entry in log]
        assert (len(await one.slots("bad")), len(await one.slots("good"))) == (0, 1)
        is_failing = False
        one.wait_out_holds()
        await one.run()
        assert (len(await one.slots("bad")), len(await one.slots("good"))) == (1, 1)


async def test_order() -> None:
    """Plugins run before the other hooks and middleware. Those of each args class run once per
    batch, inside the client's. Hooks run for each job."""
    batch = [InsertManyParams(one) for one in (Traced(1), Plain(), Traced(2))]
    config = Config(plugins=[Recorder("p")], hooks=[Recorder("h")], middleware=[Recorder("m")])
    with recording():
        results = await Client(config=config).insert_many(batch)
    assert [result.job.kind for result in results] == ["traced", "plain", "traced"]
    of_traced = [f"{name} begin traced" for name in ("p", "h", "args plugin", "args hook")]
    assert calls == [
        "p in 3",
        "m in 3",
        "args plugin in 3",
        *of_traced,
        "p begin plain",
        "h begin plain",
        *of_traced,
        "args plugin out 3",
        "m out 3",
        "p out 3",
    ]


async def test_hooks_of_an_args_class() -> None:
    """Hooks of an args class work without hooks in the settings, and do not run for other
    classes."""
    client = Client()
    with recording():
        await client.insert(Plain())
        await client.insert(RawArgs("traced", "{}"))
        assert calls == []
        await client.insert(Traced())
    assert len(calls) == 4


@pytest.mark.parametrize("way", WAYS)
async def test_changes(schema: Schema, way: Callable[..., Any]) -> None:
    """Changes by hooks and middleware are stored. The unique key is still the key of the original
    args."""
    due = datetime(2040, 1, 2, tzinfo=UTC)

    async def change(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
        (job,) = params
        assert job.args == Plain(1)
        job.encoded_args = '{"n":2}'
        job.metadata["trace"] = {"id": 1}
        job.queue, job.priority, job.max_attempts = "other", 3, 7
        await do_inner()

    async def begin(job: JobInsertParams) -> None:
        assert job.queue == "other"
        job.tags.append("tag")
        job.state, job.scheduled_at = JobState.SCHEDULED, due

    opts = InsertOpts(metadata={"kept": 1.5}, unique_opts=UniqueOpts(by_args=True))
    with recording():
        key = (await Client().insert(Plain(1), opts)).job.unique_key
    middleware, hooks = [JobInsertMiddlewareFunc(change)], [HookInsertBeginFunc(begin)]
    async with client_on(schema, middleware=middleware, hooks=hooks) as client:
        await way(client, Plain(1), opts)
        job = await require_inserted(
            Plain(2),
            queue="other",
            priority=3,
            max_attempts=7,
            tags=["tag"],
            state="scheduled",
            scheduled_at=due,
            tx=client,
        )
    assert job.metadata == {"kept": 1.5, "trace": {"id": 1}}
    assert job.unique_key == key


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("encoded_args", "[1]", "JSON object"),
        ("encoded_args", {"n": 1}, "encoded_args takes its JSON as a text, got dict"),
        ("kind", "bad kind", "kind"),
        ("max_attempts", 0, "max_attempts must be between"),
        ("metadata", {"a": float("nan")}, "metadata"),
        ("metadata", {"cancel_attempted_at": 1}, "belongs to River"),
        ("priority", 5, "priority must be between"),
        ("queue", "Bad queue", "queue"),
        ("scheduled_at", datetime(2040, 1, 1), "no time zone"),
        ("state", "running", "state must be JobState"),
        ("state", JobState.RUNNING, "state must be one of available"),
        ("tags", ["bad tag"], "tag"),
        ("unique_key", b"short", "32 bytes"),
        ("unique_key", b"k" * 32, "without unique_opts cannot be set"),
    ],
)
async def test_bad_changes(name: str, value: object, text: str) -> None:
    """Values that hooks set are checked like options of an insert. If one is wrong, nothing is
    sent."""

    async def change(params: JobInsertParams) -> None:
        setattr(params, name, value)

    client = Client(config=Config(hooks=[HookInsertBeginFunc(change)]))
    with recording() as recorded, pytest.raises(ValueError, match=text):
        await client.insert(Plain())
    assert recorded.jobs == []


async def _never(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None: ...


async def _twice(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
    await do_inner()
    await do_inner()


@pytest.mark.parametrize(
    ("function", "text", "stored"),
    [(_never, "_never returned without", 0), (_twice, "_twice called do_inner twice", 1)],
)
async def test_rules_for_do_inner(function: Callable[..., Any], text: str, stored: int) -> None:
    """An insert fails if a middleware calls do_inner twice or never. With two calls, the jobs are
    inserted once."""
    client = Client(config=Config(middleware=[JobInsertMiddlewareFunc(function)]))
    with recording() as recorded, pytest.raises(RuntimeError, match=text):
        await client.insert(Plain())
    assert len(recorded.jobs) == stored


async def test_do_inner_after_the_insert() -> None:
    """A task that a middleware left running cannot insert after the insert has ended."""
    tasks: list[asyncio.Task[object]] = []

    async def leave(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
        tasks.append(asyncio.create_task(do_inner()))  # type: ignore[arg-type]

    client = Client(config=Config(middleware=[JobInsertMiddlewareFunc(leave)]))
    with recording() as recorded:
        with pytest.raises(RuntimeError, match="leave returned without calling do_inner"):
            await client.insert(Plain())
        with pytest.raises(RuntimeError, match="leave called do_inner after it returned"):
            await tasks[0]
    assert recorded.jobs == []


async def test_database_errors_cannot_be_caught(schema: Schema) -> None:
    """An error of the database is raised even if a middleware catches it."""
    seen: list[Sequence[InsertResult]] = []

    async def catch(params: Sequence[JobInsertParams], do_inner: InsertInner) -> None:
        with pytest.raises(riverpy.UniqueConflictError):
            seen.append(await do_inner())

    params = [InsertManyParams(Plain(1), InsertOpts(unique_opts=UniqueOpts(by_args=True)))]
    middleware = [JobInsertMiddlewareFunc(catch), JobInsertMiddlewareFunc(catch)]
    async with client_on(schema) as client:
        await client.insert_many(params)
    async with client_on(schema, middleware=middleware) as client:
        with pytest.raises(riverpy.UniqueConflictError):
            await client.insert_many_fast(params)
    assert seen == []
