"""Assertions on inserted jobs, over every kind of session."""

from __future__ import annotations

import inspect
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import riverpy.sync
from riverpy import Client, Config, InsertManyParams, InsertOpts, RawArgs
from riverpy.testing import (
    InsertedJobs,
    expect_job,
    recording,
    require_inserted,
    require_many_inserted,
)
from tests.sessions.kinds import ALL_KINDS
from tests.testing.args import Invoice, Model, Payload, Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy.testing import RecordedJobs
    from tests._database import Schema
    from tests.sessions.kinds import Caller


@pytest.fixture(params=ALL_KINDS)
async def caller(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Caller]:
    """A caller of each kind, in a transaction."""
    async with ALL_KINDS[request.param](schema.url) as caller:
        yield caller


async def test_require_inserted_reads_with_every_kind_of_session(
    caller: Caller, schema: Schema
) -> None:
    """A job that is not committed is found over its own session, and a failure shows it."""
    client: Any = caller.make_client(Config(schema=schema.name))
    await client.insert(Welcome(1), tx=caller.tx)

    async def check(**fields: Any) -> Any:
        def call() -> Any:
            return require_inserted(Welcome, tx=caller.tx, schema=schema.name, **fields)

        found = await caller.call(call)
        return await found if inspect.isawaitable(found) else found

    job = await check(user_id=1, queue="mail")
    assert (job.args, job.state) == (Welcome(1), "available")
    with pytest.raises(AssertionError, match=r"user_id: expected 2, found 1"):
        await check(user_id=2)


async def test_require_inserted_reads_from_a_pool_and_a_client(schema: Schema) -> None:
    """A committed job is found through an open client, its pool, and connections outside of a
    transaction, which are in none afterwards."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        await client.insert(Welcome(1))
        await require_inserted(Welcome(1), tx=client)
        pool = client._get_open_pool()
        await require_inserted(Welcome(1), tx=pool, schema=schema.name)
        async with pool.acquire() as connection:
            await require_inserted(Welcome(1), tx=connection, schema=schema.name)
    for is_autocommit in (False, True):
        other = await psycopg.AsyncConnection.connect(schema.url, autocommit=is_autocommit)
        async with other:
            await require_inserted(Welcome(1), tx=other, schema=schema.name)
            assert other.info.transaction_status == TransactionStatus.IDLE
    with psycopg.connect(schema.url) as blocking:
        require_inserted(Welcome(1), tx=blocking, schema=schema.name)
        assert blocking.info.transaction_status == TransactionStatus.IDLE


async def test_lists_and_sequences_are_read_from_a_session(schema: Schema) -> None:
    """The other assertions read a session as `require_inserted` does."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        await client.insert_many([InsertManyParams(args) for args in (Welcome(1), Invoice(2))])
        found = InsertedJobs(client)
        jobs = await found.require_many_inserted([Welcome(1), Invoice])
        assert [type(job.args) for job in jobs] == [Welcome, Invoice]
        assert [job.args for job in await found.inserted(Welcome, user_id=1)] == [Welcome(1)]
        await found.require_not_inserted(Model)
        with pytest.raises(AssertionError, match="There is no job of kind 'model'"):
            await found.require_inserted(Model)
        with pytest.raises(AssertionError, match="no inserted job should be Welcome, and 1 is"):
            await found.require_not_inserted(Welcome)


GO_ARGS = json.dumps({"id": 5, "text": "a" * 999 + "c"})
DUE = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def recorded() -> RecordedJobs:
    """Some jobs."""
    client = riverpy.sync.Client()
    with recording() as recorded:
        for args, opts in (
            (Welcome(1, "Ada"), InsertOpts(tags=["new", "paid"])),
            (Welcome(1, "Bob"), InsertOpts(scheduled_at=DUE)),
            (Payload(n=[1, 2], when=DUE), None),
            (Invoice(7, queue="paper"), InsertOpts(queue="printer", priority=2)),
            (RawArgs("go_job", GO_ARGS), None),
            (RawArgs("model", '{"user_id": "x"}'), None),
        ):
            client.insert(args, opts)
    return recorded


