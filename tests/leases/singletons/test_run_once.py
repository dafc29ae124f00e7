"""Effects that happen once for a key: in a transaction, at most once, or at least once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import (
    Claim,
    Client,
    ClientStateError,
    Config,
    ConfigError,
    Execution,
    ExecutionState,
    LeaderTerm,
    SchemaMissingError,
    TransactionError,
)
from riverpy import client as client_module
from riverpy._calls import executions
from riverpy._log_events import EXECUTION_END_NOT_RECORDED
from riverpy._maintenance.execution_cleaner import RUN_INTERVAL, RunOnceKeyCleaner
from riverpy._postgres.executions import execution_claim, execution_delete_expired
from riverpy.migrate import Migrator
from tests._time import settle
from tests.kit.proxy import Partition, proxied
from tests.leading.term_context import held_term

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from tests._database import Schema

RAN, DONE_BEFORE = ExecutionState.RAN, ExecutionState.DONE_BEFORE
IN_PROGRESS, UNKNOWN = ExecutionState.IN_PROGRESS, ExecutionState.UNKNOWN
SHORT = timedelta(milliseconds=300)
LONG = timedelta(seconds=30)


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client, and a table for effects."""
    await schema.execute("create table effect (name text)")
    try:
        async with opened(schema, "one") as client:
            yield client
    finally:
        await schema.execute("drop table effect")


@asynccontextmanager
async def opened(schema: Schema, client_id: str) -> AsyncGenerator[Client]:
    """Open another client, as in another process."""
    async with Client(schema.url, config=Config(schema=schema.name, id=client_id)) as client:
        yield client


async def effects(schema: Schema) -> list[str]:
    """Return the effects in order."""
    return [row[0] for row in await schema.fetch("select name from effect")]


def writing(schema: Schema, name: str = "a") -> Any:
    """Return an effect in the database."""

    async def write(connection: Any) -> str:
        await connection.execute(f"insert into {schema.name}.effect values ($1)", name)
        return f"wrote {name}"

    return write


class Mailer:
    """An effect outside of the database."""

    def __init__(self) -> None:
        self.sent: list[Claim] = []
        self.entered = anyio.Event()
        self.may_end = anyio.Event()
        self.error: Exception | None = None

    async def send(self, claim: Claim) -> int:
        self.sent.append(claim)
        self.entered.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return len(self.sent)


async def test_once(client: Client, schema: Schema) -> None:
    """The first call runs the function and returns its result. A second call, of another client,
    does not run it, and returns the client that did."""
    first = await client.run_once("invoice 7", writing(schema))
    assert (first.state, first.value, first.ran) == (RAN, "wrote a", True)
    async with opened(schema, "two") as other:
        second = await other.run_once("invoice 7", writing(schema))
        assert (second.state, second.value, second.ran) == (DONE_BEFORE, None, False)
        assert second.claimed_by == "one"
        assert second.claimed_at is not None
        assert (await other.run_once("invoice 8", writing(schema, "b"))).ran
    assert await effects(schema) == ["a", "b"]


@pytest.mark.parametrize(
    "ends",
    [
        "select 1 / 0",
        "rollback",
        "rollback; begin",
        "rollback and chain",
        "rollback; begin; create temp table t ()",
    ],
)
@pytest.mark.parametrize("is_given", [False, True])
async def test_effect_that_hides_its_end(
    client: Client, schema: Schema, ends: str, is_given: bool
) -> None:
    """If a function hides the error of a statement, or ends or replaces the transaction, its record
    is undone with the effect. The call raises an error, also where the server would accept the
    commit. A transaction of the caller can be used, or the error says that it has ended."""

    async def hide(connection: Any) -> None:
        await writing(schema)(connection)
        with suppress(asyncpg.DivisionByZeroError):
            await connection.execute(ends)

    async with AsyncExitStack() as stack:
        tx: Any = None
        if is_given:
            tx = await stack.enter_async_context(schema.connected())
            await tx.transaction().start()
        with pytest.raises((asyncpg.InvalidTransactionStateError, TransactionError)) as raised:
            await client.run_once("k", hide, tx=tx)
        if is_given and isinstance(raised.value, TransactionError):
            assert "has ended or is aborted" in str(raised.value)
        elif is_given:
            assert await tx.fetchval("select 1") == 1
    assert await effects(schema) == []
    assert (await client.run_once("k", writing(schema))).ran
    assert await effects(schema) == ["a"]


