"""The job count cleaner: minutes become hours, old and surplus rows go, and the reads stay fast."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._maintenance.job_count_cleaner import RUN_INTERVAL, JobCountCleaner
from riverpy._postgres.job_counts import (
    QUEUES_PER_PERIOD_MAX,
    job_count_read_queue_time_steps,
    job_count_read_time_steps,
)
from riverpy._postgres.sql_files import get_query
from riverpy.errors import FencedOutError
from tests._database import connected
from tests.kit.large import PLAN_MODES, filling, large_database
from tests.leading.term_context import held_term

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests._database import Schema

ADD = """
INSERT INTO riverpy_job_count
SELECT {seconds}, date_trunc('{unit}', now(), 'UTC') + ({offset}), queue,
  2, 1, 1, 0, 3, {longest}, 1, 1, 0, 0, 0
FROM {queues} AS queue
"""
HOURS = "SELECT queue, attempts, wait_seconds, wait_max FROM riverpy_job_count WHERE seconds = 3600"


async def add(
    schema: Schema,
    offset: str,
    queues: str = "unnest(array['', 'aa'])",
    *,
    seconds: int = 60,
    longest: str = "2",
) -> None:
    """Add rows of a period. The offset from the current one, and the set of queues are SQL."""
    unit = "minute" if seconds == 60 else "hour"
    await schema.execute(
        ADD.format(seconds=seconds, unit=unit, offset=offset, queues=queues, longest=longest)
    )


async def test_periods(schema: Schema) -> None:
    """Minutes older than a day become part of their hour, and old hours are deleted, also those
    that a clock has put into the future. A second run, or one of a leader that began at the same
    time, changes nothing. Other rows stay."""
    await add(schema, "interval '-5 minutes'")
    await add(schema, "interval '-24 hours'")
    day = "date_trunc('hour', now(), 'UTC') - date_trunc('minute', now()) - interval '2 days'"
    for minute in range(0, 50, 2):
        await add(schema, f"{day} + interval '{minute} minutes'", longest=str(minute))
    await add(schema, f"{day} - interval '1 day'", "unnest(array['aa'])")
    await add(schema, "interval '-2 days'", "unnest(array['aa'])", seconds=3600)
    await add(schema, "interval '-9 days'", seconds=3600)
    await add(schema, "interval '30 years'")
    await add(schema, "interval '30 years'", seconds=3600)
    async with (
        held_term(schema) as held,
        held_term(schema, term=held.term) as other,
    ):
        first, second = JobCountCleaner(held.context), JobCountCleaner(other.context)
        stale = await second.read_periods_to_clean(None, 1000)
        assert await held.run(first) == RUN_INTERVAL
        rows = {tuple(row) for row in await schema.fetch(HOURS)}
        assert rows == {("", 50, 75.0, 48.0), ("aa", 52, 78.0, 48.0), ("aa", 2, 3.0, 2.0)}
        assert await schema.fetchval("SELECT count(*) FROM riverpy_job_count") == 3 + 4
        before = await schema.fetch("SELECT ctid, * FROM riverpy_job_count ORDER BY 1")
        await second.sum_up_or_delete_counts(stale)
        await other.run(second)
        await held.run(first)
        assert await schema.fetch("SELECT ctid, * FROM riverpy_job_count ORDER BY 1") == before
        await add(schema, "interval '-2 days'")
        await held.take_over()
        with pytest.raises(FencedOutError):
            await held.run(JobCountCleaner(held.context))
        assert await schema.fetchval("SELECT count(*) FROM riverpy_job_count") == 3 + 4 + 2


async def test_many_queues(schema: Schema) -> None:
    """A period with very many queues keeps the busiest ones, and the sum of the others."""
    many = "(SELECT '' AS queue UNION ALL SELECT 'q' || i FROM generate_series(1, 3000) AS i) AS q"
    await add(schema, "interval '-10 minutes'", f"(SELECT queue FROM {many})")
    await add(schema, "interval '-20 hours'", f"(SELECT queue FROM {many})", seconds=3600)
    await add(schema, "interval '0'", f"(SELECT queue FROM {many})")
    await schema.execute("UPDATE riverpy_job_count SET attempts = 9 WHERE queue = 'q77'")
    async with held_term(schema) as held:
        await held.run(JobCountCleaner(held.context))
    rows = await schema.fetch(
        "SELECT count(*)::int, sum(attempts) FILTER (WHERE queue <> '')::int,"
        " sum(attempts) FILTER (WHERE queue = '*')::int, max(attempts) FILTER (WHERE queue = 'q77')"
        " FROM riverpy_job_count GROUP BY seconds, started_at ORDER BY 1"
    )
    limited = (QUEUES_PER_PERIOD_MAX + 2, 6007, 2 * (3000 - QUEUES_PER_PERIOD_MAX), 9)
    assert [tuple(row) for row in rows] == [limited, limited, (3001, 6007, None, 9)]


async def test_missing_table(schema: Schema) -> None:
    """Without the table the service does nothing."""
    await schema.execute("ALTER TABLE riverpy_job_count RENAME TO moved")
    try:
        async with held_term(schema) as held:
            assert await held.run(JobCountCleaner(held.context)) == RUN_INTERVAL
    finally:
        await schema.execute("ALTER TABLE moved RENAME TO riverpy_job_count")


# -- reads


async def test_reads(schema: Schema) -> None:
    """A read returns all steps of a range up to now, with sums of their minutes. An hour is the sum
    of its row and of the minutes that are left of it."""
    await add(schema, "interval '-3 minutes'")
    await add(schema, "interval '-3 hours'", seconds=3600, longest="5")
    hour = "date_trunc('hour', now(), 'UTC') - date_trunc('minute', now()) - interval '3 hours'"
    await add(schema, hour)
    await add(schema, f"{hour} + interval '59 minutes'")
    connection = schema.connection
    for step, steps, expected in (
        (60, 60, {3: (2, 2.0)}),
        (3600, 168, {3: (6, 5.0)}),
        (3600, 2, {}),
    ):
        found = await job_count_read_time_steps(
            connection, schema.name, queue="aa", step_seconds=step, steps=steps
        )
        now = await schema.fetchval("SELECT extract(epoch FROM now())::bigint")
        assert len(found) == steps
        assert [one.started_at % step for one in found] == [0] * steps
        assert now - step <= found[-1].started_at <= now
        # The recent minute is in the current or last hour.
        counted = {
            place: (one.counts.attempts, one.counts.wait_max)
            for place, one in enumerate(reversed(found))
            if one.counts.attempts and (step == 60 or place > 1)
        }
        assert counted in (expected, {place + 1: one for place, one in expected.items()})
        assert found[0].counted_since is not None
        assert found[0].counted_since <= now - 3 * 3600
    read = await job_count_read_queue_time_steps(
        connection, schema.name, queues=["aa", "bb"], step_seconds=300, rows_max=10
    )
    assert [(one.queue, one.attempts, one.failed) for one in read] == [("aa", 2, 1)]


async def fill(url: str) -> None:
    """As many rows as the table can have: 200 queues in each minute of a day and hour of a week."""
    async with filling(url) as connection:
        await connection.execute(
            "ALTER TABLE riverpy_job_count DROP CONSTRAINT riverpy_job_count_pkey;"
            "ALTER TABLE riverpy_job_count SET UNLOGGED"
        )
        await connection.execute(
            "INSERT INTO riverpy_job_count"
            " SELECT 60, date_trunc('minute', now()) - i * interval '1 minute',"
            "  CASE WHEN q > 0 THEN 'queue_' || q ELSE '' END, 5, 4, 1, 0, 1.5, 1, 1, 0, 0, 0, 0"
            " FROM generate_series(0, 1499) AS i, generate_series(0, 200) AS q;"
            "INSERT INTO riverpy_job_count"
            " SELECT 3600, date_trunc('hour', now(), 'UTC') - i * interval '1 hour',"
            "  CASE WHEN q > 0 THEN 'queue_' || q ELSE '' END, 5, 4, 1, 0, 1.5, 1, 1, 0, 0, 0, 0"
            " FROM generate_series(25, 191) AS i, generate_series(0, 200) AS q"
        )
        await connection.execute(
            "ALTER TABLE riverpy_job_count ADD PRIMARY KEY (seconds, started_at, queue)"
        )
        await connection.execute("VACUUM ANALYZE riverpy_job_count")


@pytest.fixture(scope="module")
def large_url(server_url: str) -> Generator[str]:
    """A database with many counts."""
    with large_database(server_url, fill) as url:
        yield url


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all nodes of a plan."""
    return [plan, *(one for part in plan.get("Plans", ()) for one in nodes(part))]