@pytest.mark.parametrize(
    "expected",
    [
        expect_job(Welcome(1, "Ada")),
        expect_job(Welcome, user_id=ANY, name="Ada"),
        expect_job(Welcome, tags=["paid", "new"]),
        expect_job(Welcome, scheduled_at=DUE, state="scheduled"),
        expect_job(Welcome, scheduled_at=pytest.approx(DUE, abs=timedelta(hours=1))),
        expect_job(Payload, n=(1, 2), when=DUE),
        expect_job(Payload(n=[1, 2], when=DUE)),
        expect_job(Invoice, queue="printer", priority=2, args={"queue": "paper"}),
        expect_job("go_job", id=5),
        expect_job(RawArgs("go_job", GO_ARGS)),
    ],
    ids=str,
)
def test_one_job_is_found(recorded: Any, expected: Any) -> None:
    """Args, single fields and options select one job."""
    assert recorded.require_inserted(expected).kind in expected.kinds


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (
            expect_job(Welcome(1)),
            """\
no inserted job is Welcome({"user_id":1,"name":""})
2 jobs of this kind, the nearest first:
  job 2 of kind 'welcome', scheduled in queue 'mail', args {"user_id":1,"name":"Bob"}
    name: expected '', found 'Bob'
  job 1 of kind 'welcome', available in queue 'mail', args {"user_id":1,"name":"Ada"}
    name: expected '', found 'Ada'""",
        ),
        (
            expect_job(Welcome, name="Ada", tags=["new"], max_attempts=3),
            """\
the nearest first:
  job 1 of kind 'welcome', available in queue 'mail', args {"user_id":1,"name":"Ada"}
    max_attempts: expected 3, found 7
    tags: expected ['new'], found ['new', 'paid']""",
        ),
        (expect_job(Welcome, user_id=1), "2 inserted jobs are Welcome(user_id=1), and one was"),
        (
            expect_job(Payload(n=[1])),
            "    when: expected no such field, found '2030-01-01",
        ),
        (
            expect_job("go_job", text="a" * 999 + "b"),
            f"    text: expected …{'a' * 40}b', found …{'a' * 40}c'",
        ),
        (
            expect_job(Invoice, queue="paper"),
            "    queue (the option; write args={'queue': …} for the field): expected 'paper'",
        ),
        (expect_job(Model), "the args of job 6 cannot be decoded as Model: "),
        (expect_job(Model, user_id=1), "    args: expected args of Model, found the args of job"),
        (
            expect_job("none"),
            "There is no job of kind 'none'. There are\n  job 1 of kind",
        ),
    ],
    ids=[
        "args",
        "options",
        "several",
        "no-field",
        "long",
        "option",
        "damaged",
        "damaged-field",
        "no-kind",
    ],
)
def test_a_failure_shows_the_nearest_jobs(recorded: Any, expected: Any, text: str) -> None:
    """The message names what differs, the nearest job first."""
    with pytest.raises(AssertionError) as raised:
        recorded.require_inserted(expected)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ([Welcome], "1 job of these kinds should be inserted, and there are 2\n"),
        (
            [Invoice, Payload],
            "inserted job 1 of 2 should be Invoice, and is\n  job 3 of kind",
        ),
        ([Welcome, Welcome(1, "Eve")], "    name: expected 'Eve', found 'Bob'\n"),
    ],
)
def test_a_sequence_has_all_jobs_of_its_kinds(recorded: Any, expected: Any, text: str) -> None:
    """Too few jobs, another order and other args are failures."""
    with pytest.raises(AssertionError) as raised:
        recorded.require_many_inserted(expected)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: expect_job(Welcome, user_idd=1), TypeError, "did you mean user_id?"),
        (lambda: expect_job(Welcome, queu="mail"), TypeError, "did you mean queue?"),
        (lambda: expect_job(Welcome, state="done"), ValueError, "state is one of available"),
        (lambda: expect_job(Welcome, scheduled_at=datetime(2030, 1, 1)), ValueError, "time zone"),
        (lambda: expect_job(int), TypeError, "int has no kind"),
        (lambda: require_inserted("welcome", tx="default"), TypeError, 'expect_job("welcome")'),
        (lambda: require_inserted(Welcome, tx=object()), TypeError, "tx must be"),
        (lambda: require_many_inserted(Welcome, tx="default"), TypeError, "as in [Welcome]"),
    ],
)
async def test_wrong_arguments_are_refused(call: Any, error: Any, text: str) -> None:
    """The error says what to write instead."""

    async def run() -> None:
        await call()

    with pytest.raises(error) as raised:
        await run()
    assert text in str(raised.value)


def test_a_call_without_await_is_named() -> None:
    """Python's warning has the name of the assertion."""
    with pytest.warns(RuntimeWarning, match="coroutine 'require_inserted' was never awaited"):
        require_inserted(Welcome, tx=Client())