async def test_effect_that_commits(client: Client, schema: Schema) -> None:
    """If a function commits, its effect and the record are stored. The error says that it ended the
    transaction, and nothing after that is stored."""

    async def commit(connection: Any) -> None:
        await writing(schema)(connection)
        await connection.execute("commit and chain")
        await writing(schema, "b")(connection)

    with pytest.raises(TransactionError, match="has ended the transaction"):
        await client.run_once("k", commit)
    assert await effects(schema) == ["a"]
    assert (await client.run_once("k", writing(schema))).state == DONE_BEFORE


LIMITS = ("lock_timeout = '20ms'", "statement_timeout = '150ms'")
ISOLATIONS = ("repeatable read", "serializable")


@asynccontextmanager
async def client_of_role(schema: Schema, setting: str) -> AsyncGenerator[Client]:
    """Open a client whose sessions have this setting by default."""
    name, _, value = setting.partition(" = ")
    settings = {"search_path": schema.name, name: value.strip("'")}
    async with (
        asyncpg.create_pool(schema.url, min_size=0, max_size=4, server_settings=settings) as pool,
        Client(pool, config=Config(schema=schema.name, id="role")) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "setting",
    [*LIMITS, *(f"default_transaction_isolation = '{level}'" for level in ISOLATIONS)],
)
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_settings_of_a_role(client: Client, schema: Schema, setting: str, end: str) -> None:
    """With a lock timeout or another isolation level of the role, a call still waits for another
    call with its key. It runs if the other is rolled back, and does not if the other commits."""
    async with client_of_role(schema, setting) as limited, schema.connected() as holder:
        await holder.execute("begin")
        assert (await client.run_once("k", writing(schema), tx=holder)).ran
        busy = await limited.run_once("k", writing(schema), wait=SHORT)
        assert busy.state == IN_PROGRESS
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(limited.run_once("k", writing(schema, "b"), wait=LONG))]
            if end == "commit":
                calls.append(tasks.create_task(limited.run_at_least_once("k", note)))
            if "isolation" not in setting:
                calls.append(tasks.create_task(given(limited, schema, setting)))
            await until_waiting(schema, 1)
            await holder.execute(end)
    states = [call.result().state for call in calls]
    assert states.count(RAN) == (0 if end == "commit" else 1)
    assert states.count(DONE_BEFORE) == len(calls) - states.count(RAN)


async def note(_claim: Claim) -> None:
    """An effect of which nothing is seen."""


async def given(client: Client, schema: Schema, setting: str) -> Execution[Any]:
    """A call in a transaction of a session with this setting."""
    async with schema.connected() as tx:
        await tx.execute(f"set {setting}")
        async with tx.transaction():
            return await client.run_once("k", writing(schema, "b"), wait=LONG, tx=tx)


async def test_codecs_of_the_caller(client: Client, schema: Schema) -> None:
    """Codecs that the caller set on its connection are not used."""

    def refuse(value: Any) -> Any:
        raise AssertionError(f"a codec of the caller's saw {value!r}")

    assert (await client.run_once("before", writing(schema))).ran
    async with schema.connected() as tx:
        for name in ("text", "int8", "bool", "timestamptz", "interval", "json", "jsonb", "uuid"):
            await tx.set_type_codec(name, schema="pg_catalog", encoder=refuse, decoder=refuse)
        async with tx.transaction():
            answer = await client.run_once("before", writing(schema), tx=tx)
            assert (answer.state, answer.claimed_by) == (DONE_BEFORE, "one")
            assert answer.claimed_at is not None
            assert answer.claimed_at.tzinfo is not None
            assert (await client.run_once("k", note_nothing, tx=tx)).ran


async def note_nothing(_connection: Any) -> None:
    """An effect of which nothing is seen."""


async def test_snapshot_of_the_caller(client: Client, schema: Schema) -> None:
    """If the snapshot of the caller's transaction is from before the effect, the call raises an
    error and the transaction can be used."""
    async with schema.connected() as tx, tx.transaction(isolation="repeatable_read"):
        await tx.fetchval("select 1 from effect")
        assert (await client.run_once("k", writing(schema))).ran
        with pytest.raises(asyncpg.SerializationError):
            await client.run_once("k", writing(schema), tx=tx)
        assert await tx.fetchval("select 1") == 1
    assert await effects(schema) == ["a"]


