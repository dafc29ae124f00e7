"""Inserts of several calls that share a statement."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Client, Config, InsertManyParams
from tests.insert.jobs import Data

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from riverpy import InsertResult
    from tests._database import Schema

NAME = "riverpy inserts"
BACKENDS = (
    "SELECT pid, wait_event_type FROM pg_stat_activity"
    " WHERE application_name = $1 AND datname = current_database() AND query ~ $2"
)


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

    async def until_blocked(self) -> int:
        """Wait until a shared statement waits for a lock. Return its process id."""
        with anyio.fail_after(10):
            while True:
                for row in await self._schema.fetch(BACKENDS, NAME, self._schema.name):
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


REFUSALS = {
    "constraint": "ALTER TABLE river_job ADD CONSTRAINT refused CHECK (args <> '{\"n\": 7}')",
    "trigger": """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF new.args = '{"n": 7}' THEN RAISE 'refused'; END IF;
            RETURN new;
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION refuse()
    """,
    "left out": """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF new.args = '{"n": 7}' THEN RETURN NULL; END IF;
            RETURN new;
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION refuse()
    """,
}


@asynccontextmanager
async def refusing(schema: Schema, refusal: str) -> AsyncGenerator[None]:
    """Let the server refuse the job with the number 7."""
    await schema.execute(REFUSALS[refusal])
    try:
        yield
    finally:
        await schema.execute(
            "DROP FUNCTION IF EXISTS refuse CASCADE;"
            "ALTER TABLE river_job DROP CONSTRAINT IF EXISTS refused"
        )


@pytest.mark.parametrize("refusal", REFUSALS)
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
        await client.insert(Data(n=5))  # over a new connection
    assert await stored(schema) == [1, 2, 3, 4, 5]


async def test_cancelled_calls(schema: Schema) -> None:
    """A call that is cancelled before its statement is sent takes its job out. Later the job may be
    stored. Other calls are not affected."""
    async with inserting(schema) as client:
        async with calls_in_flight(schema, client) as calls:
            calls.insert(*range(1, 6))
            await asyncio.sleep(0)
            for number in (0, 2, 4):
                calls.tasks[number].cancel()
        outcomes = await calls.outcomes()
        assert outcomes[1::2] == [1, 3, 5]
        assert all(isinstance(one, asyncio.CancelledError) for one in outcomes[::2])
    assert await stored(schema) == [0, 1, 3, 5]


async def test_closing_sends_what_waits(schema: Schema) -> None:
    """Closing the client sends the jobs that wait, and closes the connection."""
    async with inserting(schema) as client, calls_in_flight(schema, client) as calls:
        calls.insert(*range(1, 6))
        await asyncio.sleep(0)
    assert await calls.outcomes() == [*range(6)]
    assert await schema.fetch(BACKENDS, NAME, "") == []
