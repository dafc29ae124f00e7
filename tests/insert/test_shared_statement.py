"""Inserts of several calls that share a statement."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import Client, ClientStateError, Config, InsertManyParams, InsertOpts
from riverpy._insert import insert_backlog, shared_statement
from riverpy.job import JobRow
from tests.insert.jobs import BY_ARGS, Data, Welcome, many

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from riverpy import InsertResult
    from tests._database import Schema

NAME = "riverpy inserts"
BACKENDS = (
    "SELECT pid, wait_event_type FROM pg_stat_activity"
    " WHERE application_name = $1 AND datname = current_database() AND query ~ $2"
)


@pytest.fixture(params=["task", "caller"])
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The task that sends a call which comes alone: the task of all calls, or its caller's."""
    if request.param == "caller":
        monkeypatch.setattr(shared_statement, "SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL", 0)
    return request.param


@asynccontextmanager
async def inserting(schema: Schema, **settings: Any) -> AsyncGenerator[Client]:
    """Open a client whose reserved connection is open."""
    async with Client(schema.url, config=Config(schema=schema.name, **settings)) as client:
        await client.insert(Data(n=-1))
        await schema.execute("DELETE FROM river_job")
        yield client


class Calls:
    """Calls of a client that run at the same time."""

    def __init__(self, schema: Schema, client: Client) -> None:
        self.client = client
        self._schema = schema
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, *calls: Coroutine[Any, Any, Any]) -> None:
        self.tasks += [asyncio.ensure_future(call) for call in calls]

    def insert(self, *numbers: int) -> None:
        """Start an insert for each number."""
        self.start(*(self.client.insert(Data(n=number)) for number in numbers))

    async def until_blocked(self, text: str | None = None) -> int:
        """Wait until a shared statement with this text waits for a lock. Return its process id."""
        with anyio.fail_after(10):
            while True:
                for row in await self._schema.fetch(BACKENDS, NAME, text or self._schema.name):
                    if row["wait_event_type"] == "Lock":
                        return row["pid"]
                await anyio.sleep(0.002)

    async def outcomes(self) -> list[Any]:
        """Return the number of each stored job, or the error of its call."""
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [one if isinstance(one, BaseException) else number_of(one) for one in ended]


def number_of(result: InsertResult) -> int:
    return int(result.job.encoded_args.split(": ")[1].rstrip("}"))


@asynccontextmanager
async def blocked(schema: Schema) -> AsyncGenerator[None]:
    """Let each insert wait for a lock."""
    async with schema.connected() as connection, connection.transaction():
        await connection.execute("LOCK TABLE river_job IN SHARE MODE")
        yield


@asynccontextmanager
async def calls_in_flight(schema: Schema, client: Client) -> AsyncGenerator[Calls]:
    """Start one call whose statement waits for a lock until the end of the block."""
    calls = Calls(schema, client)
    async with blocked(schema):
        calls.insert(0)
        await calls.until_blocked()
        yield calls


async def stored(schema: Schema) -> list[int]:
    """Return the numbers of the stored jobs in the order of their ids."""
    return [
        int(row[0]) for row in await schema.fetch("SELECT args ->> 'n' FROM river_job ORDER BY id")
    ]


async def test_calls_share_a_statement(schema: Schema) -> None:
    """Calls that arrive during a statement are inserted by the next one, in their order. Each call
    gets its own rows. One call alone is sent at once."""
    async with inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(*range(1, 41))
            await asyncio.sleep(0)
        assert await calls.outcomes() == [*range(41)]
        batch = [InsertManyParams(Data(n=n)) for n in range(41, 44)]
        calls = Calls(schema, client)
        calls.start(client.insert_many(batch), client.insert(Data(n=44)))
        several, one = await asyncio.gather(*calls.tasks)
        assert [number_of(result) for result in [*several, one]] == [41, 42, 43, 44]
    assert await stored(schema) == [*range(45)]
    by_statement = await schema.fetch("SELECT count(*) FROM river_job GROUP BY xmin::text::bigint")
    assert sorted(row[0] for row in by_statement) == [1, 4, 40]


