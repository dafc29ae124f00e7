"""The plans of maintenance on a large table: which index each statement walks, under both plan
modes, for all queues and for some.

All tests here share one table with 200,000 jobs of history, so they belong on one worker of
xdist.
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._leading.queue_scope import QUEUES_PER_FILTER_MAX
from riverpy._postgres.sql_files import get_query
from tests._database import connected
from tests.kit.large import PLAN_MODES, filling, large_database

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable

    import asyncpg


pytestmark = pytest.mark.timeout(180)  # to fill the table takes a busy machine a while
ROWS = 200_000
ENDED = "river_job_state_and_finalized_at_index"
FETCH = "river_job_prioritized_fetching_index"
METADATA = "river_job_metadata_index"
PRIMARY = "river_job_pkey"
UNIQUE = "river_job_unique_idx"
QUEUE = "river_queue_pkey"

_HISTORY = f"""
    INSERT INTO river_job (kind, max_attempts, args, state, finalized_at, attempt, queue,
      attempted_at, attempted_by, scheduled_at, unique_key, unique_states)
    SELECT 'k' || i % 20, 25, '{{}}',
      (CASE WHEN i % 50 = 0 THEN 'discarded' WHEN i % 50 = 1 THEN 'cancelled' ELSE 'completed' END)
        ::river_job_state,
      now() - make_interval(secs => i / 8.0), 1, 'q' || i % 5, now() - make_interval(secs => i),
      array['c' || i % 10], now() - make_interval(secs => i),
      CASE WHEN i % 10 = 2 THEN decode(md5(i::text), 'hex') END,
      CASE WHEN i % 10 = 2 THEN B'11110101' END
    FROM generate_series(1, {ROWS}) AS i;
    INSERT INTO river_job (kind, max_attempts, args, state, queue, priority)
    SELECT 'k1', 25, '{{}}', 'available', 'q' || i % 5, 1 + i % 4
    FROM generate_series(1, 10000) AS i;
    INSERT INTO river_job (kind, max_attempts, args, state, queue, attempt, attempted_at,
      attempted_by)
    SELECT 'k1', 25, '{{}}', 'running', 'q' || i % 5, 1, now(), array['c1']
    FROM generate_series(1, 1000) AS i;
    INSERT INTO river_job (kind, max_attempts, args, state, queue, priority, scheduled_at,
      unique_key, unique_states)
    SELECT 'k1', 25, '{{}}', (CASE WHEN i % 2 = 0 THEN 'scheduled' ELSE 'retryable' END)
        ::river_job_state,
      'q' || i % 5, 1 + i % 4, now() + make_interval(secs => i - 1000),
      CASE WHEN i % 4 = 0 THEN decode(md5('w' || i), 'hex') END,
      CASE WHEN i % 4 = 0 THEN B'11110101' END
    FROM generate_series(1, 5000) AS i;
    INSERT INTO river_queue (name, updated_at)
    SELECT 'q' || i, now() - make_interval(hours => i % 48) FROM generate_series(0, 9999) AS i;
    INSERT INTO riverpy_exec (key, epoch, claimed_by, completed_at, kept_until)
    SELECT 'key ' || i, i, 'c1', now(), now() + make_interval(secs => i - 1000)
    FROM generate_series(1, 100000) AS i
"""
SOME = [
    "{q1,q2}",
    "{" + ",".join(f"q{number}" for number in range(1, QUEUES_PER_FILTER_MAX + 1)) + "}",
]
"""Few queues of those with jobs, and as many as a statement takes."""
SCOPES = [("", ""), *product(("_in_queues", "_except_queues"), SOME)]
"""Which statement, and its queues."""
SCOPE_IDS = ["all", "in few", "in many", "but few", "but many"]


async def fill(url: str) -> None:
    """200,000 ended jobs, and some thousands that wait, run, or are due."""
    async with filling(url) as connection:
        await connection.execute(_HISTORY)


@pytest.fixture(scope="module")
def large_url(server_url: str) -> Generator[str]:
    """A database with a large history of jobs."""
    with large_database(server_url, fill) as url:
        yield url


@pytest.fixture(params=PLAN_MODES)
async def large(
    large_url: str, request: pytest.FixtureRequest
) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """A connection to it, which plans one way."""
    async with connected(large_url, plan_cache_mode=request.param) as connection:
        yield connection


_TABLES = ("river_job", "river_queue", "riverpy_exec")
_BOUND = re.compile(r"\((\w+) (?:=|<|>|<=|>=) ")


class Plan:
    """How a statement reads and sorts the tables of jobs, queues and executions."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.scans: set[str] = set()
        """The indexes; or `Seq Scan`."""
        self.walks: set[str] = set()
        """Indexes that are read from one end to the other, as nothing limits them."""
        self.bounds: list[set[str]] = []
        """Of each read of an index, the columns that limit it."""
        self._add(root)

    def _add(self, node: dict[str, Any]) -> None:
        kind, index = node["Node Type"], node.get("Index Name")
        if index is not None:
            self.scans.add(index)
            if "Index Cond" not in node:
                self.walks.add(index)
            self.bounds.append(set(_BOUND.findall(node.get("Index Cond", ""))))
        elif node.get("Relation Name") in _TABLES and kind == "Seq Scan":
            self.scans.add(kind)
        for child in node.get("Plans", ()):
            self._add(child)


