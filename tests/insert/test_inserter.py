"""The rows and results of inserts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from riverpy._insert.row import InsertSettings, RowTemplates, prepare_row, prepare_rows
from riverpy.insert_opts import InsertManyParams, InsertOpts, UniqueOpts
from riverpy.job import JobState, RawArgs
from riverpy.migrate import Migrator
from tests._database import connected
from tests.insert.conftest import inserter_on
from tests.insert.jobs import BY_ARGS, OWN, Choosy, Data, Welcome, many

if TYPE_CHECKING:
    from riverpy._insert.inserter import Inserter
    from tests._database import Schema

NOW = datetime(2026, 3, 15, 14, 27, 41, tzinfo=UTC)
RULES = InsertSettings(default_max_attempts=7)
ROWS = json.loads(Path(__file__).parents[1].joinpath("vectors", "rows.json").read_text("utf-8"))[
    "jobs"
]
UNIQUE = UniqueOpts(by_args=True)
FROM_VECTORS = {
    "unique by args+queue, available": UniqueOpts(by_args=True, by_queue=True),
    "unique, inserted after same-key job was cancelled": UNIQUE,
    "unique (required states only), same key": UniqueOpts(
        by_args=True,
        by_state=[
            JobState.AVAILABLE,
            JobState.PENDING,
            JobState.RUNNING,
            JobState.SCHEDULED,
        ],
    ),
    "inserted with InsertManyFast": None,
    "scheduled (+1h)": None,
}
TEXTS = (
    "SELECT args::text, attempt::text, attempted_at::text, attempted_by::text, errors::text,"
    " finalized_at::text, kind, max_attempts::text, metadata::text, priority::text, queue,"
    " state::text, tags::text, unique_key::text, unique_states::text FROM river_job WHERE id = $1"
)


async def test_defaults(inserter: Inserter, schema: Schema) -> None:
    """Without options the row has River's defaults. The result equals the row."""
    result = await inserter.insert(Welcome(1, "<x>"), None, tx=None)
    job = result.job
    assert not result.unique_skipped_as_duplicate
    assert (job.kind, job.queue, job.priority, job.max_attempts) == ("welcome", "default", 1, 25)
    assert (job.state, job.attempt, job.tags, job.metadata) == (JobState.AVAILABLE, 0, [], {})
    assert (job.attempted_at, job.attempted_by, job.errors) == (None, [], [])
    assert (job.finalized_at, job.unique_key, job.unique_states) == (None, None, None)
    assert json.loads(job.encoded_args) == {"user_id": 1, "note": "<x>"}
    (row,) = await schema.jobs()
    assert row["id"] == job.id
    assert row["created_at"] == row["scheduled_at"] == job.created_at == job.scheduled_at
    assert row["attempted_by"] is row["errors"] is row["unique_key"] is row["unique_states"] is None


def test_batch_rows_equal_single_rows() -> None:
    """A job has the same row in a batch as alone, even if earlier jobs of its class have other
    options or another kind."""

    class Own(dict[str, int]):
        kind: ClassVar[str] = "own"

    class Other(Own):
        kind: ClassVar[str] = "other"

    choosy = Own(n=5)
    choosy.insert_opts = lambda: InsertOpts(queue="own")  # type: ignore[attr-defined]
    high, tagged = InsertOpts(priority=1, metadata={"a": 1}), InsertOpts(priority=4, tags=["tag"])
    unique = InsertOpts(unique_opts=UNIQUE)
    later = InsertOpts(scheduled_at=NOW + timedelta(hours=1))
    jobs = [
        InsertManyParams(args, opts)
        for _ in range(2)
        for opts in (None, high, tagged, unique, later)
        for args in (Own(n=1), choosy, Own(n=2), Other(n=3), RawArgs("raw_1", "{}"))
    ]
    jobs += [InsertManyParams(RawArgs("raw_2", '{"n": 4}'), high)]
    jobs += [InsertManyParams(Own(n=n), InsertOpts(priority=n)) for n in (1, 2, 3, 4)]
    alone = [prepare_row(job.args, job.opts, settings=RULES, now=NOW) for job in jobs]
    templates = RowTemplates()
    for _ in range(2):
        rows = prepare_rows(iter(jobs), settings=RULES, now=NOW, templates=templates)
        assert rows == alone
    assert templates.make_row(Own(n=1)) == alone[0]
    Own.kind = "renamed"
    assert templates.make_row(Own(n=1)) is None
    assert {row.kind for row in alone} == {"own", "other", "raw_1", "raw_2"}
    assert {row.queue for row in alone} == {"default", "own"}


async def test_times_are_server_times(inserter: Inserter, schema: Schema) -> None:
    """created_at and scheduled_at are the server's time of the transaction. The local clock does
    not matter."""
    async with schema.connected() as tx, tx.transaction():
        now = await tx.fetchval("SELECT now()")
        result = await inserter.insert(Welcome(1), None, tx=tx)
        await inserter.insert_many_fast(many(Welcome(2)), tx=tx)
        assert result.job.created_at == result.job.scheduled_at == now
    for row in await schema.jobs():
        assert row["created_at"] == row["scheduled_at"] == now


