"""Lists of jobs: filters, orders, pages and cursors, against a plain sort in Python."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import (
    Client,
    Config,
    ConfigError,
    JobDamagedError,
    JobFilters,
    JobOrder,
    JobState,
)
from riverpy._calls.job_cursor import (
    JobPosition,
    decode_cursor,
    encode_cursor,
    format_postgres_time,
)
from riverpy._timestamps import encode_timestamp
from tests.kit.damaged_rows import DAMAGE, damage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tests._database import Schema

# Times repeat, so that ids decide. Some jobs have no time of an attempt. Three times are outside of
# Python's years.
FILL = """
INSERT INTO river_job (id, state, kind, queue, priority, max_attempts, args, metadata, tags,
  scheduled_at, attempted_at, finalized_at, errors)
SELECT i, state::river_job_state, 'kind' || i % 3, 'queue' || i % 2, 1 + i % 4, 25,
  jsonb_build_object('n', i % 9, 'x', 1),
  CASE WHEN i % 5 = 0 THEN '{"tenant": {"name": "a", "id": 1}}' ELSE '{}' END::jsonb,
  CASE i % 4 WHEN 0 THEN '{red}' WHEN 1 THEN '{red,blue}' ELSE '{}' END::text[],
  CASE WHEN i = 7 THEN 'infinity' WHEN i = 8 THEN '20000-01-01Z'
    ELSE timestamptz '2026-01-01Z' + i / 6 * interval '1 hour' END,
  CASE WHEN i % 16 > 7 THEN timestamptz '2026-01-02 00:00:00.123450Z' + i / 12 * interval '1 hour'
  END,
  CASE WHEN state IN ('cancelled', 'completed', 'discarded')
    THEN CASE WHEN i = 12 THEN 'infinity'
      ELSE timestamptz '2026-01-03Z' + i * 7 % 48 / 16 * interval '1 hour' END END,
  CASE WHEN i % 6 = 0
    THEN ARRAY['{"error": "first"}', '{"error": "the 100% _last_ one"}']::jsonb[]
    WHEN i % 7 = 0 THEN ARRAY['{"error": "last"}', '[1]']::jsonb[] END
FROM (
  SELECT i, (enum_range(NULL::river_job_state))[1 + i % 8]::text AS state
  FROM generate_series(1, 48) AS i
) AS numbered
"""
TIMES = """
SELECT id, extract(epoch FROM scheduled_at)::float8 AS scheduled_at,
  extract(epoch FROM attempted_at)::float8 AS attempted_at,
  extract(epoch FROM finalized_at)::float8 AS finalized_at
FROM river_job
"""
FINAL = [JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED]
WAITING = [state for state in JobState if state not in {*FINAL, JobState.RUNNING}]


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client of a table of 48 jobs in all states."""
    await schema.execute(FILL)
    async with Client(schema.url, config=Config(schema=schema.name, pool_size=1)) as client:
        yield client


async def ids(client: Client, **filters: Any) -> list[int]:
    """Return the ids of the first page."""
    return [job.id for job in (await client.job_list(**filters)).jobs]


async def test_filters(client: Client) -> None:
    """Each filter alone, and all together, list exactly the jobs that pass; whole rows are
    returned."""
    jobs = {job.id: job for job in (await client.job_list()).jobs}
    assert list(jobs) == list(range(1, 49))
    assert jobs[9].get_encoded_values() == tuple((await client.job_get(9)).get_encoded_values())
    cases: list[tuple[JobFilters, list[int]]] = [
        ({"ids": [30, 2, 2, 999]}, [2, 30]),
        ({"kinds": ["kind1", "none"]}, [i for i in jobs if i % 3 == 1]),
        ({"queues": ["queue0"]}, [i for i in jobs if i % 2 == 0]),
        ({"priorities": [1, 4]}, [i for i in jobs if i % 4 in {0, 3}]),
        (
            {"states": ["running", JobState.PENDING]},
            [i for i in jobs if jobs[i].state in {"running", "pending"}],
        ),
        ({"tags_all": ["blue", "red"]}, [i for i in jobs if i % 4 == 1]),
        ({"tags_any": ["blue", "red"]}, [i for i in jobs if i % 4 < 2]),
        ({"metadata": {"tenant": {"name": "a"}}}, [i for i in jobs if i % 5 == 0]),
        ({"args": {"n": 2}}, [i for i in jobs if i % 9 == 2]),
        ({"error": "% _last_"}, [i for i in jobs if i % 6 == 0]),
        ({"error": "first"}, []),
        ({"error": "Last"}, []),
    ]
    for filters, expected in cases:
        assert await ids(client, **filters) == expected, filters
        assert await client.job_count(**filters) == len(expected)
    together: JobFilters = {
        "ids": list(jobs),
        "kinds": ["kind0"],
        "queues": ["queue0"],
        "priorities": [3],
        "states": list(JobState),
        "tags_any": ["red", "green"],
        "tags_all": ["red"],
        "metadata": {"tenant": {}},
        "error": "one",
    }
    assert await ids(client, **together) == []
    del together["priorities"]
    assert await ids(client, **together) == []
    del together["metadata"]
    assert await ids(client, **together) == [12, 24, 36, 48]
    assert await client.job_count() == 48