async def plan_of(
    connection: asyncpg.Connection[Any], file: str, name: str, **literals: str
) -> Plan:
    """The plan of one of our statements, with these parameters."""
    statement = get_query(file, name, None)
    arguments = ", ".join(literals[parameter] for parameter in statement.parameters)
    await connection.execute(f"PREPARE planned AS {statement.text}")
    text = await connection.fetchval(f"EXPLAIN (FORMAT json) EXECUTE planned({arguments})")
    await connection.execute("DEALLOCATE planned")
    return Plan(json.loads(text)[0]["Plan"])


def array_of(values: Iterable[object], kind: str) -> str:
    """A literal of an array."""
    return f"'{{{','.join(map(str, values))}}}'::{kind}[]"


@pytest.mark.parametrize("age", ["1 hour", "1 year"])
@pytest.mark.parametrize(
    ("queues", "kinds"),
    [("{}", "{}"), (SOME[0], "{}"), (SOME[1], "{}"), ("{}", "{k1}"), ("{q1}", "{k1,k2}")],
    ids=["all", "queues", "many queues", "kinds", "both"],
)
@pytest.mark.parametrize("only", ["true", "false"])
@pytest.mark.parametrize("after", ["NULL", "(now() - interval '20 hours')::text"])
async def test_job_ended(
    large: asyncpg.Connection[Any], age: str, queues: str, kinds: str, only: str, after: str
) -> None:
    """JC5: reading what to delete walks the ended jobs of one state in the order of their end, also
    those of some queues and kinds, or of all but some."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_ended",
        state="'completed'",
        retention=f"'{age}'",
        queues=f"'{queues}'",
        is_queue_allow_list=only,
        kinds=f"'{kinds}'",
        is_kind_allow_list=only,
        after_time=after,
        after_id="NULL" if after == "NULL" else "17",
        limit="10000",
    )
    assert (plan.scans, plan.walks) == ({ENDED}, set())


@pytest.mark.parametrize("count", [1, 10_000])
async def test_job_delete_ended(large: asyncpg.Connection[Any], count: int) -> None:
    """Deleting takes the given jobs by primary key."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_delete_ended",
        ids=array_of(range(1, count + 1), "bigint"),
        state="'completed'",
        retention="'1 hour'",
    )
    assert (plan.scans, plan.walks) == ({PRIMARY}, set())