@pytest.mark.parametrize("scenario", FROM_VECTORS)
async def test_rows_equal_rivers(inserter: Inserter, schema: Schema, scenario: str) -> None:
    """The columns of an inserted job equal those of River in Go, except for ids and times."""
    (expected,) = [job["row"] for job in ROWS if job["scenario"].startswith(scenario)]
    params = InsertManyParams(
        RawArgs(expected["kind"], expected["args"]),
        InsertOpts(
            queue=expected["queue"],
            tags=[tag for tag in expected["tags"].strip("{}").split(",") if tag],
            scheduled_at=NOW if "scheduled" in scenario else None,
            unique_opts=FROM_VECTORS[scenario],
        ),
    )
    if "Fast" in scenario:
        await inserter.insert_many_fast([params], tx=None)
    else:
        await inserter.insert_many([params], tx=None)
    (job,) = await schema.jobs()
    row = await schema.fetchrow(TEXTS, job["id"])
    assert row is not None
    assert dict(row) == {column: expected[column] for column in row.keys()}  # noqa: SIM118
    assert set(expected) - set(row.keys()) == {"id", "created_at", "scheduled_at"}


async def test_copied_rows_equal_inserted_rows(inserter: Inserter, schema: Schema) -> None:
    """insert_many_fast stores the same rows as insert_many, for all characters."""
    odd = "a\tb\nc\rd\\e\"f\\N\\.é\u2028\U0001f600\b\x7f{},'<&>"
    opts = [
        InsertOpts(metadata={odd: [odd, 1.5]}, tags=["null", "NULL", "a_-b"]),
        InsertOpts(priority=4, max_attempts=32767, queue="a|b", pending=True),
        InsertOpts(scheduled_at=datetime(1, 1, 1, tzinfo=UTC)),
        InsertOpts(scheduled_at=datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
        InsertOpts(unique_opts=UniqueOpts(by_args=True, by_queue=True)),
    ]
    params = [InsertManyParams(Data({odd: odd}), one) for one in opts]
    await inserter.insert_many(params, tx=None)
    slow = [(await schema.fetchrow(TEXTS, job["id"]), job) for job in await schema.jobs()]
    await schema.execute("DELETE FROM river_job")
    assert await inserter.insert_many_fast(params, tx=None) == 5
    fast = [(await schema.fetchrow(TEXTS, job["id"]), job) for job in await schema.jobs()]
    assert [texts for texts, _ in slow] == [texts for texts, _ in fast]
    assert [job["scheduled_at"] for _, job in slow][2:4] == [
        job["scheduled_at"] for _, job in fast
    ][2:4]
    for _, job in fast:
        assert job["scheduled_at"] == job["created_at"] or job["state"] == "scheduled"
    assert json.loads(fast[0][1]["args"]) == {odd: odd}
    assert fast[0][1]["tags"] == ["null", "NULL", "a_-b"]


def test_precedence_of_options() -> None:
    """Options have this precedence: call, args class, client, default. Tags are not merged."""
    own = prepare_row(Choosy(), None, settings=RULES, now=NOW)
    assert (own.max_attempts, own.priority, own.queue, own.tags) == ("3", "2", "own", "own-tag")
    assert own.unique_key is not None
    call = prepare_row(
        Choosy(),
        InsertOpts(
            max_attempts=9,
            priority=4,
            queue="call",
            tags=[],
            unique_opts=UniqueOpts(by_args=True),
        ),
        settings=RULES,
        now=NOW,
    )
    assert (call.max_attempts, call.priority, call.queue, call.tags) == ("9", "4", "call", "")
    assert call.unique_key != own.unique_key
    bare = prepare_row(Welcome(1), None, settings=RULES, now=NOW)
    assert (bare.max_attempts, bare.priority, bare.queue, bare.tags) == ("7", "1", "default", "")
    empty = InsertOpts(unique_opts=UniqueOpts())
    assert prepare_row(Choosy(), empty, settings=RULES, now=NOW).unique_key == own.unique_key


def test_args_class_cannot_set_metadata_or_pending() -> None:
    """An args class cannot set metadata or pending."""
    own = prepare_row(Choosy(), None, settings=RULES, now=NOW)
    assert (own.metadata, own.state) == ("{}", "available")
    call = InsertOpts(metadata={"b": 1, "a": "<"}, pending=True)
    row = prepare_row(Choosy(), call, settings=RULES, now=NOW)
    assert (row.metadata, row.state) == (r'{"a":"\u003c","b":1}', "pending")


@pytest.mark.parametrize(
    ("opts", "state"),
    [
        (InsertOpts(), "available"),
        (InsertOpts(scheduled_at=datetime(2200, 1, 1, tzinfo=UTC)), "scheduled"),
        (InsertOpts(scheduled_at=datetime(2000, 1, 1, tzinfo=UTC)), "scheduled"),
        (InsertOpts(pending=True), "pending"),
        (InsertOpts(pending=True, scheduled_at=datetime(2200, 1, 1, tzinfo=UTC)), "pending"),
    ],
)
async def test_states(inserter: Inserter, opts: InsertOpts, state: str) -> None:
    """A job with a time, even a past one, is scheduled. `pending` takes precedence and keeps the
    time."""
    job = (await inserter.insert(Welcome(1), opts, tx=None)).job
    assert job.state == state
    assert job.scheduled_at == (opts.scheduled_at or job.created_at)


async def test_scheduled_at_in_any_zone(inserter: Inserter) -> None:
    """scheduled_at is stored as the same instant, to the microsecond, for every time zone."""
    time = datetime(2027, 3, 28, 2, 30, 0, 123456, timezone(timedelta(hours=5, minutes=45)))
    job = (await inserter.insert(Welcome(1), InsertOpts(scheduled_at=time), tx=None)).job
    assert job.scheduled_at == time
    assert job.scheduled_at.tzinfo is UTC


async def test_results_are_in_the_order_of_the_input(inserter: Inserter) -> None:
    """Results are in the order of the input, even if the rows are sent in another order (BI-08)."""
    params = [
        InsertManyParams(
            Welcome(number),
            InsertOpts(
                priority=number % 4 + 1,
                unique_opts=UniqueOpts(by_args=True) if number % 3 else None,
            ),
        )
        for number in range(200)
    ]
    results = await inserter.insert_many(params, tx=None)
    assert [json.loads(r.job.encoded_args)["user_id"] for r in results] == list(range(200))
    assert [r.job.priority for r in results] == [number % 4 + 1 for number in range(200)]
    assert [r.job.unique_key is None for r in results] == [number % 3 == 0 for number in range(200)]


async def test_more_jobs_than_a_statement_has_parameters(
    inserter: Inserter, schema: Schema
) -> None:
    """One call inserts 50,000 jobs in order, or none of them (BI-08)."""
    jobs = [Welcome(number) for number in range(50_000)]
    bad = [*many(*jobs[:-1]), InsertManyParams(Data(x=float("nan")))]
    with pytest.raises(ValueError, match="nan"):
        await inserter.insert_many(bad, tx=None)
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 0
    results = await inserter.insert_many(many(*jobs), tx=None)
    ids = [result.job.id for result in results]
    assert ids == sorted(set(ids))
    assert json.loads(results[49_999].job.encoded_args)["user_id"] == 49_999
    assert await schema.fetchval("SELECT count(*) FROM river_job") == 50_000


async def test_five_megabytes_of_args(inserter: Inserter, schema: Schema) -> None:
    """Args of 5 MB are stored unchanged, by insert and by COPY (BI-07)."""
    big = Data(text="é" * 2_600_000 + "<")
    await inserter.insert(big, None, tx=None)
    await inserter.insert_many_fast(many(big), tx=None)
    for row in await schema.jobs():
        assert json.loads(row["args"]) == big


async def test_options_are_not_changed(inserter: Inserter) -> None:
    """Inserts do not change the options. Callers may reuse or change them (TY-09)."""
    metadata: dict[str, Any] = {"n": 1}
    tags = ["one"]
    opts = InsertOpts(metadata=metadata, tags=tags)
    first = (await inserter.insert(Welcome(1), opts, tx=None)).job
    metadata["n"] = 2
    tags.append("two")
    first.metadata["n"] = 3
    first.tags.append("three")
    second = (await inserter.insert(Welcome(1), opts, tx=None)).job
    assert (first.metadata, first.tags) == ({"n": 1}, ["one"])
    assert (second.metadata, second.tags) == ({"n": 2}, ["one", "two"])
    for _ in range(100):
        other = (await inserter.insert(Choosy(), None, tx=None)).job
        assert (other.metadata, other.tags) == ({}, ["own-tag"])
        other.tags.append("more")
    assert OWN.tags == ["own-tag"]


async def test_a_schema_that_needs_quotes(fresh_database_url: str) -> None:
    """All names are qualified and quoted: an insert works with an empty search path."""
    async with connected(fresh_database_url) as conn:
        await conn.execute('CREATE SCHEMA "MixedCase_1"')
        await Migrator(conn, schema="MixedCase_1").up()
        async with inserter_on(fresh_database_url, "MixedCase_1", search_path="") as inserter:
            await inserter.insert(Welcome(1), BY_ARGS, tx=None)
            again = await inserter.insert(Welcome(1), BY_ARGS, tx=None)
            assert again.unique_skipped_as_duplicate
            mixed = [*many(Welcome(2)), InsertManyParams(Welcome(3), BY_ARGS)]
            await inserter.insert_many(mixed, tx=None)
            assert await inserter.insert_many_fast(many(Welcome(4)), tx=None) == 1
        assert await conn.fetchval('SELECT count(*) FROM "MixedCase_1".river_job') == 4


async def test_the_search_path_decides_without_a_schema(schema: Schema) -> None:
    """Without a schema setting, jobs are inserted into the table that the search path finds."""
    async with inserter_on(schema.url, None, search_path=schema.name) as inserter:
        await inserter.insert(Welcome(1), None, tx=None)
        await inserter.insert_many_fast(many(Welcome(1)), tx=None)
    assert len(await schema.jobs()) == 2
