"""The reindexer, on real concurrent rebuilds."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from riverpy import Config
from riverpy._lifecycle import StopCause, StopScope
from riverpy._log_events import (
    INDEX_ARTIFACT_DROP_FAILED,
    INDEX_ARTIFACT_DROPPED,
    INDEX_ARTIFACTS_LEFT_BEHIND,
    INDEX_REBUILD_FAILED,
    INDEX_REBUILD_TIMED_OUT,
    INDEX_REBUILT,
    INDEXES_OF_ANOTHER_OWNER_SKIPPED,
    REINDEXING_POSTPONED,
)
from riverpy._maintenance import reindexer as module
from riverpy._maintenance.reindexer import (
    CLOCK_READ_INTERVAL,
    REINDEX_LOCK_RETRY_DELAY,
    DailySchedule,
    RebuildPostponement,
    make_reindexers,
    remove_postponement,
)
from riverpy._postgres.connection import set_statement_timeout
from riverpy._postgres.driver import close_connection, connect, terminate_on_error
from riverpy.config import REINDEXER_INDEX_NAMES_DEFAULT
from riverpy.errors import ConfigError, FencedOutError
from tests.leading.term_context import held_term
from tests.maintenance.reindexing import (
    SESSION,
    Always,
    Never,
    Once,
    artifacts,
    fail,
    indexes,
    mend,
    oid,
    reader,
    slow_index,
    snapshot,
    take_a_moment,
    until,
    until_building,
    until_no_session,
    until_waiting,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from riverpy._maintenance.reindexer import Reindexer
    from riverpy._postgres.driver import Connection
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

KIND, PKEY = "river_job_kind", "river_job_pkey"
SNAPSHOTS = "waiting for old snapshots"
"""The phase before the new index takes the place of the old one."""
READERS = "waiting for readers before marking dead"
"""The phase after that."""
Log = list[dict[str, object]]


@pytest.fixture
async def schema(schema: Schema) -> AsyncGenerator[Schema]:
    """A schema that keeps the indexes it has now, without comments: it is used again."""
    before = set(await indexes(schema))
    yield schema
    for name in set(await indexes(schema)) - before:
        quoted = name.replace('"', '""')
        await schema.execute(f'DROP INDEX "{quoted}"')
    for name in before:
        await schema.execute(f"COMMENT ON INDEX {name} IS NULL")


def reindexer_of(
    held: HeldTerm,
    role: str | None = None,
    when_connected: Callable[[], None] = lambda: None,
    settings: Mapping[str, str] | None = None,
) -> Reindexer:
    """A reindexer of a new term, on a session with these settings."""

    async def direct() -> Connection:
        connection = await connect(
            held.schema.url, application_name=SESSION, session_settings=settings
        )
        with terminate_on_error(connection):
            await set_statement_timeout(connection, timedelta(seconds=5))
            if role is not None:
                await connection.execute(f"SET ROLE {role}")
        when_connected()
        return connection

    (reindexer,) = make_reindexers(replace(held.context, open_direct_connection=direct))
    return reindexer


@asynccontextmanager
async def contexts(schema: Schema, *names: str, **settings: Any) -> AsyncGenerator[HeldTerm]:
    """A context that rebuilds these indexes at each pass but a term's first."""
    settings.setdefault("reindexer_schedule", Always())
    async with held_term(schema, reindexer_index_names=names, **settings) as held:
        yield held


async def run(held: HeldTerm, role: str | None = None, **settings: str) -> None:
    """The first pass of a term, and one that rebuilds."""
    reindexer = reindexer_of(held, role, settings=settings)
    await held.run(reindexer)
    await held.run(reindexer)


async def in_scope(held: HeldTerm, scope: StopScope) -> None:
    """The same until the scope is stopped."""
    with scope:
        reindexer = reindexer_of(held)
        await held.run(reindexer, scope)
        await held.run(reindexer, scope)