async def test_nothing_to_clean(large: asyncpg.Connection[Any]) -> None:
    """Whether there are jobs to delete is seen at one end of the index of those that ended
    (PF-01)."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_states_to_clean",
        states="'{cancelled,completed,discarded}'",
        retentions="'{1 year,1 year,1 year}'",
    )
    assert plan.scans == {ENDED}
    assert plan.bounds == [{"state"}]


_SWEPT = {
    "state": "'completed'",
    "retention": "'1 hour'",
    "queues": f"'{SOME[0]}'",
    "kinds": "'{}'",
    "is_kind_allow_list": "false",
    "after_time": "(now() - interval '1 hour 1 second')::text",
    "after_id": "0",
}
"""A sweep that has looked at nearly all before."""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("job_due", {"ahead": "'-30 min'"}),
        ("job_due", {"ahead": "'5 s'"}),
        ("job_due_in_queues", {"ahead": "'5 s'", "queues": f"'{SOME[0]}'"}),
        ("job_due_except_queues", {"ahead": "'5 s'", "queues": f"'{SOME[0]}'"}),
        (
            "job_states_to_clean",
            {"states": "'{cancelled,completed,discarded}'", "retentions": "'{1 y,1 y,1 y}'"},
        ),
        ("job_ended", {**_SWEPT, "is_queue_allow_list": "true"}),
        ("job_ended", {**_SWEPT, "is_queue_allow_list": "false"}),
    ],
    ids=[
        "nothing due",
        "a thousand due",
        "due in queues",
        "due in others",
        "nothing to clean",
        "few to clean in queues",
        "few to clean in others",
    ],
)
async def test_cost_of_a_pass(
    large: asyncpg.Connection[Any], name: str, arguments: dict[str, str]
) -> None:
    """A pass of the scheduler or the cleaner reads what it moves, of all queues, of some or of all
    but some, and hundreds of thousands of jobs of history cost nothing (PF-01)."""
    statement = get_query("river_job_maintenance", name, None)
    arguments = {"skipped": "'{}'", "limit": "10000", **arguments}
    given = ", ".join(arguments[parameter] for parameter in statement.parameters)
    await large.execute(f"PREPARE planned AS {statement.text}")
    transaction = large.transaction()
    await transaction.start()
    text = await large.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE planned({given})")
    await transaction.rollback()
    await large.execute("DEALLOCATE planned")
    root = json.loads(text)[0]["Plan"]
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 500


@pytest.mark.parametrize(("suffix", "queues"), SCOPES, ids=SCOPE_IDS)
async def test_job_expired(large: asyncpg.Connection[Any], suffix: str, queues: str) -> None:
    """Expired jobs are found in the indexes of metadata and of claims, and history is not read."""
    arguments = {"skipped": "'{}'", "limit": "50000", "queues": f"'{queues}'"}
    plan = await plan_of(large, "river_job_maintenance", f"job_expired{suffix}", **arguments)
    assert plan.scans <= {METADATA, FETCH}
    assert plan.walks == set()


async def test_job_cancel_expired(large: asyncpg.Connection[Any]) -> None:
    """Expired jobs are cancelled by primary key."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_cancel_expired",
        ids=array_of(range(1, 10_001), "bigint"),
        error="'expired'",
    )
    assert (plan.scans, plan.walks) == ({PRIMARY}, set())


@pytest.mark.parametrize("skipped", ["{}", "{1,2,3}"])
async def test_job_due(large: asyncpg.Connection[Any], skipped: str) -> None:
    """Due jobs are found in the index that claims read, in ranges that hold no others: jobs
    that are far from due are not read."""
    lane = {"state", "queue", "priority", "scheduled_at"}
    parameters = {"ahead": "'5 s'", "skipped": f"'{skipped}'", "limit": "10000"}
    plan = await plan_of(large, "river_job_maintenance", "job_due", **parameters)
    assert (plan.scans, plan.walks) == ({FETCH}, set())
    assert lane in plan.bounds
    for queues in SOME:
        plan = await plan_of(
            large, "river_job_maintenance", "job_due_in_queues", queues=f"'{queues}'", **parameters
        )
        assert (plan.scans, plan.walks) == ({FETCH}, set())
        assert plan.bounds == [lane]
        plan = await plan_of(
            large,
            "river_job_maintenance",
            "job_due_except_queues",
            queues=f"'{queues}'",
            **parameters,
        )
        assert (plan.scans, plan.walks) == ({FETCH}, set())
        assert lane in plan.bounds


@pytest.mark.parametrize("count", [1, 100, 10_000])
async def test_job_schedule(large: asyncpg.Connection[Any], count: int) -> None:
    """Moving due jobs reads them by primary key, or among those that wait, and the holder of each
    key by the key."""
    ids = await large.fetch(
        "SELECT id FROM river_job WHERE state IN ('scheduled', 'retryable') LIMIT $1", count
    )
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_schedule",
        ids=array_of([row[0] for row in ids], "bigint"),
        ahead="'5 s'",
    )
    assert plan.scans <= {PRIMARY, FETCH, UNIQUE}
    assert plan.scans >= {PRIMARY, UNIQUE}
    assert plan.walks == set()


@pytest.mark.parametrize(("scope", "queues"), SCOPES, ids=SCOPE_IDS)
@pytest.mark.parametrize("after", ["0", str(ROWS + 500)])
async def test_job_running_of(
    large: asyncpg.Connection[Any], scope: str, queues: str, after: str
) -> None:
    """The running jobs of clients that are gone are found among the running ones."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        f"job_running_of{scope}",
        after=after,
        client_id="'{c1,c2}'",
        skipped="'{7}'",
        limit="1000",
        queues=f"'{queues}'",
    )
    assert (plan.scans, plan.walks) == ({FETCH}, set())


@pytest.mark.parametrize(("scope", "queues"), SCOPES, ids=SCOPE_IDS)
@pytest.mark.parametrize("after", ["0", str(ROWS + 500)])
async def test_job_stuck(
    large: asyncpg.Connection[Any], scope: str, queues: str, after: str
) -> None:
    """So are those that run for too long."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        f"job_stuck{scope}",
        after=after,
        age="'1 hour'",
        limit="1000",
        queues=f"'{queues}'",
    )
    assert (plan.scans, plan.walks) == ({FETCH}, set())