@pytest.mark.parametrize("mode", PLAN_MODES)
async def test_plans(large_url: str, mode: str) -> None:
    """Beside a third of a million rows each read of the pages reads rows by their key only, and no
    more than it needs."""
    reads: list[tuple[str, str, int]] = [
        *(
            ("job_count_read", f"{step}, {steps}, 'queue_7'", rows)
            for step, steps, rows in ((60, 60, 60), (900, 96, 1440), (3600, 168, 1700))
        ),
        ("job_count_read_queues", "20000, 300, array['queue_1', 'queue_2']", 20_000),
    ]
    async with connected(large_url, plan_cache_mode=mode) as connection:
        for name, arguments, rows_max in reads:
            query = get_query("riverpy_job_count", name, None)
            await connection.execute(f"PREPARE reading AS {query.text}")
            (row,) = await connection.fetch(
                f"EXPLAIN (ANALYZE, TIMING OFF, BUFFERS, FORMAT JSON) EXECUTE reading({arguments})"
            )
            await connection.execute("DEALLOCATE reading")
            plan = json.loads(row[0])[0]["Plan"]
            scans = [one for one in nodes(plan) if one.get("Relation Name") == "riverpy_job_count"]
            assert {one["Node Type"] for one in scans} <= {
                "Index Scan",
                "Index Only Scan",
                "Bitmap Heap Scan",
            }
            assert sum(one["Actual Rows"] * one["Actual Loops"] for one in scans) <= rows_max + 2
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 8 * rows_max