async def test_failed_effect_never_happened(client: Client, schema: Schema) -> None:
    """A failed effect is rolled back with its record. The error is raised, and a later call runs
    it."""

    async def fail(connection: Any) -> None:
        await writing(schema)(connection)
        raise LookupError("no such invoice")

    with pytest.raises(LookupError):
        await client.run_once("k", fail)
    assert await effects(schema) == []
    assert (await client.run_once("k", writing(schema))).ran
    assert await effects(schema) == ["a"]


async def test_in_the_callers_transaction(client: Client, schema: Schema) -> None:
    """With `tx=` the effect is stored when the caller commits. After a failed effect the
    transaction can be used."""

    async def fail(connection: Any) -> None:
        await connection.execute("select 1 / 0")

    async with schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert (await client.run_once("k", writing(schema), tx=connection)).ran
        await transaction.rollback()
        assert await effects(schema) == []
        async with connection.transaction():
            with pytest.raises(Exception, match="division by zero"):
                await client.run_once("k", fail, tx=connection)
            assert (await client.run_once("k", writing(schema), tx=connection)).ran
            again = await client.run_once("k", writing(schema), tx=connection)
            assert again.state == DONE_BEFORE
    assert await effects(schema) == ["a"]


async def test_calls_at_the_same_time(client: Client, schema: Schema) -> None:
    """Of eight calls at once one runs the function. The others wait for it and do not run it."""
    answers: list[ExecutionState] = []

    async def call() -> None:
        answers.append((await client.run_once("k", writing(schema))).state)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(call)
    assert sorted(answers, key=lambda state: state.value) == [DONE_BEFORE] * 7 + [RAN]
    assert await effects(schema) == ["a"]


async def test_waits_for_the_outcome(client: Client, schema: Schema) -> None:
    """A call waits for an uncommitted one for `wait`, then raises that it is in progress, and a
    transaction of the caller can be used. If the other is rolled back, it runs."""
    async with schema.connected() as holder, schema.connected() as waiter:
        transaction = holder.transaction()
        await transaction.start()
        assert (await client.run_once("k", writing(schema), tx=holder)).ran
        assert (await client.run_once("k", writing(schema), wait=SHORT)).state == IN_PROGRESS
        async with waiter.transaction():
            answer = await client.run_once("k", writing(schema), wait=SHORT, tx=waiter)
            assert answer.state == IN_PROGRESS
            assert await waiter.fetchval("select 1") == 1
        claimed = client.run_at_least_once("k", Mailer().send)
        waiting = asyncio.create_task(client.run_once("k", writing(schema, "b"), wait=LONG))
        await until_waiting(schema, 1)
        await transaction.rollback()
        assert (await waiting).state == RAN
        assert (await claimed).state == DONE_BEFORE
    assert await effects(schema) == ["b"]


async def until_waiting(schema: Schema, count: int) -> None:
    """Return when this many statements wait for a row of riverpy."""
    while True:
        found = await schema.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and wait_event_type = 'Lock' and query like $1",
            f'%"{schema.name}".riverpy_exec%',
        )
        if found >= count:
            return
        await anyio.sleep(0.01)


async def test_at_most_once(client: Client) -> None:
    """The function runs once, with an epoch as token. While it runs, it is in progress. After it
    failed, the result is unknown and it does not run again. After its end it is done."""
    mailer = Mailer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.run_at_most_once, "mail 1", mailer.send)
        await mailer.entered.wait()
        with anyio.fail_after(5):  # the calls do not wait
            for call in (client.run_at_most_once, client.run_at_least_once, client.run_once):
                answer = await call("mail 1", mailer.send)  # type: ignore[arg-type]
                assert (answer.state, answer.claimed_by) == (IN_PROGRESS, "one")
        mailer.may_end.set()
    assert (await client.run_at_most_once("mail 1", mailer.send)).state == DONE_BEFORE
    mailer.error = LookupError("bounced")
    with pytest.raises(LookupError):
        await client.run_at_most_once("mail 2", mailer.send)
    assert (await client.run_at_most_once("mail 2", mailer.send)).state == UNKNOWN
    assert (await client.run_at_least_once("mail 2", mailer.send)).state == UNKNOWN
    assert [claim.key for claim in mailer.sent] == ["mail 1", "mail 2"]
    assert mailer.sent[0].epoch > 10**15