async def test_job_stuck_rows(large: asyncpg.Connection[Any]) -> None:
    """The columns of those are read by primary key, or among the running ones."""
    plan = await plan_of(
        large, "river_job_maintenance", "job_stuck_rows", id="'{5,6,7}'", age="'1 hour'"
    )
    assert plan.scans <= {FETCH, PRIMARY}
    assert plan.walks == set()


@pytest.mark.parametrize("queues", SOME, ids=["few", "many"])
async def test_queue_unused(large: asyncpg.Connection[Any], queues: str) -> None:
    """Unused queues of a few are found by their names; those of all others, like those of all, by
    one read of the table of queues."""
    parameters = {"age": "'24 hours'", "after": "''", "limit": "10000", "queues": f"'{queues}'"}
    plan = await plan_of(large, "river_queue", "queue_unused_in_queues", **parameters)
    assert (plan.scans, plan.walks) == ({QUEUE}, set())
    everywhere = await plan_of(large, "river_queue", "queue_unused", **parameters)
    plan = await plan_of(large, "river_queue", "queue_unused_except_queues", **parameters)
    assert (plan.scans, plan.walks) == (everywhere.scans, everywhere.walks)


@pytest.mark.parametrize("after", ["NULL", "(now() - interval '20 hours')::text"])
async def test_exec_expired(large: asyncpg.Connection[Any], after: str) -> None:
    """Expired keys are read in the order in which their time ends, however much is kept."""
    plan = await plan_of(
        large, "riverpy_exec", "exec_expired", after_time=after, after_key="NULL", limit="10000"
    )
    assert plan.scans == {"riverpy_exec_kept_until_index"}
    assert plan.walks == set()


async def test_forgetting_by_key(large: asyncpg.Connection[Any]) -> None:
    """Queues and expired keys are deleted by their keys."""
    plan = await plan_of(
        large, "river_queue", "queue_delete_unused", names="'{q1,q2}'", age="'24 hours'"
    )
    assert (plan.scans, plan.walks) == ({QUEUE}, set())
    plan = await plan_of(large, "riverpy_exec", "exec_delete_expired", keys="'{key 1,key 2}'")
    assert (plan.scans, plan.walks) == ({"riverpy_exec_pkey"}, set())


@pytest.mark.parametrize("count", [1, 1000])
async def test_job_rescue(large: asyncpg.Connection[Any], count: int) -> None:
    """Rescuing reads the given jobs by primary key, or among the running ones."""
    plan = await plan_of(
        large,
        "river_job_maintenance",
        "job_rescue",
        id=array_of(range(1, count + 1), "bigint"),
        attempt=array_of([1] * count, "smallint"),
        attempted_at=array_of([1] * count, "bigint"),
        delay=array_of([1] * count, "float8"),
        error="'gone'",
    )
    assert plan.scans <= {FETCH, PRIMARY}
    assert (bool(plan.scans), plan.walks) == (True, set())


async def test_client_reap(large: asyncpg.Connection[Any]) -> None:
    """Whether a client that is gone has running jobs is seen among the running ones."""
    plan = await plan_of(
        large, "riverpy_client", "client_delete_idle", client_id="'{gone}'", heartbeat="'{beef}'"
    )
    assert (plan.scans & {"Seq Scan", PRIMARY, ENDED}, FETCH in plan.scans) == (set(), True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "doctor_running",
            {
                "client_id": "'{}'",
                "id": "'{}'",
                "long": "600",
                "limit": "1000",
                "skipped": "'{7}'",
            },
        ),
        ("doctor_backlogs", {"limit": "1000", "total_limit": "100000"}),
        (
            "doctor_kinds",
            {
                "states": "'{available,retryable,scheduled}'",
                "queues": "'{q1,q2,q3}'",
                "limit": "1000",
                "skipped": "'{7}'",
            },
        ),
    ],
    ids=["running", "places", "kinds"],
)
async def test_doctor(large: asyncpg.Connection[Any], name: str, arguments: dict[str, str]) -> None:
    """Each look of `riverpy doctor` at jobs goes along the index of those that wait or run, and
    reads no more of it than its limit, whatever the history (PF-01)."""
    statement = get_query("riverpy_doctor", name, None)
    await large.execute(f"PREPARE planned AS {statement.text}")
    text = await large.fetchval(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE planned("
        f"{', '.join(statement.order_arguments(arguments))})"
    )
    await large.execute("DEALLOCATE planned")
    root = json.loads(text)[0]["Plan"]
    assert Plan(root).scans == {FETCH}
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 1_000  # of about 7,000
