"""Rows that a trigger refuses or holds up, and each service that meets some."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from riverpy import JobRetention, Worker, Workers
from riverpy._maintenance.client_cleaner import ClientCleaner
from riverpy._maintenance.execution_cleaner import RunOnceKeyCleaner
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_count_cleaner import JobCountCleaner
from riverpy._maintenance.job_expirer import JobExpirer
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.queue_cleaner import QueueCleaner
from tests.maintenance.dead_clients import in_contact, observed, register
from tests.maintenance.rows import insert_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from typing import TypeAlias

    from riverpy import Job
    from riverpy._leading.term_context import TermContext
    from riverpy._maintenance.base import MaintenanceService
    from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

    Make: TypeAlias = Callable[[HeldTerm], Awaitable[MaintenanceService]]

REFUSALS = ("08006", "23503", "40001", "53100", "55000", "57P01", "58030", "P0001", "XX001")
"""An error of each class that says nothing about the statement, and two that do."""


class Task(msgspec.Struct):
    """The args of all jobs here."""

    kind: ClassVar[str] = "task"


class TaskWorker(Worker[Task]):
    """Is never called."""

    async def work(self, job: Job[Task]) -> None: ...


def registry() -> Workers:
    """A worker for the kind of all jobs here."""
    workers = Workers()
    workers.add(TaskWorker())
    return workers


@asynccontextmanager
async def triggered(schema: Schema, table: str, operation: str, body: str) -> AsyncGenerator[None]:
    """Run PL/pgSQL for each row of a table before the operation; `it` is the row as jsonb."""
    await schema.execute(
        "CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$"
        " DECLARE it jsonb; how text; BEGIN"
        " IF TG_OP = 'INSERT' THEN it := to_jsonb(NEW); ELSE it := to_jsonb(OLD); END IF;"
        f" {body}"
        " IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$;"
        f" CREATE TRIGGER meet BEFORE {operation} ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION meet()"
    )
    try:
        yield
    finally:
        await schema.execute("DROP FUNCTION meet CASCADE")


def refusing(case: Case, bad: dict[str, str]) -> str:
    """The body that raises an error of such a class for each of these rows."""
    branches = " ".join(f"WHEN '{key}' THEN '{how}'" for key, how in bad.items())
    return (
        f"how := CASE it ->> '{case.key}' {branches} END;"
        " IF how IS NOT NULL THEN RAISE EXCEPTION 'refused' USING ERRCODE = how; END IF;"
    )


def sleeping(case: Case, seconds: float, keys: Iterable[str] | None = None) -> str:
    """The body that holds up these rows, or all."""
    which = "true"
    if keys is not None:
        which = f"it ->> '{case.key}' IN ({', '.join(repr(key) for key in keys)})"
    return f"IF {which} THEN PERFORM pg_sleep({seconds}); END IF;"


@dataclass(frozen=True)
class Case:
    """One service, the rows that it handles, and how a row looks that it has not handled."""

    make: Make
    """Makes the service, for rows that were inserted before."""
    table: str
    operation: str
    insert: Callable[[Schema, int], Awaitable[list[str]]]
    left: str
    """The statement that finds the keys of rows that are not handled."""
    key: str = "id"

    def batch_runner(self, service: Any) -> MaintenanceBatchRunner[Any]:
        """Return the batch runner of the service."""
        return service.batch_runner

    async def remaining(self, schema: Schema) -> set[str]:
        """The keys of the rows that are not handled."""
        return {row[0] for row in await schema.fetch(self.left)}


def _new(service: Callable[[TermContext], MaintenanceService]) -> Make:
    async def make(held: HeldTerm) -> MaintenanceService:
        return service(held.context)

    return make


async def _rescuer_of_dead(held: HeldTerm) -> MaintenanceService:
    await register(held.schema, "gone")
    return await observed(held, JobRescuer(held.context, in_contact), 5.0)


async def _client_cleaner(held: HeldTerm) -> MaintenanceService:
    return await observed(held, ClientCleaner(held.context, in_contact), 660.0)


def _jobs(**columns: str) -> Callable[[Schema, int], Awaitable[list[str]]]:
    async def insert(schema: Schema, count: int) -> list[str]:
        return [str(one) for one in await insert_jobs(schema, count, **columns)]

    return insert


def _rows(statement: str) -> Callable[[Schema, int], Awaitable[list[str]]]:
    async def insert(schema: Schema, count: int) -> list[str]:
        rows = await schema.fetch(statement, count)
        return [row[0] for row in rows]

    return insert


ENDED = {"state": "'completed'", "finalized_at": "now() - interval '30 days'"}
JOBS = "SELECT id::text FROM river_job"

CASES = {
    "scheduler": Case(
        _new(JobScheduler),
        "river_job",
        "UPDATE",
        _jobs(state="'scheduled'", scheduled_at="now() - interval '1 minute'"),
        f"{JOBS} WHERE state = 'scheduled'",
    ),
    "rescuer": Case(
        _new(lambda context: JobRescuer(context, None)),
        "river_job",
        "UPDATE",
        _jobs(
            state="'running'",
            attempt="1",
            attempted_at="now() - interval '2 hours'",
            attempted_by="array['gone']",
        ),
        f"{JOBS} WHERE state = 'running'",
    ),
    "rescuer of dead clients": Case(
        _rescuer_of_dead,
        "river_job",
        "UPDATE",
        _jobs(state="'running'", attempt="1", attempted_at="now()", attempted_by="array['gone']"),
        f"{JOBS} WHERE state = 'running'",
    ),
    "job cleaner": Case(_new(JobCleaner), "river_job", "DELETE", _jobs(**ENDED), JOBS),
    "job expirer": Case(
        _new(JobExpirer),
        "river_job",
        "UPDATE",
        _jobs(metadata="""'{"riverpy:expires_at": "2026-01-31T18:00:00.000000Z"}'"""),
        f"{JOBS} WHERE state = 'available'",
    ),
    "queue cleaner": Case(
        _new(QueueCleaner),
        "river_queue",
        "DELETE",
        _rows(
            "INSERT INTO river_queue (name, updated_at) SELECT 'q' || i, now() - interval '30 days'"
            " FROM generate_series(1, $1::int) AS i RETURNING name"
        ),
        "SELECT name FROM river_queue",
        "name",
    ),
    "execution cleaner": Case(
        _new(RunOnceKeyCleaner),
        "riverpy_exec",
        "DELETE",
        _rows(
            "INSERT INTO riverpy_exec (key, epoch, claimed_by, kept_until)"
            " SELECT 'k' || i, i, 'c', now() - interval '1 day'"
            " FROM generate_series(1, $1::int) AS i RETURNING key"
        ),
        "SELECT key FROM riverpy_exec",
        "key",
    ),
    "job count cleaner": Case(
        _new(JobCountCleaner),
        "riverpy_job_count",
        "DELETE",
        _rows(
            "INSERT INTO riverpy_job_count SELECT 60, now() - interval '2 days'"
            " - i * interval '1 minute', 'q', 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0"
            " FROM generate_series(1, $1::int) AS i RETURNING to_jsonb(started_at) #>> '{}'"
        ),
        "SELECT to_jsonb(started_at) #>> '{}' FROM riverpy_job_count WHERE seconds = 60",
        "started_at",
    ),
    "client cleaner": Case(
        _client_cleaner,
        "riverpy_client",
        "DELETE",
        _rows(
            "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
            " dead_after) SELECT 'c' || i, '{}', '{}', true, false, '1', '1s'"
            " FROM generate_series(1, $1::int) AS i RETURNING client_id"
        ),
        "SELECT client_id FROM riverpy_client",
        "client_id",
    ),
}
SETTINGS: dict[str, Any] = {
    "dead_after": timedelta(seconds=1),
    "retention_by_kind": {"kept": JobRetention(completed=timedelta(days=90))},
}