async def test_at_least_once(client: Client) -> None:
    """While a call holds the claim, others do not run the function. A failed one is released at
    once and runs again with a higher epoch. After its end it is done."""
    mailer = Mailer()
    mailer.error = LookupError("bounced")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(failing, client, mailer)
        await mailer.entered.wait()
        answer = await client.run_at_least_once("mail", mailer.send)
        assert (answer.state, answer.claimed_by) == (IN_PROGRESS, "one")
        mailer.may_end.set()
    mailer.error = None
    answer = await client.run_at_least_once("mail", mailer.send)
    assert (answer.state, answer.value) == (RAN, 2)
    assert (await client.run_at_least_once("mail", mailer.send)).state == DONE_BEFORE
    first, second = mailer.sent
    assert second.epoch > first.epoch


async def failing(client: Client, mailer: Mailer) -> None:
    """Make a call whose function fails."""
    with pytest.raises(LookupError):
        await client.run_at_least_once("mail", mailer.send)


async def test_claim_of_a_crashed_process(client: Client, schema: Schema) -> None:
    """The claim of a crashed process can be taken over after it expires, not before."""
    await schema.execute(
        "insert into riverpy_exec (key, epoch, claimed_by, expires_at)"
        " values ('mail', 5, 'gone', now() + interval '1 hour')"
    )
    mailer = Mailer()
    mailer.may_end.set()
    answer = await client.run_at_least_once("mail", mailer.send)
    assert (answer.state, answer.claimed_by) == (IN_PROGRESS, "gone")
    await schema.execute("update riverpy_exec set expires_at = now() - interval '1 ms'")
    assert (await client.run_at_least_once("mail", mailer.send)).state == RAN
    row = await schema.fetchrow("select claimed_by, epoch > 5, completed_at from riverpy_exec")
    assert row is not None
    assert (row[0], row[1], row[2] is not None) == ("one", True, True)


async def test_what_was_done_does_not_expire(client: Client, schema: Schema) -> None:
    """An effect that succeeded stays done, however long ago its claim would have expired."""
    mailer = Mailer()
    mailer.may_end.set()
    assert (await client.run_at_least_once("mail", mailer.send)).ran
    await schema.execute("update riverpy_exec set expires_at = now() - interval '1 hour'")
    assert (await client.run_at_least_once("mail", mailer.send)).state == DONE_BEFORE
    assert len(mailer.sent) == 1


async def test_epochs_rise_though_the_clock_was_set_back(client: Client, schema: Schema) -> None:
    """A claim that is taken over gets a higher epoch than the last one, even if that is ahead of
    the server's clock."""
    ahead = 2 * 10**18
    await schema.execute(
        "insert into riverpy_exec (key, epoch, claimed_by, expires_at)"
        " values ('mail', $1, 'gone', '-infinity')",
        ahead,
    )
    mailer = Mailer()
    mailer.may_end.set()
    assert (await client.run_at_least_once("mail", mailer.send)).ran
    assert [claim.epoch for claim in mailer.sent] == [ahead + 1]


async def test_overtaken_and_failed(client: Client, schema: Schema) -> None:
    """A failed call whose claim was taken over releases nothing. The other call continues."""
    mailer, third = Mailer(), Mailer()
    third.may_end.set()
    async with opened(schema, "two") as other, anyio.create_task_group() as tasks:

        async def freeze(claim: Claim) -> None:
            await schema.execute("update riverpy_exec set expires_at = '-infinity'")
            tasks.start_soon(other.run_at_least_once, "mail", mailer.send)
            await mailer.entered.wait()
            raise LookupError("bounced")

        with pytest.raises(LookupError):
            await client.run_at_least_once("mail", freeze)
        answer = await client.run_at_least_once("mail", third.send)
        assert (answer.state, answer.claimed_by) == (IN_PROGRESS, "two")
        mailer.may_end.set()
    assert third.sent == []