@asynccontextmanager
async def running(
    held: HeldTerm, phase: str, index: str | None = None
) -> AsyncGenerator[tuple[StopScope, asyncio.Task[None]]]:
    """A run that is seen in this phase of a rebuild; the body ends it."""
    scope = StopScope()
    task = asyncio.create_task(in_scope(held, scope))
    try:
        await until_building(held.schema, phase, index)
        yield scope, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel from outside, without a cause of riverpy's."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def said(log: Log, event: str) -> list[object]:
    """The indexes that log lines with this event name."""
    return [entry.get("index") for entry in log if entry["event"] == event]


def reasons(log: Log) -> dict[object, object]:
    """Why indexes were not rebuilt."""
    return {
        entry["index"]: entry["reason"] for entry in log if entry["event"] == INDEX_REBUILD_FAILED
    }


# -- runs


async def test_rebuilds(schema: Schema, log: Log) -> None:
    """The configured indexes are rebuilt in their order, no other is, and the log says how long it
    took and what it gained."""
    before = {name: await oid(schema, name) for name in REINDEXER_INDEX_NAMES_DEFAULT}
    size = "SELECT pg_relation_size($1::regclass)"
    bytes_before = await schema.fetchval(size, PKEY)
    async with contexts(schema, PKEY, KIND, PKEY) as held:
        await run(held)
    changed = [
        name for name in REINDEXER_INDEX_NAMES_DEFAULT if await oid(schema, name) != before[name]
    ]
    assert changed == [KIND, PKEY]
    assert said(log, INDEX_REBUILT) == [PKEY, KIND]
    (entry, _) = (entry for entry in log if entry["event"] == INDEX_REBUILT)
    assert entry["bytes_before"] == bytes_before
    assert entry["bytes_after"] == await schema.fetchval(size, PKEY)
    assert await artifacts(schema) == []
    await until_no_session(schema)


async def test_default_indexes(schema: Schema, log: Log) -> None:
    """River's list has each index of its table of jobs, and all can be rebuilt."""
    rows = await schema.fetch(
        "SELECT indexname FROM pg_indexes WHERE tablename = 'river_job' AND schemaname = $1",
        schema.name,
    )
    assert sorted(REINDEXER_INDEX_NAMES_DEFAULT) == sorted(name for (name,) in rows)
    async with held_term(schema, reindexer_schedule=Always()) as held:
        await run(held)
    assert said(log, INDEX_REBUILT) == list(REINDEXER_INDEX_NAMES_DEFAULT)


async def test_off(schema: Schema, log: Log) -> None:
    """Without names, or if only a pooler in transaction mode leads to the database, there is no
    reindexer; the latter is said, with what to set."""
    async with contexts(schema) as held:
        assert make_reindexers(held.context) == []
        assert log == []
        assert make_reindexers(replace(held.context, config=Config(pooler=True))) == []
    (entry,) = log
    assert "listen_url" in entry["advice"]


async def test_first_pass_rebuilds_nothing(schema: Schema, log: Log) -> None:
    """A term begins without a run, and waits until the next time of its schedule, for an hour at
    most: the server's clock may be set."""
    before = await oid(schema, KIND)
    async with contexts(schema, KIND, reindexer_schedule=Never()) as held:
        reindexer = reindexer_of(held)
        assert [await held.run(reindexer) for _ in range(3)] == [CLOCK_READ_INTERVAL] * 3
    assert await oid(schema, KIND) == before
    assert log == []