async def test_order_and_pages(client: Client, schema: Schema) -> None:
    """Pages of every size join to the whole list, in each order, also with equal, empty and very
    late times, and each continues behind a job. The reverse order is the exact reverse (CF-103,
    PF-09)."""
    times = {row["id"]: dict(row) for row in await schema.fetch(TIMES)}
    states = {job.id: job.state for job in (await client.job_list()).jobs}
    cases: list[tuple[JobOrder, Sequence[JobState], str]] = [
        ("id", [], "id"),
        ("scheduled_at", [], "scheduled_at"),
        ("scheduled_at", WAITING, "scheduled_at"),
        ("time", [], "scheduled_at"),
        ("time", [JobState.PENDING, JobState.RUNNING], "scheduled_at"),
        ("time", [JobState.RUNNING, JobState.PENDING, JobState.COMPLETED], "attempted_at"),
        ("time", [JobState.DISCARDED, JobState.RUNNING, JobState.PENDING], "finalized_at"),
        ("time", FINAL, "finalized_at"),
        ("finalized_at", [], "finalized_at"),
        ("finalized_at", [JobState.COMPLETED], "finalized_at"),
    ]
    for order, listed, field in cases:
        shown = listed or (FINAL if order == "finalized_at" else list(JobState))

        def key(job_id: int, field: str = field) -> tuple[bool, float, int]:
            time = times[job_id][field]
            return time is None, time or 0, job_id

        expected = sorted((i for i in states if states[i] in shown), key=key)
        filters: Any = {"order_by": order, **({"states": listed} if listed else {})}
        extra = {"metadata": {"tenant": {"id": 1}}}
        narrow = [i for i in expected if i % 5 == 0]
        for descending in (False, True):
            step = -1 if descending else 1
            wanted, few = expected[::step], narrow[::step]
            assert await ids(client, **filters, descending=descending) == wanted
            for size in (2, 5):
                found = client.jobs(**filters, descending=descending, page_size=size)
                assert [job.id async for job in found] == wanted, (order, listed, size)
            found = client.jobs(**filters, **extra, descending=descending, page_size=2)
            assert [job.id async for job in found] == few
            job = await client.job_get(wanted[len(wanted) // 2])
            behind = await ids(client, **filters, descending=descending, after=job)
            assert behind == wanted[len(wanted) // 2 + 1 :], (order, listed)


async def test_cursor_without_a_time_in_an_order_by_time(client: Client) -> None:
    """An absent time in a cursor means the jobs without a time if there can be any, and otherwise
    that the ids alone decide, as in River."""

    def cursor(order: JobOrder) -> str:
        return encode_cursor(JobPosition(order, 24, "k", "q", None))

    assert await ids(client, order_by="scheduled_at", after=cursor("scheduled_at")) == [
        *(i for i in range(25, 49))
    ]
    running = await ids(client, order_by="time", states=["running"])
    last = (await client.job_list(order_by="time", states=["running"])).cursor
    assert last is not None
    assert len(running) == 6
    assert await ids(client, order_by="time", states=["running"], after=last) == []
    ended = await ids(client, order_by="finalized_at", after=cursor("finalized_at"))
    assert ended == [i for i in await ids(client, order_by="finalized_at") if i > 24]


async def test_page_in_a_transaction(client: Client, schema: Schema) -> None:
    """With `tx`, a list shows what the transaction wrote. Without it, no connection is held between
    two pages, and the end of the loop leaves none open."""
    async with schema.connected() as tx:
        await tx.execute("BEGIN")
        await tx.execute("DELETE FROM river_job WHERE id > 2")
        assert await ids(client, tx=tx) == [1, 2]
        assert [job.id async for job in client.jobs(page_size=1, tx=tx)] == [1, 2]
        assert await client.job_count(tx=tx) == 2
    seen: list[int] = []
    async for job in client.jobs(page_size=7):  # the pool has one connection
        seen.append(job.id)
        await client.job_get(job.id)
        if job.id == 20:
            break
    assert seen == list(range(1, 21))
    empty = await client.job_list(kinds=["none"])
    assert (empty.jobs, empty.cursor, empty.damaged) == ([], None, {})


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ({"kinds": "welcome"}, "kinds must be a list of values, got str: write kinds"),
        ({"kinds": []}, "kinds is empty: leave it out"),
        ({"kinds": [b"x"]}, "kinds takes texts"),
        ({"kinds": [""]}, "kinds takes texts that are not empty"),
        ({"kinds": ["a\0"]}, r"no job has the character '\\x00'"),
        ({"queues": 5}, "queues must be a list of values, got int"),
        ({"states": ["done"]}, "states takes available, cancelled, .* got 'done'"),
        ({"states": [None]}, "states takes"),
        ({"priorities": [0]}, "priorities takes whole numbers from 1 to 4, got 0"),
        ({"priorities": [True]}, "priorities takes whole numbers"),
        ({"ids": ["7"]}, "ids takes whole numbers"),
        ({"ids": [2**63]}, "ids takes whole numbers"),
        ({"tags_any": [["a"]]}, "tags_any has a value that is no single value"),
        ({"kinds": ["k"] * 10_001}, "kinds has at most 10,000 values, got 10,001"),
        ({"metadata": {}}, "metadata is empty"),
        ({"metadata": "{}"}, "metadata must be an object, got str"),
        ({"metadata": {"a": float("nan")}}, r"metadata\.a"),
        ({"error": ""}, "error takes texts that are not empty"),
        ({"error": ["x"]}, "error takes texts"),
        ({"state": ["running"]}, "there is no filter 'state': the filters are ids, kinds"),
        ({"limit": 0}, "limit must be a whole number from 1 to 10,000, got 0"),
        ({"limit": 10_001}, "limit must be"),
        ({"limit": True}, "limit must be"),
        ({"order_by": "kind"}, "order_by must be one of 'id', 'time'"),
        ({"order_by": "finalized_at", "states": ["completed", "running"]}, "got running"),
        ({"after": 5}, "a cursor must be a string, got int"),
    ],
)
async def test_refusals(filters: dict[str, Any], text: str) -> None:
    """What is not allowed is refused with one clear error before anything is sent: the client is
    not open (CF-030)."""
    client = Client("postgres://nowhere")
    with pytest.raises(ValueError, match=text):
        await client.job_list(**filters)
    if "limit" not in filters:
        with pytest.raises(ValueError, match=text):
            client.jobs(**filters)
    with pytest.raises(ConfigError, match="page_size must be"):
        client.jobs(page_size=0)


# -- damaged rows


async def test_pages_beside_damaged_rows(client: Client, schema: Schema) -> None:
    """A page names the jobs that the server cannot read, and lists the others. A loop over all jobs
    raises an error with their ids at its end. A filter that reads a damaged value fails by name."""
    await damage(schema, 9, "metadata")
    await damage(schema, 12, "errors")
    page = await client.job_list(limit=6, after=(await client.job_list(limit=7)).cursor)
    assert [job.id for job in page.jobs] == [8, 10, 11, 13]
    assert {job_id: DAMAGE in error for job_id, error in page.damaged.items()} == {
        9: True,
        12: True,
    }
    async with schema.connected() as tx, tx.transaction():
        assert (await client.job_list(limit=12, descending=True, after=page.cursor, tx=tx)).damaged
        assert await client.job_count(tx=tx) == 48
    seen: list[int] = []

    async def read_all() -> None:
        async for job in client.jobs(page_size=3):
            seen.append(job.id)  # noqa: PERF401 (the loop fails at its end)

    with pytest.raises(JobDamagedError, match="jobs 9, 12 "):
        await read_all()
    assert seen == [i for i in range(1, 49) if i not in {9, 12}]
    with pytest.raises(JobDamagedError, match="a filter on metadata or errors"):
        await client.job_list(error="x")
    with pytest.raises(JobDamagedError, match="so nothing was deleted"):
        await client.job_delete_many(ids=[8, 9])


# -- cursors

GO_CURSORS = {
    "eyJpZCI6MTE1LCJraW5kIjoiYVx1MDAzY1x1MDAzZVx1MDAyNn5-fiIsInF1ZXVlIjoiZGVmYXVsdCIsInNvcnRfZmllbG"
    "QiOiJpZCIsInRpbWUiOiIwMDAxLTAxLTAxVDAwOjAwOjAwWiJ9": JobPosition(
        "id", 115, "a<>&~~~", "default", None
    ),
    "eyJpZCI6MTE1LCJraW5kIjoiYVx1MDAzY1x1MDAzZVx1MDAyNn5-fiIsInF1ZXVlIjoiZGVmYXVsdCIsInNvcnRfZmllbG"
    "QiOiJ0aW1lIiwidGltZSI6IjIwMjYtMDItMDNUMDQ6MDU6MDYuMDdaIn0=": JobPosition(
        "time",
        115,
        "a<>&~~~",
        "default",
        encode_timestamp(datetime(2026, 2, 3, 4, 5, 6, 70_000, tzinfo=UTC)),
    ),
}


def cursor_text(**members: object) -> str:
    """Return a cursor with these members."""
    return urlsafe_b64encode(json.dumps(members).encode()).decode()


def test_cursor_texts() -> None:
    """Cursors have River's text, byte for byte. Both alphabets of base64 are read, with or without
    padding, and unknown keys are ignored (CF-102)."""
    for text, position in GO_CURSORS.items():
        assert encode_cursor(position) == text
        time = None if position.sort_time is None else format_postgres_time(position.sort_time)
        plain = b64encode(b64decode(text, altchars=b"-_")).decode()
        for form in {text, plain, text.rstrip("="), plain.rstrip("=")}:
            assert decode_cursor(form, position.order) == (115, time)
    text = cursor_text(id=2**63 - 1, sort_field="id", time="0001-01-01T00:00:00Z", other=[1])
    assert decode_cursor(text, "id") == (2**63 - 1, None)
    assert decode_cursor(cursor_text(id=1, sort_field="id"), "id") == (1, None)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("2026-02-03T04:05:06.123456789Z", "2026-02-03T04:05:06.123456Z"),
        ("2026-02-03T04:05:06+02:30", "2026-02-03T01:35:06Z"),
        ("2026-02-03T23:05:06.5-02:00", "2026-02-04T01:05:06.5Z"),
        ("0001-01-01T00:00:00+01:00", "0001-12-31T23:00:00Z BC"),
    ],
)
async def test_cursor_times(schema: Schema, given: str, same: str) -> None:
    """A time of a cursor is read with its offset, and cut to microseconds. PostgreSQL gets the same
    time, whatever the settings of the session."""
    read = decode_cursor(cursor_text(id=1, sort_field="time", time=given), "time")
    await schema.execute("SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'SQL, DMY'")
    equal = "SELECT $1::text::timestamptz = $2::text::timestamptz"
    assert await schema.fetchval(equal, read.sort_time, same)
    await schema.execute("RESET TimeZone; RESET DateStyle")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not base64 of a JSON object"),
        ("é", "not base64"),
        ("e30", "`id` is not an integer"),
        ("WzFd", "not base64 of a JSON object"),
        ("A" * 9000, "more than 8192 characters"),
        (cursor_text(id=1.5, sort_field="id"), "`id` is not"),
        (cursor_text(id=True, sort_field="id"), "`id` is not"),
        (cursor_text(id="1", sort_field="id"), "`id` is not"),
        (cursor_text(id=2**63, sort_field="id"), "`id` is not"),
        (cursor_text(id=1), "`sort_field` is not one of id, time"),
        (cursor_text(id=1, sort_field=["id"]), "`sort_field` is not one of"),
        (cursor_text(id=1, sort_field="time"), "ordered by time, not by id"),
        (cursor_text(id=1, sort_field="id", time="yesterday"), "`time` is not a time"),
        (cursor_text(id=1, sort_field="id", time="2026-13-01T00:00:00Z"), "`time` is not a time"),
        (cursor_text(id=1, sort_field="id", time="2026-01-01T00:00:00"), "`time` is not a time"),
        (cursor_text(id=1, sort_field="id", time=5), "`time` is not a time"),
    ],
)
def test_wrong_cursors(text: str, reason: str) -> None:
    """What is no cursor, or that of another order, is refused with the reason (CF-102)."""
    with pytest.raises(ConfigError, match=reason):
        decode_cursor(text, "id")