async def test_callers_of_one_moment_share_again(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After calls that came one at a time, the first of several calls is sent alone. From then on
    calls of one moment share a statement."""
    monkeypatch.setattr(shared_statement, "SINGLE_CALL_STATEMENTS_BEFORE_DIRECT_CALL", 2)
    async with inserting(schema) as client:
        for count in (1, 1, 1, 2, 2, 2, 1, 1, 1, 4, 4, 4, 4):
            await asyncio.gather(*(client.insert(Data(n=number)) for number in range(count)))
    by_statement = await schema.fetch(
        "SELECT count(*) FROM river_job GROUP BY xmin::text::bigint ORDER BY min(id)"
    )
    expected = [1, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 3, 4, 4, 4]
    assert [row[0] for row in by_statement] == expected


REFUSALS = {
    "trigger": "RAISE 'refused'",
    "left out": "RETURN NULL",
    "slow": "PERFORM pg_sleep(10)",
    "always a conflict": "RAISE 'retry' USING ERRCODE = '40001'",
    "conflict": """
        IF nextval(TG_TABLE_SCHEMA || '.conflicts') < 3 THEN
            RAISE 'retry' USING ERRCODE = '40001';
        END IF
    """,
}
TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.args = '{{"n": 7}}' THEN {act}; END IF;
    RETURN new;
END $$;
CREATE TRIGGER refuse BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION refuse()
"""
CONSTRAINT = "ALTER TABLE river_job ADD CONSTRAINT refused CHECK (args <> '{\"n\": 7}')"


@asynccontextmanager
async def refusing(schema: Schema, refusal: str) -> AsyncGenerator[None]:
    """Let the server refuse the job with the number 7."""
    act = REFUSALS.get(refusal)
    await schema.execute(CONSTRAINT if act is None else TRIGGER.format(act=act))
    try:
        yield
    finally:
        await schema.execute(
            "DROP FUNCTION IF EXISTS refuse CASCADE;"
            "ALTER TABLE river_job DROP CONSTRAINT IF EXISTS refused"
        )


@pytest.mark.parametrize("refusal", ["constraint", "trigger", "left out"])
async def test_a_refused_job_harms_no_other(schema: Schema, refusal: str) -> None:
    """If the server refuses a job, only its call gets the error. All others are stored."""
    async with refusing(schema, refusal), inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(*range(1, 60))
            await asyncio.sleep(0)
        outcomes = await calls.outcomes()
        (error,) = [one for one in outcomes if isinstance(one, BaseException)]
        assert outcomes.index(error) == 7
        assert "left out" in str(error) or "refused" in str(error)
        with pytest.raises(type(error), match=r"left out|refused"):
            await client.insert(Data(n=7))
        await client.insert(Data(n=100))
    assert sorted(await stored(schema)) == [*range(7), *range(8, 60), 100]


@pytest.mark.usefixtures("sender")
async def test_a_lost_connection(schema: Schema) -> None:
    """If the connection is lost, all calls of the statement get an error that says that their job
    may be stored. The calls that wait are inserted over a new connection."""
    async with inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(*range(1, 5))
            await asyncio.sleep(0)
            pid = await calls.until_blocked()
            await schema.execute("SELECT pg_terminate_backend($1, 5000)", pid)
            await asyncio.wait(calls.tasks[:1])
        first, *rest = await calls.outcomes()
        assert isinstance(first, ConnectionError)
        assert "may be stored" in str(first)
        assert rest == [1, 2, 3, 4]
        await schema.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE application_name = $1 AND datname = current_database()",
            NAME,
        )
        sender = client._inserter._shared_sender
        assert sender is not None
        with anyio.fail_after(10):
            while sender._get_open_connection() is not None:
                await anyio.sleep(0.002)
        await client.insert(Data(n=5))  # over a new connection
    assert await stored(schema) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("sender")