async def test_next_time_is_by_the_servers_clock(
    schema: Schema, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was missed, by a suspended machine or by a run that took long, is not caught up."""
    clock = [datetime(2026, 1, 1, 23, 59, tzinfo=UTC)]

    async def now(_connection: object) -> datetime:
        return clock[0]

    monkeypatch.setattr(module, "index_get_server_time", now)
    async with held_term(schema, reindexer_index_names=[KIND]) as held:
        reindexer = reindexer_of(held)
        assert await held.run(reindexer) == 60
        clock[0] += timedelta(seconds=59.99)
        assert await held.run(reindexer) == pytest.approx(0.01)
        assert said(log, INDEX_REBUILT) == []
        clock[0] += timedelta(days=5, hours=23, minutes=30)
        assert await held.run(reindexer) == pytest.approx(1800, abs=1)
        assert await held.run(reindexer) == pytest.approx(1800, abs=1)
        assert said(log, INDEX_REBUILT) == [KIND]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("2026-03-01T00:00:00+00:00", "2026-03-02T00:00:00+00:00"),
        ("2026-02-28T23:59:59.999999+00:00", "2026-03-01T00:00:00+00:00"),
        ("2026-03-01T00:30:00+01:00", "2026-03-01T00:00:00+00:00"),
    ],
)
def test_midnight(after: str, expected: str) -> None:
    """The default schedule is the next midnight in UTC, at midnight that of the next day."""
    assert DailySchedule().next(datetime.fromisoformat(after)) == datetime.fromisoformat(expected)


class Wrong:
    """A schedule that says this, whatever it is asked."""

    def __init__(self, due: datetime | None) -> None:
        self._due = due

    def next(self, after: datetime, /) -> datetime | None:
        del after
        return self._due


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reindexer_schedule": Wrong(None)}, "no time in the future; .* reindexer_index_names="),
        ({"reindexer_schedule": Wrong(datetime(2999, 1, 1))}, "aware datetime"),
        ({"reindexer_schedule": Wrong(datetime(2000, 1, 1, tzinfo=UTC))}, "after the one"),
        ({"reindexer_timeout": timedelta(0)}, "reindexer_timeout must be"),
        ({"reindexer_index_names": KIND}, "list of index names"),
        ({"reindexer_index_names": [""]}, "list of index names"),
        ({"reindexer_index_names": ["a\0"]}, "list of index names"),
        ({"reindexer_index_names": [1]}, "list of index names"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    """A wrong setting is refused when it is made."""
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


async def test_missing_index(schema: Schema, log: Log) -> None:
    """A name that does not exist is warned about once a term and skipped."""
    async with contexts(schema, "river_job_nothing", KIND) as held:
        await run(held)
    (warning,) = (entry for entry in log if entry["log_level"] == "warning")
    assert warning["indexes"] == ["river_job_nothing"]
    assert "reindexer_index_names" in warning["advice"]
    assert said(log, INDEX_REBUILT) == [KIND]


async def test_names_are_quoted(schema: Schema, log: Log) -> None:
    """The name of an index is quoted, whatever it holds (SE-03)."""
    evil = '"; DROP TABLE river_job; --'
    await schema.execute('CREATE INDEX """; DROP TABLE river_job; --" ON river_job (kind)')
    async with contexts(schema, evil, "x'y", 'z"') as held:
        async with snapshot(schema), running(held, SNAPSHOTS) as (_, task):
            await cancel(task)
        assert await artifacts(schema) == [f"{evil}_ccnew"]
        await run(held)
    assert said(log, INDEX_ARTIFACT_DROPPED) == [f"{evil}_ccnew"]
    assert said(log, INDEX_REBUILT) == [evil]
    assert await schema.jobs() == []


async def test_not_the_owner(schema: Schema, log: Log) -> None:
    """A role that does not own an index goes on without rebuilding it, and says so once a run, with
    what to do (SE-05)."""
    role = f"riverpy_test_{secrets.token_hex(4)}"
    await schema.execute(f"CREATE ROLE {role}")
    try:
        await schema.execute(f"GRANT USAGE ON SCHEMA {schema.name} TO {role}")
        async with contexts(schema, KIND, PKEY) as held:
            await run(held, role)
        (warning,) = log
        assert warning["indexes"] == [KIND, PKEY]
        assert warning["event"] == INDEXES_OF_ANOTHER_OWNER_SKIPPED
        assert "reindexer_index_names=[]" in warning["advice"]
    finally:
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_failure_stops_no_other(schema: Schema, log: Log) -> None:
    """One index that cannot be rebuilt does not stop the others, at each run again and without a
    second set of artifacts (LM-11)."""
    async with slow_index(schema) as slow, contexts(schema, slow, KIND) as held:
        await fail(schema)
        for _ in range(3):
            await run(held)
            assert await artifacts(schema) == ["Slow_ccnew"]
        assert said(log, INDEX_REBUILT) == [KIND] * 3
        assert reasons(log) == {slow: "no luck"}
        await mend(schema)
        await run(held)
        assert said(log, INDEX_REBUILT)[-2:] == [slow, KIND]
        assert await artifacts(schema) == []


async def test_lost_connection(schema: Schema, log: Log) -> None:
    """After the loss of its session a run goes on with the next index, when what the loss left is
    dropped."""
    async with contexts(schema, KIND, PKEY, reindexer_schedule=Once()) as held:
        reindexer = reindexer_of(held)
        await held.run(reindexer)
        async with snapshot(schema):
            task = asyncio.create_task(held.run(reindexer))
            await until_building(schema, SNAPSHOTS)
            await schema.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1"
                " AND datname = current_database()",
                SESSION,
            )
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
                await task
            assert await artifacts(schema) == ["river_job_kind_ccnew"]
        await held.run(reindexer)
    assert said(log, INDEX_REBUILT) == [PKEY]
    assert await artifacts(schema) == []


