"""Roles with the grants of docs/grants.md: what they can do, and what doctor reports."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest
import structlog

from riverpy import ConfigError, DatabaseError, InsertManyParams, InsertOpts, UniqueOpts
from riverpy._log_events import INDEXES_OF_ANOTHER_OWNER_SKIPPED, ROW_LEVEL_SECURITY_FOUND
from tests._database import connected
from tests.maintenance.reindexing import Once
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor

PAGE = Path(__file__).parents[3] / "docs" / "grants.md"
_BLOCK = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
async def roles(schema: Schema) -> AsyncGenerator[dict[str, str]]:
    """The URLs of a worker, an inserter and a role without grants, by name."""
    made = {
        name: f"riverpy_test_{name}_{secrets.token_hex(4)}"
        for name in ("worker", "inserter", "nobody")
    }
    (block,) = _BLOCK.findall(PAGE.read_text("utf-8"))
    for name, role in made.items():
        await schema.execute(f"CREATE ROLE {role}")
        block = block.replace(f"river_{name}", role)
    try:
        await schema.execute(
            f"GRANT USAGE ON SCHEMA {schema.name} TO {made['worker']}, {made['inserter']}"
        )
        await schema.execute(block)
        yield {name: f"{schema.url}&role={role}" for name, role in made.items()}
    finally:
        for table in ("river_job", "river_migration"):
            await schema.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        for role in made.values():
            await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_inserter(schema: Schema, roles: dict[str, str], doctor: Doctor) -> None:
    """A role with the grants of an inserter inserts in every way and notifies, waits, watches and
    follows, and cannot claim or delete. Doctor reports that and the missing grants (SE-05)."""
    rig = Rig(schema)
    rig.job(_nothing)
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    async with rig.client(url=roles["inserter"]) as client:
        assert not (await client.insert(Task(1), unique)).unique_skipped_as_duplicate
        assert (await client.insert(Task(1), unique)).unique_skipped_as_duplicate
        await client.insert_many([InsertManyParams(Task(n)) for n in range(3)])
        await client.insert_many_fast([InsertManyParams(Task(n)) for n in range(3)])
        await schema.execute("UPDATE river_job SET state = 'cancelled', finalized_at = now()")
        async with asyncio.timeout(30), client.subscribe("job_failed", fleet=True):  # type: ignore[call-overload]
            assert (await client.wait(1)).state == "cancelled"
            assert [change.job.state async for change in client.watch(1)] == ["cancelled"]
        async with connected(roles["inserter"], search_path=schema.name) as connection:
            async with connection.transaction():
                await client.insert(Task(2), tx=connection)
            for statement in (
                "DELETE FROM river_job",
                "UPDATE river_job SET state = 'running'",
                "SELECT FROM river_queue",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 8
    report = await doctor(url=roles["inserter"])
    found = report.one("grants", "warn")
    assert "may insert; it may not work, migrate, reindex" in found["text"]
    assert "to work jobs, grant UPDATE, DELETE on river_job; SELECT, INSERT, " in found["fix"]
    (skipped,) = report.named("skipped")
    assert "permission denied for table riverpy_client" in skipped["text"]
    assert "leader" in skipped["data"]["checks"]


async def test_worker(schema: Schema, roles: dict[str, str], doctor: Doctor) -> None:
    """A role with the grants of a worker works jobs, becomes leader and runs maintenance,
    without superuser and CREATE. It logs once that it cannot rebuild indexes. Doctor finds no
    problem (SE-05)."""
    rig = Rig(schema)
    rig.job(_nothing)
    with structlog.testing.capture_logs() as log:
        async with rig.working(url=roles["worker"], reindexer_schedule=Once()):
            with anyio.fail_after(PATIENCE):
                while INDEXES_OF_ANOTHER_OWNER_SKIPPED not in [entry["event"] for entry in log]:
                    await anyio.sleep(0.01)
    assert [entry["event"] for entry in log].count(INDEXES_OF_ANOTHER_OWNER_SKIPPED) == 1
    assert "permission denied" not in str(log)
    async with rig.working(url=roles["worker"]) as client:
        await rig.until("SELECT count(*) FROM river_leader")
        inserted = await client.insert(Task())
        await rig.event()
        assert (await rig.row(inserted.job.id))["state"] == "completed"
        await client.queue_pause("default")
        await client.queue_resume("default")
        report = await doctor(url=roles["worker"])
    assert report.problems() == []
    assert (
        "may insert, work; it may not migrate, reindex (as leader it"
        in (report.one("grants", "ok")["text"])
    )
    async with connected(roles["worker"], search_path=schema.name) as connection:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("CREATE TABLE mine ()")


async def test_row_security(
    schema: Schema, roles: dict[str, str], doctor: Doctor, log: list[Any]
) -> None:
    """If row-level security hides all jobs from the role, doctor fails and a worker refuses to
    start. If policies may hide some jobs both warn (TeamWarp/effect-mq#9)."""
    worker = roles["worker"].rpartition("=")[2]
    rig = Rig(schema)
    rig.job(_nothing)

    async def drain() -> list[Any]:
        log.clear()
        async with rig.client(url=roles["worker"]) as client:
            await client.run(drain=True)
        return [entry for entry in log if entry["event"] == ROW_LEVEL_SECURITY_FOUND]

    await schema.execute("ALTER TABLE river_job ENABLE ROW LEVEL SECURITY")
    found = (await doctor(url=roles["worker"])).one("grants", "fail")
    assert (
        f'row-level security applies to "{worker}" on river_job: without a policy' in found["text"]
    )
    with pytest.raises(ConfigError) as caught:
        await drain()
    assert str(caught.value) == f"{found['text']}: {found['fix']}"

    await schema.execute(f"CREATE POLICY own ON river_job TO {worker} USING (queue = 'default')")
    found = (await doctor(url=roles["worker"])).one("grants", "warn")
    assert "jobs that no policy allows" in found["text"]
    (entry,) = await drain()
    assert (entry["effect"], entry["advice"]) == (found["text"], found["fix"])
    assert (entry["role"], entry["tables"]) == (worker, ["river_job"])

    await schema.execute(f"CREATE POLICY everything ON river_job TO {worker} USING (true)")
    assert "may insert, work" in (await doctor(url=roles["worker"])).one("grants", "ok")["text"]
    assert await drain() == []


async def test_row_security_of_migrations(
    schema: Schema, roles: dict[str, str], doctor: Doctor
) -> None:
    """If row-level security hides the record of migrations, doctor and a worker report that."""
    await schema.execute("ALTER TABLE river_migration ENABLE ROW LEVEL SECURITY")
    found = (await doctor(url=roles["worker"])).one("grants", "fail")
    assert "on river_migration: without a policy" in found["text"]
    rig = Rig(schema)
    rig.job(_nothing)
    async with rig.client(url=roles["worker"]) as client:
        with pytest.raises(ConfigError, match="row-level security applies"):
            await client.run(drain=True)


async def test_role_without_grants(roles: dict[str, str], schema: Schema, doctor: Doctor) -> None:
    """For a role without grants, doctor reports which ones it needs to insert. Waits and watches
    name the grant that they need."""
    report = await doctor(url=roles["nobody"])
    assert "permission denied" in report.one("schema", "fail")["text"]
    role = roles["nobody"].rpartition("=")[2]
    await schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
    await schema.execute(f"GRANT SELECT ON river_migration TO {role}")
    found = (await doctor(url=roles["nobody"])).one("grants", "fail")
    async with asyncio.timeout(30), Rig(schema).client(url=roles["nobody"], queues={}) as client:
        for read in (client.wait(1), anext(client.watch(1))):
            with pytest.raises(DatabaseError, match="GRANT SELECT ON river_job"):
                await read
    assert found["fix"] == (
        "to insert, grant SELECT, INSERT, UPDATE (kind) on river_job; "
        "USAGE on sequence river_job_id_seq"
    )


def test_page_has_all_grants() -> None:
    """Each table that doctor checks for a worker has its grant on the page."""
    (block,) = _BLOCK.findall(PAGE.read_text("utf-8"))
    worker = block[: block.index("-- Insert jobs")]
    for table in ("river_job", "river_queue", "river_leader", "riverpy_client", "riverpy_periodic"):
        assert table in worker


async def _nothing(job: Any) -> None:
    pass