async def test_overtaken(client: Client, schema: Schema) -> None:
    """A call whose claim was taken over gets an error, and completes nothing."""
    mailer = Mailer()

    async def freeze(claim: Claim) -> None:
        await schema.execute("update riverpy_exec set expires_at = '-infinity'")
        async with opened(schema, "two") as other:
            with pytest.raises(LookupError):
                await other.run_at_least_once("mail", mailer.send)

    mailer.may_end.set()
    mailer.error = LookupError("bounced")
    answer = await client.run_at_least_once("mail", freeze)
    assert (answer.state, answer.ran) == (ExecutionState.OVERTAKEN, True)
    assert await schema.fetchval("select completed_at from riverpy_exec") is None


async def test_code_is_cancelled_before_its_claim_expires(client: Client) -> None:
    """A function that runs longer than its claim is cancelled with an error, and the claim is
    released."""
    mailer = Mailer()
    with pytest.raises(TimeoutError, match="longer than its claim lasts"):
        await client.run_at_least_once("mail", mailer.send, expires_after=SHORT)
    mailer.may_end.set()
    assert (await client.run_at_least_once("mail", mailer.send, expires_after=LONG)).ran


@pytest.mark.parametrize("call", ["run_at_most_once", "run_at_least_once"])
async def test_cancelled_when_it_has_happened(client: Client, schema: Schema, call: str) -> None:
    """A completed effect is recorded even if the caller is cancelled repeatedly during this. A job
    at its timeout is cancelled like this, and a shielded scope does not prevent it. Then the
    cancellation is raised."""
    mailer = Mailer()
    mailer.may_end.set()

    async def send(claim: Claim) -> None:
        await mailer.send(claim)
        await connection.execute("begin; lock table riverpy_exec in exclusive mode")

    async with schema.connected() as connection:
        task = asyncio.create_task(getattr(client, call)("mail", send))
        for _ in range(2):
            await until_waiting(schema, 1)
            task.cancel()
            await settle()
        await connection.execute("commit")
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await client.run_at_least_once("mail", mailer.send)).state == DONE_BEFORE
    assert len(mailer.sent) == 1


async def test_end_that_cannot_be_noted(
    client: Client, schema: Schema, monkeypatch: pytest.MonkeyPatch, log: list[Any]
) -> None:
    """If the end of an effect cannot be recorded, this is logged, also if the caller is
    cancelled."""
    monkeypatch.setattr(executions, "RECORD_COMPLETION_TIMEOUT", 0.1)

    async def send(_claim: Claim) -> None:
        await connection.execute("begin; lock table riverpy_exec in exclusive mode")
        task.cancel()

    async with schema.connected() as connection:
        task = asyncio.create_task(client.run_at_most_once("mail", send))
        with pytest.raises(asyncio.CancelledError):
            await task
    (line,) = [one for one in log if one["event"] == EXECUTION_END_NOT_RECORDED]
    assert line["key"] == "mail"


async def test_cancelled_while_it_is_given_back(client: Client, schema: Schema) -> None:
    """The claim of a cancelled function is released, even if the caller is cancelled during
    this."""

    async def fail(_claim: Claim) -> None:
        await connection.execute("begin; lock table riverpy_exec in exclusive mode")
        raise LookupError("bounced")

    async with schema.connected() as connection:
        task = asyncio.create_task(client.run_at_least_once("mail", fail))
        await until_waiting(schema, 1)
        task.cancel()
        await settle()
        await connection.execute("commit")
        with pytest.raises(asyncio.CancelledError):
            await task
    mailer = Mailer()
    mailer.may_end.set()
    assert (await client.run_at_least_once("mail", mailer.send)).state == RAN