async def test_doubt_begins_nothing(schema: Schema, log: Log) -> None:
    """A process that doubts its term by the time that it has a session neither drops nor
    rebuilds."""
    before = await oid(schema, KIND)
    async with contexts(schema, KIND) as held:
        await invalid_index(schema, "river_job_kind_ccnew")
        with pytest.raises(FencedOutError):
            await held.run(reindexer_of(held, when_connected=held.pass_deadline))
        assert await artifacts(schema) == ["river_job_kind_ccnew"]
        await schema.execute("DROP INDEX river_job_kind_ccnew")
        held.renew()
        reindexer = reindexer_of(held, when_connected=held.pass_deadline)
        await held.run(reindexer)
        with pytest.raises(FencedOutError):
            await held.run(reindexer)
    assert await oid(schema, KIND) == before
    assert log == []


# -- stops


@pytest.mark.parametrize("cause", [StopCause.CLIENT_STOP, StopCause.LEADERSHIP_LOST])
async def test_stop_cleans_up(schema: Schema, log: Log, cause: StopCause) -> None:
    """A stop or the loss of the lease ends the rebuild on the server, and drops what it left before
    the service ends."""
    before = await oid(schema, KIND)
    async with (
        contexts(schema, KIND, PKEY) as held,
        snapshot(schema),
        running(held, SNAPSHOTS) as (scope, task),
    ):
        assert await artifacts(schema) == ["river_job_kind_ccnew"]
        held.pass_deadline()
        scope.stop(cause)
        await task
        assert await artifacts(schema) == []
    assert await oid(schema, KIND) == before
    assert said(log, INDEX_ARTIFACT_DROPPED) == ["river_job_kind_ccnew"]
    await until_no_session(schema)


async def test_stop_at_any_moment(schema: Schema, log: Log) -> None:
    """Whenever a stop comes, nothing is left behind, on the server neither."""
    async with contexts(schema, KIND, PKEY) as held:
        for milliseconds in range(0, 60, 3):
            scope = StopScope()
            task = asyncio.create_task(in_scope(held, scope))
            await asyncio.sleep(milliseconds / 1000)
            scope.stop(StopCause.CLIENT_STOP)
            await task
            assert await artifacts(schema) == []
            await until_no_session(schema)
    assert [entry for entry in log if entry["log_level"] == "warning"] == []


