"""What asyncpg asks the server about types, and what its errors mean."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from riverpy import InsertManyParams, Job, JobCancel, PeriodicJob, PeriodicJobs, every
from riverpy._lifecycle import StopScope
from riverpy._maintenance.services import make_domain_services
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    close_connection,
    connect,
    describe_error,
    is_certain_rollback,
)
from tests._database import connected
from tests.leading.term_context import held_term
from tests.periodic.enqueuing import enqueuing
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The types that the server is asked about."""
    asked: list[set[int]] = []
    introspect = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]

    async def record(self: Any, oids: Any, timeout: float | None) -> Any:
        asked.append(set(oids))
        return await introspect(self, oids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", record)
    return asked


async def test_working(rig: Rig, asked: list[set[int]]) -> None:
    """Inserting in each way, working to each end, cancelling and pausing asks about none
    (PF-10)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 1:
            raise ValueError("fails")
        if job.args.n == 2:
            raise JobCancel("no")

    async with rig.working(slots=10) as client:
        ids = [(await client.insert(Task(n=n))).job.id for n in range(3)]
        await client.insert_many([InsertManyParams(Task(n=n)) for n in range(3, 6)])
        await client.insert_many_fast([InsertManyParams(Task(n=n)) for n in range(6, 9)])
        await rig.take(9)
        await client.job_cancel(ids[1])
        await client.queue_pause("default")
        run: Any = client._run
        await run._reconciler._check_paused_queues()
        await run._reconciler._release_lost_claims(min_age_seconds=0.0)
    assert asked == []


async def test_maintenance(rig: Rig, asked: list[set[int]]) -> None:
    """Neither does maintenance, with something to do for each service (PF-10)."""

    class InContact:
        registered_at = 1

        def unbroken_contact_seconds(self) -> float:
            return 3600.0

    heartbeat: Any = InContact()
    no_inserter: Any = None
    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_at,"
        " attempted_by, finalized_at, scheduled_at)"
        " SELECT 'task', 25, '{}', state::river_job_state, 1, now() - interval '1 year', '{me}',"
        " CASE WHEN state = 'completed' THEN now() - interval '1 year' END,"
        " now() - interval '1 year'"
        " FROM unnest(array['completed', 'running', 'retryable']) AS given (state)"
    )
    async with held_term(rig.schema, reindexer_index_names=[]) as held:
        for service in make_domain_services(held.context, heartbeat, PeriodicJobs(), no_inserter):
            await service.prepare()
            await service.run_once(StopScope())
    await rig.schema.execute("DELETE FROM river_leader")
    async with enqueuing(
        rig.schema, PeriodicJob(every(timedelta(hours=1)), Task, id="hourly")
    ) as one:
        await one.move("hourly", timedelta(minutes=1))
        await one.run()
        assert len(await one.slots("hourly")) == 1
    assert asked == []


async def test_what_is_not_known(database_url: str, asked: list[set[int]]) -> None:
    """Types that riverpy does not use are still asked about, and its own arrays cross right."""
    connection = await connect(database_url)
    values = [[True, False], [b"a"], [1], [2], ["x"], [3], [1.5], [timedelta(1)], ['{"a": 1}']]
    row = await connection.fetchrow(
        "SELECT $1::bool[], $2::bytea[], $3::int2[], $4::int4[], $5::varchar[], $6::int8[],"
        " $7::float8[], $8::interval[], $9::jsonb[], '{2026-01-01Z}'::timestamptz[]",
        *values,
    )
    assert row is not None
    assert list(row)[:-1] == values
    assert asked == []
    assert await connection.fetchval("SELECT '{1.2.3.4}'::inet[]")
    assert len(asked) == 1
    await close_connection(connection)


@pytest.mark.parametrize(
    ("denied", "grant"),
    [
        ("table river_migration", "GRANT SELECT ON river_migration TO"),
        ("table river_job", "GRANT SELECT, INSERT, UPDATE (kind) ON river_job TO"),
        ("sequence river_job_id_seq", "GRANT USAGE ON SEQUENCE river_job_id_seq TO"),
        ("database app", "denied for database app"),
    ],
)
def test_denied_statement_names_its_grant(denied: str, grant: str) -> None:
    """The description of a refused statement says which GRANT the role lacks."""
    error = asyncpg.InsufficientPrivilegeError(f"permission denied for {denied}")
    assert grant in describe_error(error)


@pytest.mark.parametrize(
    ("sql", "value", "expected"),
    [
        ("SELECT $1::int", "no number", True),
        ("SELECT 1 / $1::int", 0, True),
        ("SELECT pg_terminate_backend(pg_backend_pid()), $1::int", 1, False),
    ],
    ids=["asyncpg cannot encode", "server refuses", "session ends"],
)
async def test_certain_rollback(database_url: str, sql: str, value: object, expected: bool) -> None:
    """An error proves that nothing was stored if the statement was not sent, or if the server
    refused it. An ended session proves nothing."""
    async with connected(database_url) as connection:
        with pytest.raises(DATABASE_ERRORS) as caught:
            await connection.fetch(sql, value)
        assert is_certain_rollback(caught.value) is expected
        connection.terminate()