async def test_cancelled_calls(schema: Schema) -> None:
    """A call that is cancelled before its statement is sent takes its job out. Later the job may be
    stored. Other calls are not affected. A statement without a call is cancelled on the server, and
    its connection is used again."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    async with inserting(schema) as client:
        (backend,) = await schema.fetch(BACKENDS, NAME, "")
        async with calls_in_flight(schema, client) as calls:
            calls.insert(*range(1, 6))
            await asyncio.sleep(0)
            for number in (0, 2, 4):
                calls.tasks[number].cancel()
            await asyncio.wait(calls.tasks[:1], timeout=10)
            await calls.until_blocked("unnest")  # the next statement, which has several jobs
            calls.insert(6)
            await asyncio.sleep(0)
        outcomes = await calls.outcomes()
        assert [outcomes[number] for number in (1, 3, 5, 6)] == [1, 3, 5, 6]
        assert all(isinstance(one, asyncio.CancelledError) for one in outcomes[:6:2])
        (same,) = await schema.fetch(BACKENDS, NAME, "")
        assert same["pid"] == backend["pid"]
        assert await stored(schema) == [1, 3, 5, 6]
        async with calls_in_flight(schema, client) as calls:
            calls.tasks[0].cancel()
            await asyncio.wait(calls.tasks, timeout=10)
    assert await schema.fetch(BACKENDS, NAME, "") == []
    calls.tasks.clear()
    gc.collect()
    assert problems == []


@pytest.mark.usefixtures("sender")
async def test_closing_sends_what_waits(schema: Schema) -> None:
    """Closing the client sends the jobs that wait, and closes the connection."""
    for waiting in (range(1, 6), ()):
        async with inserting(schema) as client, blocked(schema):
            calls = Calls(schema, client)
            calls.insert(0)
            await calls.until_blocked()
            calls.insert(*waiting)
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(client._inserter.close())
            await asyncio.sleep(0)
        await closing
        assert await calls.outcomes() == [0, *waiting]
        assert await schema.fetch(BACKENDS, NAME, "") == []


LATER = datetime(2200, 1, 1, tzinfo=UTC)
OPTIONS = [
    None,
    InsertOpts(queue="other", priority=3, max_attempts=7, tags=["vip", "new_one"]),
    InsertOpts(metadata={"ä": [1, None]}, notify_end=True),
    InsertOpts(scheduled_at=LATER),
    InsertOpts(pending=True),
    InsertOpts(expires_in=timedelta(hours=1), metadata={"a": 1}),
]
NOT_COMPARED = {"id", "created_at", "scheduled_at"}


async def test_rows_equal_those_of_transactions(schema: Schema) -> None:
    """A shared statement stores the same rows as an insert in a transaction, and returns them as
    they are stored."""
    batch = [InsertManyParams(Welcome(1, 'q"\\é'), opts) for opts in OPTIONS]
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        results = await client.insert_many(batch)
        async with schema.connected() as connection, connection.transaction():
            await client.insert_many(batch, tx=connection)
        for result in results:
            found = await client.job_get(result.job.id)
            assert len(result.job.get_encoded_values()) == len(found.get_encoded_values())
            names = [name for name, one in vars(JobRow).items() if isinstance(one, property)]
            assert "created_at" in names
            for name in names:
                assert getattr(result.job, name) == getattr(found, name), name
    rows = [dict(row) for row in await schema.jobs()]
    for row in rows:
        row["metadata"] = row["metadata"].split("riverpy:expires_at")[0]
        row["is_later"] = row["scheduled_at"] > row["created_at"]
    kept = [{key: row[key] for key in row.keys() - NOT_COMPARED} for row in rows]
    assert kept[: len(OPTIONS)] == kept[len(OPTIONS) :]


async def test_which_calls_share(schema: Schema) -> None:
    """Unique jobs, calls of more than 100 jobs, COPY and clients with a pool of the caller's use no
    reserved connection."""
    config = Config(schema=schema.name)
    async with asyncpg.create_pool(schema.url, min_size=1, max_size=1) as pool:
        for database in (pool, schema.url):
            async with Client(database, config=config) as client:
                await client.insert(Welcome(1), BY_ARGS)
                await client.insert_many(many(*map(Welcome, range(101))))
                await client.insert_many_fast(many(Welcome(1)))
                if database is pool:
                    await client.insert(Welcome(1))
                assert await schema.fetch(BACKENDS, NAME, "") == []
                if database is not pool:
                    await client.insert_many(many(*map(Welcome, range(100))))
                    assert len(await schema.fetch(BACKENDS, NAME, "")) == 1


async def test_limits(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement has a limited number of jobs and bytes. A call that waits for too long fails, in
    the backlog or before it, and its job is not stored."""
    monkeypatch.setattr(insert_backlog, "STATEMENT_JOBS_MAX", 3)
    async with inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(1, 2, 3, 4)
            batch = [InsertManyParams(Data(n=n)) for n in range(5, 10)]
            calls.start(client.insert_many(batch))
            await asyncio.sleep(0)
        assert (await asyncio.gather(*calls.tasks[:5]))[4].job.id == 5 + 1
        assert len(await calls.tasks[5]) == len(batch)
        counts = "SELECT count(*) FROM river_job GROUP BY xmin::text::bigint ORDER BY min(id)"
        assert [row[0] for row in await schema.fetch(counts)] == [1, 3, 1, 5]
        monkeypatch.setattr(insert_backlog, "STATEMENT_BYTES_MAX", 16)
        async with calls_in_flight(schema, client) as calls:
            calls.insert(1, 2, 3)
            await asyncio.sleep(0)
        await asyncio.gather(*calls.tasks)
        assert [row[0] for row in await schema.fetch(counts)] == [1, 3, 1, 5, 1, 1, 1, 1]
    monkeypatch.setattr(insert_backlog, "BACKLOG_JOBS_MAX", 2)
    monkeypatch.setattr(insert_backlog, "STATEMENT_BYTES_MAX", 100)
    async with inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(1, 2, 3)
            await asyncio.sleep(0)
            calls.tasks[2].cancel()  # so that the third has room before the next statement
            await asyncio.wait(calls.tasks[2:3])
        await asyncio.wait(calls.tasks)
        assert [row[0] for row in await schema.fetch(counts)] == [1, 2]
    monkeypatch.setattr(shared_statement, "ACQUIRE_CONNECTION_TIMEOUT", 0.2)
    async with inserting(schema) as client:
        await schema.execute("DELETE FROM river_job")
        async with calls_in_flight(schema, client) as calls:
            calls.insert(1, 2, 3)
            await asyncio.wait(calls.tasks[1:])
        assert await calls.tasks[0]
        for task in calls.tasks[1:]:
            with pytest.raises(TimeoutError, match=r"not sent within|not inserted within"):
                await task
    assert await stored(schema) == [0]