async def test_stop_after_the_swap(schema: Schema) -> None:
    """A stop after the new index has taken the place of the old one drops the old one, as soon as
    nobody may read by it any more; until then the table can be read and written."""
    before = await oid(schema, KIND)
    async with contexts(schema, KIND) as held, AsyncExitStack() as reading:
        await reading.enter_async_context(reader(schema))
        async with running(held, READERS) as (scope, task):
            scope.stop(StopCause.CLIENT_STOP)
            await until_waiting(schema, "drop index concurrently%")
            await schema.execute(
                "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{}', 'k', 1)"
            )
            await reading.aclose()
            await task
    assert await artifacts(schema) == []
    assert await oid(schema, KIND) != before


async def test_clean_up_is_bounded(
    schema: Schema, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be dropped within the limit of a stop is left, said, and dropped by the next
    term."""
    monkeypatch.setattr(module, "LEFTOVER_DROP_TIMEOUT", 0.2)
    async with contexts(schema, KIND) as held:
        async with reader(schema), running(held, READERS) as (scope, task):
            scope.stop(StopCause.CLIENT_STOP)
            await task
        assert await artifacts(schema) == ["river_job_kind_ccold"]
        assert said(log, INDEX_ARTIFACTS_LEFT_BEHIND) == [KIND]
        await until_no_session(schema)
        await held.run(reindexer_of(held))
    assert await artifacts(schema) == []


async def test_leftovers_do_not_pile_up(
    schema: Schema, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three rebuilds that are cancelled half-way for no cause of ours each leaves one artifact,
    which the next run drops before it builds; the session's statement_timeout is as before
    (LM-11)."""
    timeouts: list[str] = []

    async def spy(connection: Connection) -> None:
        if not connection.is_closed():
            timeouts.append(await connection.fetchval("SHOW statement_timeout"))
        await close_connection(connection)

    async with slow_index(schema) as slow, contexts(schema, KIND, slow) as held:
        for _ in range(3):
            async with running(held, "building index%", slow) as (_scope, task):
                await cancel(task)
            assert await artifacts(schema) == ["Slow_ccnew"]
            await until_no_session(schema)
        assert said(log, INDEX_REBUILT) == [KIND] * 3
        await mend(schema)
        monkeypatch.setattr(module, "close_connection", spy)
        await run(held)
    assert said(log, INDEX_REBUILT)[-2:] == [KIND, slow]
    assert await artifacts(schema) == []
    assert timeouts == ["5s", "5s"]


# -- timeouts


async def comment_on(schema: Schema, index: str) -> str | None:
    """The comment of an index."""
    comment = await schema.fetchval("SELECT obj_description($1::regclass)", f'"{index}"')
    assert comment is None or isinstance(comment, str)
    return comment


async def postponed(schema: Schema, index: str) -> RebuildPostponement | None:
    """What the comment of an index says."""
    return RebuildPostponement.parse_comment(await comment_on(schema, index) or "")


async def days_until(schema: Schema, index: str) -> tuple[int, int]:
    """How often it timed out, and for how many days it rests."""
    found = await postponed(schema, index)
    assert found is not None
    now = await schema.fetchval("SELECT now()")
    return found.timeout_count, round((found.postponed_until - now) / timedelta(days=1))


async def let_rest_end(schema: Schema, index: str) -> None:
    """Let the time be over that an index rests."""
    found = await postponed(schema, index)
    assert found is not None
    past = found._replace(postponed_until=datetime(2026, 1, 1, tzinfo=UTC))
    comment = past.append_to_comment(await comment_on(schema, index) or "")
    await schema.execute(f"""COMMENT ON INDEX "{index}" IS '{comment}'""")


async def test_timeout(schema: Schema, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild that takes too long leaves its artifact for that run; the next, of whatever
    process, drops it and lets the index rest for 1, 2, then 4 days; other indexes are rebuilt, and
    the session's statement_timeout is as before (LM-11)."""
    timeouts: list[str] = []

    async def spy(connection: Connection) -> None:
        timeouts.append(await connection.fetchval("SHOW statement_timeout"))
        await close_connection(connection)

    rebuild = module.index_rebuild

    async def limited_if_slow(connection: Connection, index: Any) -> None:
        if index.name != "Slow":  # on a busy machine any may take a second
            await connection.execute("SET statement_timeout = '10s'")
        await rebuild(connection, index)

    monkeypatch.setattr(module, "close_connection", spy)
    monkeypatch.setattr(module, "index_rebuild", limited_if_slow)
    monkeypatch.setattr(module, "CLIENT_TIMEOUT_MARGIN", 20.0)
    limit = timedelta(seconds=1)
    async with slow_index(schema) as slow:
        await schema.execute(f"""COMMENT ON INDEX "{slow}" IS 'ours'""")
        async with contexts(schema, KIND, slow, reindexer_timeout=limit) as held:
            for rests in [(1, 1), (2, 2), (3, 4), (4, 4)]:
                log.clear()
                await run(held)
                assert await artifacts(schema) == ["Slow_ccnew"]
                assert await days_until(schema, slow) == rests
                assert said(log, INDEX_REBUILT) == [KIND]
                assert said(log, INDEX_REBUILD_TIMED_OUT) == [slow]
                await run(held)
                assert await artifacts(schema) == []
                times = "once" if rests[0] == 1 else f"{rests[0]} times"
                assert f"its rebuild timed out {times};" in str(reasons(log)[slow])
                assert said(log, INDEX_REBUILT) == [KIND, KIND]
                await let_rest_end(schema, slow)
            await mend(schema)
            await run(held)
        assert said(log, INDEX_REBUILT)[-2:] == [KIND, slow]
        assert await comment_on(schema, slow) == "ours"
    assert set(timeouts) == {"5s"}


async def test_limits_of_the_role(schema: Schema, log: Log) -> None:
    """Limits of the role end no rebuild: those of the reindexer count."""
    names = await schema.fetchval(
        "SELECT array_agg(name) FROM pg_settings"
        " WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')"
    )
    async with slow_index(schema) as slow, contexts(schema, slow) as held:
        await take_a_moment(schema)
        await run(held, **dict.fromkeys(names, "200ms"))
    assert said(log, INDEX_REBUILT) == [slow]


async def test_rest_is_counted_from_when_the_run_was_due(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day after a timeout is over at the next midnight, however long the rebuilds before it took.
    In a run that begins late, for a suspended machine, the rest is counted from an hour before."""
    clock = [datetime(2026, 1, 1, 23, 59, tzinfo=UTC)]

    async def now(_connection: object) -> datetime:
        return clock[0]

    monkeypatch.setattr(module, "index_get_server_time", now)
    limit = timedelta(milliseconds=200)
    async with (
        slow_index(schema) as slow,
        held_term(schema, reindexer_index_names=[slow], reindexer_timeout=limit) as held,
    ):
        reindexer = reindexer_of(held)
        await held.run(reindexer)
        clock[0] = datetime(2026, 1, 2, 0, 0, 30, tzinfo=UTC)
        await held.run(reindexer)
        assert await postponed(schema, slow) == (1, datetime(2026, 1, 3, tzinfo=UTC))
        clock[0] = datetime(2026, 1, 7, 13, tzinfo=UTC)
        await held.run(reindexer)
        assert await postponed(schema, slow) == (2, datetime(2026, 1, 9, 12, tzinfo=UTC))


@pytest.mark.parametrize("comment", ["", "ours", "ours\nin two lines"])
def test_postponement(comment: str) -> None:
    """What a comment says beside the time of rest is kept, however often it changes."""
    now = datetime(2026, 1, 1, 12, 0, 1, 999, tzinfo=UTC)
    once = RebuildPostponement.make_after_timeout(comment, now)
    twice = RebuildPostponement.make_after_timeout(once.append_to_comment(comment), now)
    written = twice.append_to_comment(once.append_to_comment(comment))
    assert RebuildPostponement.parse_comment(written) == (
        2,
        datetime(2026, 1, 3, 12, 0, 1, tzinfo=UTC),
    )
    assert remove_postponement(written) == comment
    assert RebuildPostponement.parse_comment(comment) is None
    assert RebuildPostponement.parse_comment(written.replace("-03T", "-33T")) is None


async def test_cancelled_by_an_operator(schema: Schema, log: Log) -> None:
    """A rebuild that an operator cancels is a failure, no timeout: the index does not rest."""
    async with (
        contexts(schema, KIND) as held,
        snapshot(schema),
        running(held, SNAPSHOTS) as (_, task),
    ):
        await schema.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = $1"
            " AND datname = current_database()",
            SESSION,
        )
        await task
    assert list(reasons(log)) == [KIND]
    assert await postponed(schema, KIND) is None


# -- others


async def invalid_index(schema: Schema, name: str, table: str = "river_job (kind)") -> None:
    """What an interrupted rebuild leaves."""
    await schema.execute(f'CREATE INDEX "{name}" ON {table}')
    await schema.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = $1::regclass", f'"{name}"'
    )


async def test_two_at_once(schema: Schema, log: Log) -> None:
    """While one reindexer of a schema works, a second neither rebuilds nor drops, and tries again
    soon."""
    async with contexts(schema, KIND) as held:
        second = reindexer_of(held)
        async with snapshot(schema), running(held, SNAPSHOTS) as (_, task):
            assert [await held.run(second) for _ in range(3)] == [REINDEX_LOCK_RETRY_DELAY] * 3
            assert await artifacts(schema) == ["river_job_kind_ccnew"]
            postponed = [entry for entry in log if entry["event"] == REINDEXING_POSTPONED]
            assert [entry["log_level"] for entry in postponed] == ["info", "debug", "debug"]
            await cancel(task)
        await until_no_session(schema)
        await held.run(second)
    assert said(log, INDEX_REBUILT) == [KIND]
    assert await artifacts(schema) == []


@pytest.mark.parametrize("sees_progress", [True, False])
async def test_build_of_another(schema: Schema, log: Log, sees_progress: bool) -> None:
    """An index that another session builds is neither dropped nor rebuilt, also when its progress
    is hidden from this role; when it is built it is as good as ever."""
    role = None if sees_progress else f"riverpy_test_{secrets.token_hex(4)}"
    if role is not None:
        await schema.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema.name} TO {role}")
        owner = await schema.fetchval("SELECT current_user")
        await schema.execute(f"ALTER TABLE river_job OWNER TO {role}")
    async with contexts(schema, KIND) as held, schema.connected() as other:
        async with snapshot(schema):
            build = asyncio.create_task(other.execute(f"REINDEX INDEX CONCURRENTLY {KIND}"))
            await until_building(schema, SNAPSHOTS)
            await run(held, role)
            assert await artifacts(schema) == ["river_job_kind_ccnew"]
            assert reasons(log) == {KIND: "another session builds an index of its table"}
        await build
        assert await artifacts(schema) == []
        await run(held, role)
    assert said(log, INDEX_REBUILT) == [KIND]
    if role is not None:
        await schema.execute(f"ALTER TABLE river_job OWNER TO {owner}")
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_other_index_of_the_table(schema: Schema, log: Log) -> None:
    """While another session builds any index of a table, none of that table is rebuilt: the two
    would wait for each other's locks."""
    async with contexts(schema, KIND) as held, schema.connected() as other:
        async with snapshot(schema):
            build = asyncio.create_task(
                other.execute("CREATE INDEX CONCURRENTLY another ON river_job (kind)")
            )
            await until(
                schema,
                "SELECT count(*) FROM pg_stat_progress_create_index WHERE phase = $2"
                " AND relid = $1::regclass",
                1,
                "river_job",
                SNAPSHOTS,
            )
            await run(held)
        await build
    assert reasons(log) == {KIND: "another session builds an index of its table"}


async def test_stop_before_the_build_of_another(schema: Schema, log: Log) -> None:
    """A stop that lets the waiting rebuild of another session begin leaves that alone, and drops
    what is its own when the other has ended."""
    async with (
        contexts(schema, KIND) as held,
        schema.connected() as other,
        AsyncExitStack() as waiting,
    ):
        await waiting.enter_async_context(snapshot(schema))
        async with running(held, SNAPSHOTS) as (scope, task):
            build = asyncio.create_task(other.execute(f"REINDEX INDEX CONCURRENTLY {KIND}"))
            await until_waiting(schema, "reindex%", sessions=2)
            scope.stop(StopCause.CLIENT_STOP)
            await until_building(schema, SNAPSHOTS)
            while not said(log, INDEX_ARTIFACT_DROP_FAILED):
                await asyncio.sleep(0.01)
            assert await artifacts(schema) == ["river_job_kind_ccnew", "river_job_kind_ccnew1"]
            await waiting.aclose()
            await task
            await build
    assert said(log, INDEX_ARTIFACT_DROPPED) == ["river_job_kind_ccnew"]
    (entry, *_) = (entry for entry in log if entry["event"] == INDEX_ARTIFACT_DROP_FAILED)
    assert "lock timeout" in str(entry["error"])
    assert await artifacts(schema) == []


async def test_artifacts_of_every_form(schema: Schema, log: Log) -> None:
    """Artifacts are known by every name that the server gives them, and nothing else is taken for
    one (LM-11)."""
    long = "river_job_" + "x" * 52
    await schema.execute(f"CREATE INDEX {long} ON river_job (kind)")
    dropped = [
        *(f"river_job_kind{suffix}" for suffix in ("_ccnew", "_ccold", "_ccnew1", "_ccold23")),
        *(f"{long[:57]}{suffix}" for suffix in ("_ccnew", "_ccold")),
        f"{long[:56]}_ccnew1",
    ]
    kept = [
        "river_job_kind_ccnewer",
        "river_job_kind_ccnew_1",
        "river_job_kindly_ccnew",
        "river_job_priority_ccnew",
        "xriver_job_kind_ccnew",
    ]
    for name in (*dropped, *kept):
        await invalid_index(schema, name)
    await invalid_index(schema, "river_job_kind_ccnew2", "river_queue (name)")
    await schema.execute("CREATE INDEX river_job_kind_ccold2 ON river_job (kind)")
    kept += ["river_job_kind_ccnew2", "river_job_kind_ccold2"]
    async with contexts(schema, KIND, long) as held:
        await run(held)
    assert await artifacts(schema) == sorted(kept)
    assert sorted(map(str, said(log, INDEX_ARTIFACT_DROPPED))) == sorted(dropped)
    assert "river_job_kind_ccold2" in str(reasons(log)[KIND])
    assert said(log, INDEX_REBUILT) == [long]
    for name in (*kept, long):
        await schema.execute(f'DROP INDEX "{name}"')


async def test_name_of_a_long_artifact(schema: Schema) -> None:
    """An artifact of an index whose name has 63 bytes is found."""
    long = "ü" * 31 + "x"
    await schema.execute(f'CREATE INDEX "{long}" ON river_job (kind)')
    async with contexts(schema, long) as held:
        async with snapshot(schema), running(held, SNAPSHOTS) as (_, task):
            await cancel(task)
        assert len(await artifacts(schema)) == 1
        await run(held)
    assert await artifacts(schema) == []
    await schema.execute(f'DROP INDEX "{long}"')
