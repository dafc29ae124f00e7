"""The plans of frequent statements on a large table: the index that each uses, in both plan modes.

All tests here share one table of 200,000 finished jobs, so they run in one worker of xdist.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from starlette.datastructures import QueryParams

from riverpy._calls.job_filters import check_filters
from riverpy._calls.job_page import plan_page
from riverpy._dashboard import job_search
from riverpy._postgres.sql_files import Query, get_query, get_query_with_conditional_parts
from riverpy._tools.top.statements import set_statement_timeout
from tests._database import connected
from tests.kit.large import PLAN_MODES, filling, large_database

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Sequence

    import asyncpg

    from riverpy import JobFilters, JobOrder


pytestmark = pytest.mark.timeout(180)  # filling the table takes long on a busy machine
ROWS = 200_000
BACKLOG = 100_000


async def fill(url: str) -> None:
    """Insert 200,000 finished jobs, some thousands that wait, and a few that run."""
    async with filling(url) as connection:
        await connection.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, finalized_at, attempt, queue,"
            " attempted_at, attempted_by, scheduled_at)"
            " SELECT 'k' || i % 20, 25, '{}', 'completed', now() - make_interval(secs => i), 1,"
            " 'q' || i % 5, now() - make_interval(secs => i), array['c' || i % 10],"
            " now() - make_interval(secs => i)"
            f" FROM generate_series(1, {ROWS}) AS i"
        )
        await connection.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, queue, priority)"
            " SELECT 'k1', 25, '{}', 'available', 'q' || i % 5, 1 + i % 4"
            " FROM generate_series(1, 20000) AS i"
        )
        await connection.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, queue, priority)"
            " SELECT 'k1', 25, '{}', 'available',"
            f" CASE WHEN i % ({BACKLOG} / 10) = 0 THEN 'small' ELSE 'backlog' END, 1 + i % 4"
            f" FROM generate_series(1, {BACKLOG}) AS i"
        )
        await connection.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, queue, attempt, attempted_at,"
            " attempted_by) SELECT 'k1', 25, '{}', 'running', 'q' || i % 5, 1, now(), array['c1']"
            " FROM generate_series(1, 1000) AS i"
        )


@pytest.fixture(scope="module")
def large_url(server_url: str) -> Generator[str]:
    """Yield the URL of a database with a large table of jobs."""
    with large_database(server_url, fill) as url:
        yield url


@pytest.fixture(params=PLAN_MODES)
async def large(
    large_url: str, request: pytest.FixtureRequest
) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Yield a connection to it with one plan mode."""
    async with connected(large_url, plan_cache_mode=request.param) as connection:
        yield connection


async def plan_of(
    connection: asyncpg.Connection[Any], name: str, *literals: str, file: str = "river_job"
) -> list[dict[str, Any]]:
    """Return the nodes of the plan of a statement with these parameters."""
    return await plan_of_query(connection, get_query(file, name, None), literals)