async def test_a_statement_timeout_of_the_role(schema: Schema) -> None:
    """While inserts wait for a lock for longer than the `statement_timeout` of the role, all calls
    fail soon, and nothing is stored. A slow job alone delays no other."""
    url = f"{schema.url}{'&' if '?' in schema.url else '?'}statement_timeout=100"
    async with Client(url, config=Config(schema=schema.name)) as client:
        calls = Calls(schema, client)
        async with blocked(schema):
            calls.insert(*range(50))
            with anyio.fail_after(10):
                await asyncio.wait(calls.tasks)
        outcomes = await calls.outcomes()
        assert {type(one) for one in outcomes} == {asyncpg.QueryCanceledError}
        assert await stored(schema) == []
        async with refusing(schema, "slow"):
            calls = Calls(schema, client)
            calls.insert(*range(30))
            outcomes = await calls.outcomes()
        assert isinstance(outcomes.pop(7), asyncpg.QueryCanceledError)
        assert outcomes == [*range(7), *range(8, 30)]


async def test_closing_is_bounded(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, sender: str
) -> None:
    """If the jobs that wait cannot be sent while the client closes, their calls fail. No connection
    is made after that."""
    monkeypatch.setattr(shared_statement, "CLOSE_TIMEOUT", 0.1)
    async with inserting(schema) as client, blocked(schema):
        calls = Calls(schema, client)
        calls.insert(0)
        await calls.until_blocked()
        calls.insert(1)
        await asyncio.sleep(0)
        await client._inserter.close()
        first = ClientStateError if sender == "caller" else ConnectionError
        with pytest.raises(first, match=r"closed before|may be stored"):
            await calls.tasks[0]
        with pytest.raises(ClientStateError, match="closed before"):
            await calls.tasks[1]
    assert await stored(schema) == []
    if sender == "caller":
        monkeypatch.setattr(shared_statement, "ROLLBACK_RETRY_DELAY_MIN", timedelta(seconds=0.5))
        monkeypatch.setattr(shared_statement, "ROLLBACK_RETRY_DELAY_MAX", timedelta(seconds=0.5))
        async with refusing(schema, "always a conflict"), inserting(schema) as client:
            calls = Calls(schema, client)
            calls.insert(7)
            await asyncio.sleep(0)
            await client._inserter.close()
            with pytest.raises(ClientStateError, match="closed before"):
                await calls.tasks[0]
    assert await schema.fetch(BACKENDS, NAME, "") == []


