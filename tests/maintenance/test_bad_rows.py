"""Rows that the database refuses or that are slow: they keep no service from its other rows."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._log_events import DAMAGED_JOB_SKIPPED, ROW_SET_ASIDE
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.damaged_rows import DAMAGE, damage
from tests.leading.term_context import held_term
from tests.maintenance.bad_rows import (
    CASES,
    REFUSALS,
    SETTINGS,
    refusing,
    registry,
    sleeping,
    triggered,
)
from tests.maintenance.rows import ENDED, ids_of, insert_ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._maintenance.base import MaintenanceService
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm
    from tests.maintenance.bad_rows import Case


@pytest.fixture
async def held(schema: Schema) -> AsyncGenerator[HeldTerm]:
    """A context with workers, and with jobs that are kept for long."""
    async with held_term(schema, workers=registry(), **SETTINGS) as held:
        yield held


async def passes(held: HeldTerm, service: MaintenanceService, count: int) -> None:
    """So many passes, as the service makes them: one that fails is tried again."""
    for _ in range(count):
        try:
            await held.run(service)
        except DATABASE_ERRORS:
            continue


async def until_done(held: HeldTerm, case: Case, service: MaintenanceService) -> None:
    """Passes until all rows are handled."""
    with anyio.fail_after(30):
        while await case.remaining(held.schema):
            case.batch_runner(service).skipped_rows.make_all_rows_due()
            await passes(held, service, 1)
            await anyio.sleep(0.02)


def named(log: list[dict[str, Any]]) -> list[str]:
    """The rows that the log names as set aside."""
    return [
        str(entry["row"])
        for entry in log
        if entry["event"] == ROW_SET_ASIDE and entry["log_level"] == "warning"
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_refused_rows(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]], case: Case
) -> None:
    """A row that the server refuses, with whatever class of error, stops no other one. It is named
    once, and handled when it is refused no more."""
    keys = await case.insert(schema, 60)
    bad = dict(zip(keys[5:50:5], REFUSALS, strict=True))
    service = await case.make(held)
    async with triggered(schema, case.table, case.operation, refusing(case, bad)):
        await passes(held, service, len(REFUSALS) + 1)
        assert await case.remaining(schema) == set(bad)
        for _ in range(2):
            case.batch_runner(service).skipped_rows.make_all_rows_due()
            await passes(held, service, len(REFUSALS))
    assert sorted(named(log)) == sorted(bad)
    await until_done(held, case, service)


@pytest.mark.parametrize(
    ("name", "count", "seconds"),
    [("scheduler", 600, 0.001), ("scheduler", 12, 0.1), *((name, 80, 0.01) for name in CASES)],
)
async def test_slow_rows(
    held: HeldTerm, schema: Schema, name: str, count: int, seconds: float
) -> None:
    """Rows that are too slow for one statement together are handled in smaller batches, whether
    each takes 1, 10 or 100 ms."""
    held.context.fence.transaction_timeout = timedelta(seconds=0.5)
    case = CASES[name]
    await case.insert(schema, count)
    service = await case.make(held)
    async with triggered(schema, case.table, case.operation, sleeping(case, seconds)):
        await until_done(held, case, service)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_row_slower_than_the_limit(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]], case: Case
) -> None:
    """A row that alone takes longer than the limit is set aside, named when it does so again, and
    stops no other one."""
    held.context.fence.transaction_timeout = timedelta(seconds=0.5)
    keys = await case.insert(schema, 40)
    service = await case.make(held)
    async with triggered(schema, case.table, case.operation, sleeping(case, 15, keys[7:8])):
        await passes(held, service, 1)
        assert await case.remaining(schema) == {keys[7]}
        case.batch_runner(service).skipped_rows.make_all_rows_due()
        await passes(held, service, 1)
    assert named(log) == [keys[7]]


@pytest.mark.parametrize("state", ENDED)
async def test_row_that_a_foreign_key_holds(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]], state: str
) -> None:
    """A job that a table of the application refers to stays, whatever its state; all other jobs are
    deleted, and the log names the constraint once (FR-03)."""
    ids = {one: await insert_ended(schema, one, "30 days", 50) for one in ENDED}
    await schema.execute(
        "CREATE TABLE invoice (job_id bigint NOT NULL CONSTRAINT invoice_job REFERENCES river_job)"
    )
    try:
        await schema.execute("INSERT INTO invoice VALUES ($1)", ids[state])
        service = JobCleaner(held.context)
        for _ in range(2):
            service.batch_runner.skipped_rows.make_all_rows_due()
            await held.run(service)
        assert await ids_of(schema) == {ids[state]}
        lines = [entry["error"] for entry in log if entry["log_level"] == "warning"]
        assert ["invoice_job" in line for line in lines] == [True]
    finally:
        await schema.execute("DROP TABLE invoice")


@pytest.mark.parametrize("column", ["args", "metadata", "errors", "attempted_by"])
@pytest.mark.parametrize("name", ["scheduler", "rescuer", "rescuer of dead clients", "job cleaner"])
async def test_damaged_rows(
    held: HeldTerm, schema: Schema, log: list[dict[str, Any]], name: str, column: str
) -> None:
    """A job with a column that the server cannot read keeps no other one from being handled. It is
    named, unless it can be handled all the same."""
    case = CASES[name]
    keys = await case.insert(schema, 30)
    await damage(schema, int(keys[7]), column)
    service = await case.make(held)
    for _ in range(3):
        case.batch_runner(service).skipped_rows.make_all_rows_due()
        if isinstance(service, JobRescuer):
            service.stuck_job_read_runner.skipped_rows.make_all_rows_due()
            service._next_stuck_job_search_at = 0.0
        await passes(held, service, 1)
    remaining = await case.remaining(schema)
    assert remaining <= {keys[7]}
    lines = [entry for entry in log if entry["event"] in (ROW_SET_ASIDE, DAMAGED_JOB_SKIPPED)]
    assert [str(line.get("row", line.get("job_id"))) for line in lines] == list(remaining)
    assert all(DAMAGE in line["error"] for line in lines)
