"""Search paths with another schema before River's."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import anyio
import asyncpg
import pytest

from riverpy import EventKind, InsertManyParams, Job
from riverpy._postgres.domains import owner_lock_all
from riverpy._postgres.sql_files import load_statements, sql_directory
from tests._database import connected
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema


def statements() -> list[tuple[str, str]]:
    """Return the name and text of each block in `sql/queries`."""
    files = (entry.name.removesuffix(".sql") for entry in (sql_directory() / "queries").iterdir())
    return [block for file in files for block in load_statements(file).items()]


def test_no_statement_names_a_channel_or_a_lock_by_the_first_schema_alone() -> None:
    """Each statement that notifies, or locks by schema, takes the schema from its table (FR-04)."""
    notifying = [
        text for _, text in statements() if "pg_notify(" in text and "@channel" not in text
    ]
    assert len(notifying) > 10
    for text in notifying:
        assert len(re.findall(r"pg_notify\(\s*/\* schema of \w+ \*/", text)) == text.count(
            "pg_notify("
        )
    bare = {name for name, text in statements() if re.search(r"(?<!\*/ )current_schema\(", text)}
    assert bare == {"notification_schemas", "migration_place", "session_database"}


@pytest.fixture
async def tenant(schema: Schema) -> AsyncGenerator[str]:
    """Yield a search path with an empty schema before River's."""
    name = f"{schema.name}_tenant"
    await schema.execute(f"CREATE SCHEMA {name}")
    yield f"{name}, {schema.name}"
    await schema.execute(f"DROP SCHEMA {name}")


def with_path(url: str, path: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}search_path={path.replace(' ', '')}"


async def test_notifications_of_a_caller_with_another_search_path(
    schema: Schema, tenant: str
) -> None:
    """Jobs, cancels and pauses reach the worker at once from a caller whose search path finds
    River's tables in its second schema (FR-04)."""
    rig = Rig(schema)
    started = asyncio.Queue[int]()

    @rig.job
    async def wait(job: Job[Task]) -> None:
        started.put_nowait(job.id)
        await anyio.sleep(job.args.n)

    url = with_path(schema.url, schema.name)
    async with (
        connected(schema.url, search_path=tenant) as tx,
        rig.working(schema=None, url=url) as client,
    ):
        with anyio.fail_after(PATIENCE, reason="a notification did not arrive"):
            async with tx.transaction():
                job = (await client.insert(Task(600), tx=tx)).job
            assert await started.get() == job.id
            async with tx.transaction():
                await client.job_cancel(job.id, tx=tx)
            assert (await rig.event()).kind is EventKind.JOB_CANCELLED
            async with tx.transaction():
                await client.insert_many_fast([InsertManyParams(Task())], tx=tx)
            await started.get()
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            async with tx.transaction():
                await client.queue_pause("default", tx=tx)
            assert (await rig.event()).kind is EventKind.QUEUE_PAUSED


async def test_lock_of_the_queues_is_one_whatever_the_search_path(
    schema: Schema, tenant: str
) -> None:
    """Of two sessions whose search paths find the same tables, one waits for the other's lock
    (FR-04)."""
    async with (
        connected(schema.url, search_path=tenant) as one,
        connected(schema.url, search_path=schema.name, lock_timeout="100ms") as other,
        one.transaction(),
    ):
        await owner_lock_all(one, None)
        for named in (None, schema.name):
            with pytest.raises(asyncpg.LockNotAvailableError):
                await owner_lock_all(other, named)


async def test_listener_hears_the_first_schema_too(schema: Schema, tenant: str) -> None:
    """A worker whose search path finds the tables in its second schema receives what River in Go
    sends with the same path."""
    rig = Rig(schema)

    rig.register_task()
    first = tenant.partition(",")[0]
    async with rig.working(schema=None, url=with_path(schema.url, tenant)) as client:
        await client.insert(Task(1))
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        await rig.insert_rows(1)
        await schema.execute(f'NOTIFY "{first}.river_insert", \'{{"queue": "default"}}\'')
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