async def plan_of_query(
    connection: asyncpg.Connection[Any], statement: Query, literals: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the nodes of the plan of a statement with these parameters."""
    assert len(literals) == len(statement.parameters)
    await connection.execute(f"PREPARE planned AS {statement.text}")
    text = await connection.fetchval(
        f"EXPLAIN (FORMAT json) EXECUTE planned({', '.join(literals)})"
    )
    await connection.execute("DEALLOCATE planned")
    nodes: list[dict[str, Any]] = []

    def walk(node: dict[str, Any]) -> None:
        nodes.append(node)
        for child in node.get("Plans", ()):
            walk(child)

    walk(json.loads(text)[0]["Plan"])
    return nodes


def scans_of(nodes: list[dict[str, Any]]) -> set[str]:
    """Return how the plan reads the table of jobs: its indexes, or `Seq Scan`."""
    return {
        node.get("Index Name", node["Node Type"])
        for node in nodes
        if node.get("Relation Name") == "river_job" or "Index Name" in node
        if node["Node Type"] not in {"ModifyTable", "Bitmap Heap Scan"}
    }


FETCH = "river_job_prioritized_fetching_index"
NARROW = {FETCH, "river_job_pkey"}
"""The indexes that statements on given running rows may use: the ids, or the running rows."""
IDS_LITERAL = f"'{{{','.join(map(str, range(1, 1001)))}}}'::bigint[]"
ONES = f"'{{{','.join(['1'] * 1000)}}}'::smallint[]"
TIMES = f"'{{{','.join(['2026-01-01Z'] * 1000)}}}'::timestamptz[]"
FLOATS = f"'{{{','.join(['1'] * 1000)}}}'::float8[]"
TEXTS = f"'{{{','.join(['x'] * 1000)}}}'::text[]"
NULLS = f"'{{{','.join(['null'] * 1000)}}}'"


MANY_KINDS = f"{{{','.join(f'k{n}' for n in range(200))}}}"
BEGINNING_LITERALS = ("0", "'-infinity'", "0", "4")


@pytest.mark.parametrize("after", [BEGINNING_LITERALS, ("1", "'2026-01-01Z'", "17", "1")])
@pytest.mark.parametrize("limit", ["1", "100", "1000"])
@pytest.mark.parametrize("kinds", ["NULL", "'{k1}'", "'{rare}'", f"'{MANY_KINDS}'"])
async def test_job_claim(
    large: asyncpg.Connection[Any], limit: str, after: Sequence[str], kinds: str
) -> None:
    """A claim uses the index in its order, without a sort, and the primary key, for any kinds: all,
    those of nearly every waiting job, one of no job, or many (CF-106)."""
    nodes = await plan_of(large, "job_claim", "'q1'", "'{}'", kinds, *after, limit, "'client'")
    (walk,) = [node for node in nodes if node.get("Index Name") == FETCH]
    assert "ROW(priority, scheduled_at, id) > " in walk["Index Cond"]
    assert scans_of(nodes) == {FETCH, "river_job_pkey"}
    assert not any(node["Node Type"] in {"Sort", "Hash Join"} for node in nodes)


QUEUES_OF_A_CLAIM = "'{q0,q1,q2,backlog,small,none}'"
LIMITS_OF_A_CLAIM = "'{1,3,100,1000,1000,100}'"


@pytest.mark.parametrize("size", [1, 10], ids=["as filled", "two million jobs"])
@pytest.mark.parametrize("kinds", ["NULL", "'{k1}'", f"'{MANY_KINDS}'"])
async def test_job_claim_queues(large: asyncpg.Connection[Any], kinds: str, size: int) -> None:
    """A claim of several queues reads the index once for each queue, in its order and without a
    sort, then the primary key. So it does if the planner takes the table for ten times as large,
    with a million jobs that wait and more than a million finished ones."""
    transaction = large.transaction()
    await transaction.start()
    await large.execute(
        "UPDATE pg_class SET reltuples = reltuples * $1 WHERE relname ~ '^river_job'", size
    )
    nodes = await plan_of(
        large, "job_claim_queues", QUEUES_OF_A_CLAIM, LIMITS_OF_A_CLAIM, kinds, "'client'"
    )
    await transaction.rollback()
    (walk,) = [node for node in nodes if node.get("Index Name") == FETCH]
    assert "queue = wanted.queue" in walk["Index Cond"]
    assert scans_of(nodes) == {FETCH, "river_job_pkey"}
    assert not any(node["Node Type"] in {"Sort", "Hash Join", "Merge Join"} for node in nodes)


async def cost_of(
    connection: asyncpg.Connection[Any], name: str, *literals: str
) -> tuple[int, int]:
    """Run a claim, and return the number of its rows and of the blocks that it read."""
    await connection.execute(f"PREPARE planned AS {get_query('river_job', name, None).text}")
    transaction = connection.transaction()
    await transaction.start()
    text = await connection.fetchval(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE planned({', '.join(literals)})"
    )
    await transaction.rollback()
    await connection.execute("DEALLOCATE planned")
    root = json.loads(text)[0]["Plan"]
    return root["Actual Rows"], root["Shared Hit Blocks"] + root["Shared Read Blocks"]


@pytest.mark.parametrize(("queue", "limit"), [("backlog", 100), ("backlog", 1000), ("small", 1000)])
async def test_cost_of_a_claim(large: asyncpg.Connection[Any], queue: str, limit: int) -> None:
    """The cost of a claim depends on the jobs it returns, not on the finished jobs or on those that
    wait in any queue (PF-01, PF-02)."""
    literals = f"'{queue}'", "'{}'", "'{k1}'", *BEGINNING_LITERALS, str(limit), "'client'"
    found, blocks = await cost_of(large, "job_claim", *literals)
    assert found == (10 if queue == "small" else limit)
    assert blocks < 100 + 25 * found


async def test_cost_of_a_claim_of_several_queues(large: asyncpg.Connection[Any]) -> None:
    """The same, with a few blocks for each queue. Each queue gets its own number of jobs."""
    literals = QUEUES_OF_A_CLAIM, LIMITS_OF_A_CLAIM, "'{k1}'", "'client'"
    found, blocks = await cost_of(large, "job_claim_queues", *literals)
    assert found == 1 + 3 + 100 + 1000 + 10
    assert blocks < 200 + 25 * found


async def test_job_complete(large: asyncpg.Connection[Any]) -> None:
    """Storing a thousand results reads only those rows, or the running ones."""
    nodes = await plan_of(large, "job_complete", IDS_LITERAL, ONES, TIMES, FLOATS)
    assert scans_of(nodes) <= NARROW


async def test_job_store_results(large: asyncpg.Connection[Any]) -> None:
    """The general statement reads only those rows too."""
    bools = f"{NULLS}::bool[]"
    texts = f"{NULLS}::text[]"
    states = TEXTS.replace("x,", "completed,").replace("x}", "completed}")
    nodes = await plan_of(
        large,
        "job_store_results",
        IDS_LITERAL,
        ONES,
        TIMES,
        states,
        bools,
        FLOATS,
        ONES,
        FLOATS,
        texts,
        texts,
    )
    assert scans_of(nodes) <= NARROW


@pytest.mark.parametrize("name", ["job_lock_attempts", "job_stored_outcomes", "job_cancel_marks"])
async def test_by_ids(large: asyncpg.Connection[Any], name: str) -> None:
    """Statements on given rows read only those rows, or the running ones."""
    assert scans_of(await plan_of(large, name, IDS_LITERAL)) <= NARROW


async def test_job_release(large: asyncpg.Connection[Any]) -> None:
    """A release reads only those rows, or the running ones."""
    nodes = await plan_of(large, "job_release", IDS_LITERAL, ONES, TIMES)
    assert scans_of(nodes) <= NARROW


async def test_job_claimed_by(large: asyncpg.Connection[Any]) -> None:
    """The search for lost claims reads only running rows, whatever the history."""
    nodes = await plan_of(large, "job_claimed_by", "'{q1,q2}'", "'{7}'", "'c1'", "10")
    scans = scans_of(nodes)
    assert "Seq Scan" not in scans
    assert scans == {FETCH}


async def test_job_any_available(large: asyncpg.Connection[Any]) -> None:
    """The check for available jobs reads the index of the claims."""
    for kinds in ("NULL", "'{rare}'"):
        nodes = await plan_of(large, "job_any_available", "'{q1,q2}'", "'{1,2}'", kinds)
    assert scans_of(nodes) == {FETCH}


async def test_job_due_times(large: asyncpg.Connection[Any]) -> None:
    """The read of due times reads the index of the claims, and no job that is due already."""
    nodes = await plan_of(large, "job_due_times", "'{q1,q2}'")
    assert scans_of(nodes) == {FETCH}
    (scan,) = [node for node in nodes if node.get("Index Name") == FETCH]
    assert "scheduled_at" in scan["Index Cond"]


async def test_job_store_progress(large: asyncpg.Connection[Any]) -> None:
    """A write of progress reads only the rows of the jobs that reported."""
    times = ONES.replace("smallint", "bigint")
    nodes = await plan_of(large, "job_store_progress", IDS_LITERAL, ONES, times, TEXTS)
    assert scans_of(nodes) <= NARROW


async def test_watched_jobs(large: asyncpg.Connection[Any]) -> None:
    """The read of watched jobs reads only their rows."""
    nodes = await plan_of(large, "fleet_changed_jobs", IDS_LITERAL, TEXTS, file="riverpy_fleet")
    assert scans_of(nodes) == {"river_job_pkey"}
    nodes = await plan_of(large, "fleet_ended_jobs", IDS_LITERAL, file="riverpy_fleet")
    assert scans_of(nodes) == {"river_job_pkey"}


@pytest.mark.parametrize("name", ["job_merge_running_metadata", "job_complete_running"])
async def test_running_job(large: asyncpg.Connection[Any], name: str) -> None:
    """Writes of a running attempt read its row by the primary key."""
    values = {
        "updates": "'{}'",
        "id": "'17'",
        "attempt": "'1'",
        "attempted_at": "'844000000000000'",
        "lock_timeout": "NULL",
    }
    names = get_query("river_job", name, None).parameters
    nodes = await plan_of(large, name, *(values[name] for name in names))
    assert scans_of(nodes) == {"river_job_pkey"}


@pytest.mark.parametrize("name", ["job_get", "job_cancel", "job_retry"])
async def test_one_job(large: asyncpg.Connection[Any], name: str) -> None:
    """Calls on one job read it by its primary key."""
    parameters = get_query("river_job", name, None).parameters
    job_id = "'{17}'" if name == "job_get" else "17"
    nodes = await plan_of(large, name, *(job_id if one == "id" else "NULL" for one in parameters))
    assert "river_job_pkey" in scans_of(nodes)
    assert "Seq Scan" not in scans_of(nodes)


TOP_LITERALS = {
    "name": "'{backlog,empty,q1,small}'",
    "since": "now() - interval '10 s'",
    "since_text": "'2026-01-01T00:00:00'",
    "late": "5",
    "cap": "10000",
    "read": "1000",
    "limit": "1000",
    "window": "10",
    "skipped": "'{7}'",
}
TOP_BLOCKS = ("top_queue_names", "top_queues", "top_ended_jobs", "top_totals", "top_running")


@pytest.mark.parametrize("name", TOP_BLOCKS)
async def test_top(large: asyncpg.Connection[Any], name: str) -> None:
    """Each refresh of `riverpy top` uses indexes, and reads at most a fixed number of rows for each
    queue and state, whatever the history (PF-01)."""
    literals = [TOP_LITERALS[one] for one in get_query("top", name, None).parameters]
    async with large.transaction():
        await large.execute(get_query("top", "top_set_timeout", None).text.replace("$1", "5000"))
        nodes = await plan_of(large, name, *literals, file="top")
        types = {node["Node Type"] for node in nodes if node.get("Relation Name") == "river_job"}
        assert not types & {"Seq Scan", "Bitmap Heap Scan"}
        await large.execute(f"PREPARE planned AS {get_query('top', name, None).text}")
        text = await large.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE planned({', '.join(literals)})"
        )
        await large.execute("DEALLOCATE planned")
    root = json.loads(text)[0]["Plan"]
    blocks = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
    assert blocks < 6_000  # of about 10,000; tests before this one may leave dead rows


@pytest.mark.parametrize(
    ("name", "argument"), [("queue_lag", ["backlog", "q1", "q2", "none"]), ("queue_waiting", 100)]
)
async def test_cost_of_looking_at_queues(
    large: asyncpg.Connection[Any], name: str, argument: object
) -> None:
    """The waiting time of due jobs is read from a few blocks per queue, however many jobs wait."""
    statement = get_query("river_queue", name, None)
    (row,) = await large.fetch(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {statement.text}", argument
    )
    root = json.loads(row[0])[0]["Plan"]
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 500


ENDS = "river_job_state_and_finalized_at_index"
LISTS: list[tuple[JobFilters, JobOrder, str]] = [
    ({}, "id", "river_job_pkey"),
    ({"ids": [1, 2, 300_000]}, "id", "river_job_pkey"),
    ({"kinds": ["k7"]}, "id", "river_job_pkey"),
    ({"states": ["running"]}, "id", FETCH),
    ({"states": ["running"]}, "time", FETCH),
    ({"states": ["available"], "queues": ["small"]}, "id", FETCH),
    ({"states": ["retryable", "running"], "error": "x"}, "scheduled_at", FETCH),
    ({"metadata": {"a": 1}}, "id", "river_job_metadata_index"),
    ({"metadata": {"a": 1}, "kinds": ["k1"]}, "scheduled_at", "river_job_metadata_index"),
    ({"args": {"a": 1}}, "id", "river_job_args_index"),
    ({}, "finalized_at", ENDS),
    ({"states": ["completed", "discarded"], "kinds": ["k7"]}, "finalized_at", ENDS),
    ({"states": ["completed"]}, "time", ENDS),
]


def literal(value: object) -> str:
    """Return a value as a literal of SQL."""
    if isinstance(value, list):
        return f"'{{{','.join(map(str, value))}}}'"
    return f"'{value}'" if isinstance(value, str) else str(value)


def parts_with_states(parts: Iterable[str], states: list[str]) -> frozenset[str]:
    """Return the parts of a statement with its literals of states."""
    chosen = frozenset(parts)
    return chosen.union(f"state_{one}" for one in states) if "states" in chosen else chosen


@pytest.mark.parametrize(("filters", "order", "index"), LISTS)
async def test_lists(
    large: asyncpg.Connection[Any], filters: JobFilters, order: JobOrder, index: str
) -> None:
    """The first page of a list reads an index of its filters or of its order, and never the whole
    table."""
    checked = check_filters(filters)
    plan = plan_page(checked, order, descending=order != "id", limit=100, after=None)
    block, parts, values = plan.statement
    statement = get_query_with_conditional_parts(
        "river_job_list", f"job_list_{block}", None, parts_with_states(parts, checked.states)
    )
    literals = [literal(values[name]) for name in statement.parameters]
    scans = scans_of(await plan_of_query(large, statement, literals))
    assert index in scans
    assert "Seq Scan" not in scans


async def test_rare_kind(large: asyncpg.Connection[Any]) -> None:
    """A kind that the planner knows to be rare is found by its index."""
    statement = get_query_with_conditional_parts(
        "river_job_list", "job_list_by_id", None, frozenset({"kinds", "ascending"})
    )
    nodes = await plan_of_query(large, statement, ["'{rare}'", "100"])
    is_custom = await large.fetchval("SHOW plan_cache_mode") == "force_custom_plan"
    assert "river_job_kind" in scans_of(nodes) or not is_custom
    assert "Seq Scan" not in scans_of(nodes)


@pytest.mark.parametrize(
    "name", ["job_retry_batch", "job_cancel_batch", "job_delete_batch", "job_match_filters"]
)
@pytest.mark.parametrize("filters", [{}, {"states": ["completed"], "kinds": ["k1"], "error": "x"}])
async def test_batches(large: asyncpg.Connection[Any], name: str, filters: JobFilters) -> None:
    """A change of a batch reads only the given rows, and other rows with their unique keys."""
    checked = check_filters(filters)
    parts = parts_with_states(checked.values, checked.states)
    statement = get_query_with_conditional_parts("river_job_batch", name, None, parts)
    values = {**checked.values, "batch": list(range(1, 1001))}
    literals = [literal(values[name]) for name in statement.parameters]
    scans = scans_of(await plan_of_query(large, statement, literals))
    # Few rows have one of the kinds or states: the planner may begin with them instead.
    assert scans <= {"river_job_pkey", "river_job_unique_idx", "river_job_kind", FETCH}
    assert "river_job_pkey" in scans


@pytest.mark.parametrize("name", ["job_delete_many", "job_list_ids_in_range"])
@pytest.mark.parametrize(
    ("filters", "index"),
    [({"ids": [1, 2]}, "river_job_pkey"), ({"metadata": {"a": 1}}, "river_job_metadata_index")],
)
async def test_choice_of_many(
    large: asyncpg.Connection[Any], name: str, filters: JobFilters, index: str
) -> None:
    """The choice of jobs to change reads an index."""
    values = {**check_filters(filters).values, "limit": 100, "after_id": 0, "last_id": 400_000}
    statement = get_query_with_conditional_parts("river_job_batch", name, None, frozenset(filters))
    literals = [literal(values[name]) for name in statement.parameters]
    scans = scans_of(await plan_of_query(large, statement, literals))
    assert index in scans
    assert "Seq Scan" not in scans


@pytest.mark.parametrize(
    "filters",
    ["", "state=completed&tag=x", "state=available", "state=available&queue=q1", "kind=k1&tag=x"],
)
async def test_dashboard_search(
    large: asyncpg.Connection[Any], filters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of the dashboard reads no more jobs than its limit, through indexes."""
    types: set[str] = set()
    fetch = Query.fetch

    async def explain(statement: Query, connection: Any, **values: Any) -> Any:
        if "candidate as" in statement.text:
            arguments = [values[name] for name in statement.parameters]
            lines = await connection.fetch(f"EXPLAIN (ANALYZE) {statement.text}", *arguments)
            types.update(line[0].strip() for line in lines if " on river_job" in line[0])
        return await fetch(statement, connection, **values)

    monkeypatch.setattr(Query, "fetch", explain)
    monkeypatch.setattr(job_search, "SEARCHED_JOBS_MAX", 1_000)
    async with large.transaction():
        await set_statement_timeout(large, timedelta(seconds=60))
        search = job_search.parse_search(QueryParams(filters))
        await job_search.find_jobs(large, None, search, limit=50)
    assert types
    assert not [line for line in types if "Seq Scan" in line or "Bitmap" in line]


async def test_neighbors(large: asyncpg.Connection[Any]) -> None:
    """The jobs that ran beside another one are read from the indexes of ended jobs and of claims,
    in their order."""
    literals = ["'{}'", "'2026-01-01Z'", "1000", "'c1'", "1", "'2026-01-02Z'", "100"]
    statement = get_query("riverpy_dashboard", "job_neighbors", None)
    by_name = dict(
        zip(
            ("skipped", "since", "searched", "client_id", "id", "until", "limit"),
            literals,
            strict=True,
        )
    )
    nodes = await plan_of_query(large, statement, [by_name[name] for name in statement.parameters])
    assert scans_of(nodes) == {"river_job_state_and_finalized_at_index", FETCH}
    assert {node["Node Type"] for node in nodes} >= {"Index Scan", "Limit"}


async def test_dashboard_kinds(large: asyncpg.Connection[Any]) -> None:
    """The names of kinds are found one by one in an index."""
    statement = get_query("riverpy_dashboard", "kinds", None)
    arguments = [{"after": "", "limit": 10}[name] for name in statement.parameters]
    lines = await large.fetch(f"EXPLAIN {statement.text}", *arguments)
    scans = [line[0] for line in lines if " on river_job" in line[0]]
    assert scans
    assert all("river_job_kind" in line for line in scans)


DASHBOARD_VALUES = {
    "client_id": "'c1'",
    "kinds": "20",
    "limit": "1000",
    "periodic_job_id": "'p'",
    "periodic_job_ids": "'{p}'",
    "queue": "'backlog'",
    "queues": "'{backlog,q1}'",
    "searched": "1000",
    "skipped": "'{}'",
    "due_at": "'2026-01-01Z'",
    "state": "'available'",
}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("queue_sample_kinds", FETCH),
        ("queue_kinds_without_worker", FETCH),
        ("client_running_jobs", FETCH),
        ("periodic_newest_jobs", "river_job_pkey"),
        ("periodic_job_of_due_time", FETCH),
    ],
)
async def test_dashboard_reads(large: asyncpg.Connection[Any], name: str, index: str) -> None:
    """What the pages of queues, workers and periodic jobs read of jobs, they read from one index,
    and no more than their limits."""
    statement = get_query("riverpy_dashboard", name, None)
    literals = [DASHBOARD_VALUES[one] for one in statement.parameters]
    async with large.transaction():
        await set_statement_timeout(large, timedelta(seconds=60))
        assert scans_of(await plan_of_query(large, statement, literals)) == {index}
        await large.execute(f"PREPARE planned AS {statement.text}")
        text = await large.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE planned({', '.join(literals)})"
        )
        await large.execute("DEALLOCATE planned")
    root = json.loads(text)[0]["Plan"]
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 2_500