async def test_cancelled_while_it_is_claimed(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim whose caller is cancelled before the answer is released, because nothing has
    begun."""
    mailer = Mailer()
    mailer.may_end.set()

    async def claim_and_hold(connection: Any, *args: Any, **values: Any) -> int | None:
        epoch = await execution_claim(connection, *args, **values)
        proxy.hold()
        return epoch

    async with (
        proxied(schema.url) as proxy,
        Client(proxy.url, config=Config(schema=schema.name)) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(executions, "execution_claim", claim_and_hold)
            task = asyncio.create_task(client.run_at_most_once("k", mailer.send))
            await proxy.held.wait()
            task.cancel()
            await settle()
            await proxy.release()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert mailer.sent == []
        assert (await client.run_at_most_once("k", mailer.send)).state == RAN


async def test_claim_that_took_all_of_its_time(client: Client, schema: Schema) -> None:
    """A function does not start if its claim is granted after the claim's time has passed."""
    mailer = Mailer()
    async with schema.connected() as connection:
        await connection.execute("begin; lock table riverpy_exec in exclusive mode")
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(
                _too_late(client.run_at_least_once("mail", mailer.send, expires_after=SHORT))
            )
            await until_waiting(schema, 1)
            await asyncio.sleep(SHORT.total_seconds())
            await connection.execute("commit")
            await call
    assert mailer.sent == []


async def _too_late(call: Awaitable[object]) -> None:
    with pytest.raises(TimeoutError, match="longer than its claim lasts"):
        await call


async def test_no_connection(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no connection is available, each call raises TimeoutError. No call says that another one
    is in progress."""
    config = Config(schema=schema.name, pool_size=1)
    async with Client(schema.url, config=config) as client, client._transaction(None):
        monkeypatch.setattr(client_module, "ACQUIRE_CONNECTION_TIMEOUT", 0.05)
        for call in (client.run_once, client.run_at_most_once, client.run_at_least_once):
            with pytest.raises(TimeoutError, match="pool"):
                await call("k", Mailer().send)
    assert await schema.fetchval("select count(*) from riverpy_exec") == 0


async def test_answer_to_a_claim_is_lost(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the commit of a claim gets no answer, the call raises an error and its function does not
    run. Since the claim may be stored, an at-most-once effect is unknown for other clients, at the
    latest after the next such call of this client."""
    mailer = Mailer()
    async with proxied(schema.url) as proxy:

        async def claim_and_lose(connection: Any, *args: Any, **values: Any) -> int | None:
            epoch = await execution_claim(connection, *args, **values)
            proxy.partition = Partition.ANSWERS_LOST
            return epoch

        async with Client(proxy.url, config=Config(schema=schema.name)) as client:
            with monkeypatch.context() as patch:
                patch.setattr(client_module, "POOL_STATEMENT_TIMEOUT", 4.0)
                patch.setattr(executions, "execution_claim", claim_and_lose)
                with pytest.raises(TimeoutError, match="the call took longer"):
                    await client.run_at_most_once("k", mailer.send)
            await proxy.heal()
            async with opened(schema, "two") as other:
                assert (await other.run_at_most_once("k", mailer.send)).state == IN_PROGRESS
                await client.run_once("another", note_nothing)
                assert (await other.run_at_most_once("k", mailer.send)).state == UNKNOWN
    assert mailer.sent == []


@pytest.mark.parametrize("key", ["", "k" * 256, "a\0b", "\ud800", 7, None])
async def test_bad_keys(client: Client, schema: Schema, key: Any) -> None:
    """A key that cannot be stored is refused before a statement is sent (BI-01)."""
    for call in (client.run_once, client.run_at_most_once, client.run_at_least_once):
        with pytest.raises(ConfigError):
            await call(key, Mailer().send)
    assert await schema.fetchval("select count(*) from riverpy_exec") == 0


async def test_bad_functions(client: Client, schema: Schema) -> None:
    """What cannot be called with one argument is refused before it uses up the key. A callable
    without a signature is called."""
    bad: Any
    for bad in (None, "f", lambda: None, lambda a, b: None):
        for call in (client.run_once, client.run_at_most_once, client.run_at_least_once):
            with pytest.raises(ConfigError, match="fn must"):
                await call("k", bad)
    assert await schema.fetchval("select count(*) from riverpy_exec") == 0
    plain: Any = str
    for number, call in enumerate(
        (client.run_once, client.run_at_least_once, client.run_at_most_once)
    ):
        with pytest.raises(ConfigError, match=r"fn must be an async function.*returned str"):
            await call(f"plain{number}", plain)
    query = "select key from riverpy_exec where completed_at is not null"
    assert await schema.fetchval(query) is None


async def test_bad_times(client: Client, schema: Schema) -> None:
    """Wrong times are refused, with their name."""
    send: Any = Mailer().send
    zero = timedelta(0)
    with pytest.raises(ConfigError, match="kept"):
        await client.run_once("k", send, kept=zero)
    with pytest.raises(ConfigError, match="wait"):
        await client.run_once("k", send, wait=-SHORT)
    with pytest.raises(ConfigError, match="expires_after"):
        await client.run_at_least_once("k", send, expires_after=zero)
    for bad in (5, 0.5, "1s", True):
        no_time: Any = bad
        for call in (client.run_once, client.run_at_most_once, client.run_at_least_once):
            with pytest.raises(ConfigError, match="kept takes a timedelta"):
                await call("k", send, kept=no_time)
    for bad in (5, None):
        no_time = bad
        with pytest.raises(ConfigError, match="wait takes a timedelta"):
            await client.run_once("k", send, wait=no_time)
        with pytest.raises(ConfigError, match="expires_after takes a timedelta"):
            await client.run_at_least_once("k", send, expires_after=no_time)
    with pytest.raises(ConfigError, match=r"kept .* must be at least expires_after"):
        await client.run_at_least_once("k", send, kept=SHORT, expires_after=LONG)
    assert await schema.fetchval("select count(*) from riverpy_exec") == 0


async def test_longest_key(client: Client, schema: Schema) -> None:
    """A key of 255 characters of any script is stored."""
    assert (await client.run_once("ключ 🗝" + "k" * 249, writing(schema))).ran


async def test_line_not_migrated(fresh_database_url: str) -> None:
    """Without our tables the error has the command that creates them, a transaction of the caller
    can be used, and the leader's cleaner has nothing to do."""
    async with Client(fresh_database_url) as client:
        await Migrator(fresh_database_url, line="main").up()
        for call in (client.run_once, client.run_at_most_once, client.run_at_least_once):
            with pytest.raises(SchemaMissingError, match="riverpy migrate up --line riverpy"):
                await call("k", Mailer().send)
        async with client._transaction(None) as connection:
            with pytest.raises(SchemaMissingError):
                await client.run_once("k", Mailer().send, tx=connection)
            assert await connection.fetchval("select 1") == 1


async def test_client_that_is_not_open(schema: Schema) -> None:
    """Without `tx=` the client must be open."""
    client = Client(schema.url, config=Config(schema=schema.name))
    with pytest.raises(ClientStateError):
        await client.run_once("k", writing(schema))


async def test_retention(client: Client, schema: Schema) -> None:
    """A leader deletes only keys whose retention has passed, completed or not. After that the
    effect would run again."""
    mailer = Mailer()
    mailer.may_end.set()
    await client.run_once("old", writing(schema))
    await client.run_at_most_once("crashed", mailer.send)
    await schema.execute(
        "update riverpy_exec set kept_until = now() - interval '1 s';"
        "update riverpy_exec set completed_at = null where key = 'crashed'"
    )
    await client.run_once("default", writing(schema))
    await client.run_once("for ever", writing(schema), kept=None)
    async with held_term(schema) as held, schema.connected() as connection:
        assert await held.run(RunOnceKeyCleaner(held.context)) == RUN_INTERVAL
        assert await execution_delete_expired(connection, schema.name, keys=["default"]) == set()
    rows = await schema.fetch("select key, kept_until - completed_at from riverpy_exec order by 1")
    assert [tuple(row) for row in rows] == [("default", timedelta(days=30)), ("for ever", None)]
    assert (await client.run_once("old", writing(schema))).ran


@pytest.mark.parametrize("kind", ["lease", "lead"])
async def test_fence_in_a_savepoint(schema: Schema, client: Client, kind: str) -> None:
    """A fence in the function of a call in the caller's transaction is refused, because it would be
    undone with the call's savepoint. Before the call, and in a transaction of the client, it is
    accepted. In a savepoint of the caller it is refused too."""
    async with AsyncExitStack() as stack:
        term: Any
        if kind == "lease":
            term = await stack.enter_async_context(client.lease("x"))
        else:
            held = await stack.enter_async_context(held_term(schema))
            term: LeaderTerm = held.context.fence
        connection = await stack.enter_async_context(schema.connected())
        async with connection.transaction():
            with pytest.raises(TransactionError, match="before run_once"):
                await client.run_once("a", term.fence, tx=connection)
        async with connection.transaction():
            await connection.execute("savepoint own")
            with pytest.raises(TransactionError, match=r"before any nested `connection"):
                await term.fence(connection)
            await connection.execute("rollback to own; release own")
            await term.fence(connection)
            assert (await client.run_once("a", writing(schema), tx=connection)).ran
            await term.fence(connection)
        assert (await client.run_once("b", term.fence)).ran
        assert await effects(schema) == ["a"]