@pytest.mark.usefixtures("sender")
async def test_connecting_is_retried(schema: Schema) -> None:
    """While the database is unavailable, the client tries to connect again. After an error that a
    retry cannot solve, all calls that wait fail at once."""
    failures: list[Exception] = [
        asyncpg.InvalidPasswordError("wrong password"),
        ConnectionRefusedError("refused"),
        asyncpg.CannotConnectNowError("the database system is starting up"),
    ]
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        sender = client._inserter._shared_sender
        assert sender is not None
        connect = sender._connect

        async def fail_first() -> Any:
            if failures:
                raise failures.pop()
            return await connect()

        sender._connect = fail_first
        calls = Calls(schema, client)
        calls.insert(1, 2)
        outcomes = await calls.outcomes()
        assert {type(one) for one in outcomes} == {asyncpg.InvalidPasswordError}
        await client.insert(Data(n=3))
    assert failures == []
    assert await stored(schema) == [3]


@pytest.mark.usefixtures("sender")
async def test_a_conflict_of_serializable_statements(schema: Schema) -> None:
    """A statement that the server rolls back for a conflict is sent again."""
    async with refusing(schema, "conflict"), inserting(schema) as client:
        await schema.execute("CREATE SEQUENCE conflicts")
        assert number_of(await client.insert(Data(n=7))) == 7
        assert await schema.fetchval("SELECT last_value FROM conflicts") == 3
        await schema.execute("DROP SEQUENCE conflicts")


async def test_calls_keep_their_order_while_they_wait_for_room(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that wait for room in the backlog are inserted in the order of their arrival. A call
    that arrives when there is room again, and a cancelled call, change nothing in this order."""
    monkeypatch.setattr(insert_backlog, "BACKLOG_JOBS_MAX", 2)
    monkeypatch.setattr(insert_backlog, "STATEMENT_JOBS_MAX", 1)
    async with inserting(schema) as client:

        async def insert_twice() -> InsertResult:
            await client.insert(Data(n=1))
            return await client.insert(Data(n=10))

        async with calls_in_flight(schema, client) as calls:
            calls.start(insert_twice())
            calls.insert(*range(2, 10))
            await asyncio.sleep(0)
            calls.tasks[5].cancel()
        await asyncio.wait(calls.tasks)
    assert await stored(schema) == [*range(5), *range(6, 11)]


async def test_a_connection_that_was_idle_for_long(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long idle time the connection is made again."""
    async with inserting(schema) as client:
        (first,) = await schema.fetch(BACKENDS, NAME, "")
        await client.insert(Data(n=1))
        (same,) = await schema.fetch(BACKENDS, NAME, "")
        assert same["pid"] == first["pid"]
        monkeypatch.setattr(shared_statement, "CONNECTION_IDLE_SECONDS_MAX", 0)
        await client.insert(Data(n=2))
        monkeypatch.undo()
        with anyio.fail_after(10):
            while len(found := await schema.fetch(BACKENDS, NAME, "")) > 1:
                await anyio.sleep(0.002)
        assert found[0]["pid"] != first["pid"]
    assert await stored(schema) == [1, 2]
