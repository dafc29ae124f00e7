"""Migrators that run at once, are killed, cancelled, or kept waiting."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._postgres.sql_files import get_query
from riverpy.errors import MigrationError
from riverpy.migrate import Migrator
from tests._database import connected
from tests.migrate.catalog import catalog_vector, read_catalog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import asyncpg

    Connection = asyncpg.Connection[Any]

pytestmark = pytest.mark.timeout(180)  # a test may start four processes on a busy machine

_WAITING = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
    WHERE a.datname = current_database() AND NOT l.granted AND l.locktype = $1
        AND a.application_name = 'riverpy migrate'
"""
_SABOTAGE = """
    CREATE FUNCTION sabotage() RETURNS event_trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('application_name') = 'riverpy migrate' THEN
            PERFORM {action};
        END IF;
    END
    $$;
    CREATE EVENT TRIGGER sabotage ON ddl_command_end EXECUTE FUNCTION sabotage();
"""
WITH_DDL = range(1, 8)
"""The versions that run DDL, which is where `sabotage` acts. Version 8 runs none."""
_TERMINATE = "pg_terminate_backend(pg_backend_pid())"


async def until_waiting(connection: Connection, lock: str, count: int = 1) -> None:
    """Return when `count` migrators wait for a lock of this type: `advisory` or `relation`."""
    async with asyncio.timeout(90):
        while await connection.fetchval(_WAITING, lock) < count:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def sabotage(connection: Connection, action: str) -> AsyncGenerator[None]:
    """In the block, each DDL statement of a migration is followed by this action."""
    await connection.execute(_SABOTAGE.format(action=action))
    yield
    await connection.execute("DROP EVENT TRIGGER sabotage; DROP FUNCTION sabotage()")


@asynccontextmanager
async def reading(url: str) -> AsyncGenerator[Connection]:
    """In the block, a transaction that has read `river_job` stays open."""
    async with connected(url) as reader, reader.transaction():
        await reader.fetch("SELECT FROM river_job")
        yield reader


@asynccontextmanager
async def turn_taken(url: str, schema: str = "public") -> AsyncGenerator[Connection]:
    """In the block, another migrator is in the middle of its step."""
    statement = get_query("river_migration", "migration_lock", schema)
    async with connected(url) as other, other.transaction():
        await other.execute(statement.text, schema)
        yield other


async def start_command(url: str, *arguments: str) -> asyncio.subprocess.Process:
    """Start `riverpy migrate` with these arguments."""
    command = [sys.executable, "-m", "riverpy", "migrate", *arguments, "--database-url", url]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def applied_by(process: asyncio.subprocess.Process) -> list[int]:
    """The versions that a command has applied, when it has ended well."""
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [step["version"] for step in json.loads(output)["migrations"]]


async def versions(connection: Connection) -> list[int]:
    """The versions that the database has."""
    statuses = await Migrator(connection, schema="public").list()
    return [status.version for status in statuses if status.applied_at is not None]


async def test_four_processes_at_once(fresh_database_url: str, connection: Connection) -> None:
    """Each version is applied once, by any of four processes, and all of them end well."""
    processes = [
        await start_command(fresh_database_url, "up", "--line", "main", "--json") for _ in range(4)
    ]
    applied = [await applied_by(process) for process in processes]
    assert sorted(version for steps in applied for version in steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await read_catalog(connection, "public") == catalog_vector(8)


async def test_one_of_four_killed_half_way(fresh_database_url: str, connection: Connection) -> None:
    """The step of a process that is killed is undone, and another does it (MG-02)."""
    await Migrator(connection).up(target=5)
    up = ("up", "--line", "main", "--json", "--lock-timeout=10m", "--statement-timeout=10m")
    async with reading(fresh_database_url):
        victim = await start_command(fresh_database_url, *up)
        await until_waiting(connection, "relation")
        others = [await start_command(fresh_database_url, *up) for _ in range(3)]
        await until_waiting(connection, "advisory", 3)
        victim.kill()
        await victim.communicate()
    applied = [await applied_by(process) for process in others]
    assert victim.returncode == -signal.SIGKILL
    assert sorted(version for steps in applied for version in steps) == [6, 7, 8]
    assert await read_catalog(connection, "public") == catalog_vector(8)


@pytest.mark.parametrize("version", WITH_DDL)
async def test_backend_killed_in_a_migration(
    fresh_database_url: str, connection: Connection, version: int
) -> None:
    """Nothing of the interrupted migration is kept, and the next run goes on with it (MG-02)."""
    migrator = Migrator(fresh_database_url, schema="public")
    if version > 1:
        await migrator.up(target=version - 1)
    before = await read_catalog(connection, "public")
    async with sabotage(connection, _TERMINATE):
        with pytest.raises(MigrationError, match=f"migrating up version {version} .* run it again"):
            await migrator.up()
    assert await read_catalog(connection, "public") == before
    result = await migrator.up()
    assert [step.version for step in result.steps] == list(range(version, 9))
    assert await read_catalog(connection, "public") == catalog_vector(8)


@pytest.mark.parametrize("version", WITH_DDL)
async def test_backend_killed_on_the_way_down(
    fresh_database_url: str, connection: Connection, version: int
) -> None:
    """A migration that was interrupted downwards is still applied and recorded (MG-02)."""
    migrator = Migrator(fresh_database_url, schema="public")
    await migrator.up(target=version)
    before = await read_catalog(connection, "public")
    async with sabotage(connection, _TERMINATE):
        with pytest.raises(MigrationError, match=f"migrating down version {version} "):
            await migrator.down(target=0)
    assert await read_catalog(connection, "public") == before
    result = await migrator.down(target=0)
    assert [step.version for step in result.steps] == list(range(version, 0, -1))


async def test_failure_keeps_what_was_applied_before(connection: Connection) -> None:
    """A migration that fails leaves those before it applied, and the connection usable (MG-02)."""
    await connection.execute("CREATE TABLE river_queue ()")
    with pytest.raises(MigrationError, match=r'version 4 .* "river_queue" already exists'):
        await Migrator(connection, schema="public").up()
    assert not connection.is_in_transaction()
    assert await versions(connection) == [1, 2, 3]
    await connection.execute("DROP TABLE river_queue")
    await Migrator(connection, schema="public").up()
    assert await read_catalog(connection, "public") == catalog_vector(8)


async def test_open_reader(fresh_database_url: str, connection: Connection) -> None:
    """Behind a long reader a step gives up after the lock timeout, and lets workers pass
    (MG-08)."""
    await Migrator(connection).up(target=5)
    insert = "INSERT INTO river_job (kind, max_attempts, args) VALUES ('late', 1, '{}')"
    async with reading(fresh_database_url), connected(fresh_database_url) as worker:
        for seconds in (1, 4, 16):  # until the insert comes before it gives up
            migrator = Migrator(fresh_database_url, lock_timeout=timedelta(seconds=seconds))
            async with asyncio.TaskGroup() as tasks:
                migrating = tasks.create_task(refused(migrator))
                is_behind = await is_waited_for(connection, migrating)
                inserting = tasks.create_task(worker.execute(insert))
            assert await inserting == "INSERT 0 1"
            assert "lock timeout" in await migrating
            assert "longer lock timeout" in await migrating
            if is_behind:
                break
        else:
            pytest.fail("nobody saw it wait")
    assert await versions(connection) == [1, 2, 3, 4, 5]


async def is_waited_for(connection: Connection, migrating: asyncio.Task[str]) -> bool:
    """Return when the migrator waits for a lock on a table, or has given up."""
    while not await connection.fetchval(_WAITING, "relation"):
        if migrating.done():
            return False
        await asyncio.sleep(0.01)
    return True


async def refused(migrator: Migrator) -> str:
    """The text of the error with which `up` ends."""
    with pytest.raises(MigrationError) as caught:
        await migrator.up()
    return str(caught.value)


async def test_limits_of_a_step(connection: Connection) -> None:
    """A step runs under the limits asked for, and its locks end with its migrator (MG-08)."""
    await connection.execute(
        """
        CREATE TABLE seen (setting text, value text);
        CREATE FUNCTION look() RETURNS void LANGUAGE sql AS $$
            INSERT INTO public.seen SELECT name, setting FROM pg_settings WHERE name ~ '_timeout$'
        $$
        """
    )
    limits = {"lock_timeout": timedelta(seconds=2), "statement_timeout": timedelta(minutes=5)}
    async with sabotage(connection, "public.look()"):
        await Migrator(connection, **limits).up()
    seen = {tuple(row) for row in await connection.fetch("SELECT DISTINCT * FROM seen")}
    assert {
        ("lock_timeout", "2000"),
        ("statement_timeout", "300000"),
        ("idle_in_transaction_session_timeout", "10000"),
    } <= seen
    settings = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    assert [await connection.fetchval(f"SHOW {name}") for name in settings] == ["0"] * 3


async def test_limits_of_the_role(connection: Connection) -> None:
    """Limits of the role end no step, however short they are: the migrator's own count. Afterwards
    those of the role are as before."""
    await Migrator(connection).up(target=2)
    names = await connection.fetchval(
        "SELECT array_agg(name) FROM pg_settings"
        " WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')"
    )
    for name in names:
        await connection.execute(f"SET {name} = '200ms'")
    async with sabotage(connection, "pg_sleep(0.3)"):
        assert (await Migrator(connection).up(max_steps=1)).steps
    assert [await connection.fetchval(f"SHOW {name}") for name in names] == ["200ms"] * len(names)


async def test_slow_statement(connection: Connection) -> None:
    """A statement that runs longer than the statement timeout ends the step cleanly (MG-08)."""
    migrator = Migrator(connection, statement_timeout=timedelta(milliseconds=200))
    async with sabotage(connection, "pg_sleep(60)"):
        message = await refused(migrator)
    assert "version 1 " in message
    assert "longer statement timeout" in message
    assert await versions(connection) == []


async def test_other_migrator_takes_too_long(
    fresh_database_url: str, connection: Connection
) -> None:
    """The wait for another migrator is bounded, and the error says what was waited for."""
    migrator = Migrator(connection, statement_timeout=timedelta(milliseconds=200))
    async with turn_taken(fresh_database_url):
        assert "waiting for another migrator before version 1 " in await refused(migrator)
    assert not connection.is_in_transaction()
    assert len((await Migrator(connection).up()).steps) == 8


async def test_other_schema_is_not_waited_for(
    fresh_database_url: str, connection: Connection
) -> None:
    """Migrators of two schemas do not wait for each other."""
    async with turn_taken(fresh_database_url, "MixedCase_1"):
        assert len((await Migrator(connection, schema="public").up()).steps) == 8


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
async def test_two_steps_down_at_once(
    fresh_database_url: str, connection: Connection, isolation: str
) -> None:
    """Two processes that both undo the newest version undo one version, not two."""
    await Migrator(connection).up()
    settings = {"default_transaction_isolation": isolation}
    async with (
        connected(fresh_database_url, **settings) as one,
        connected(fresh_database_url, **settings) as two,
        asyncio.TaskGroup() as tasks,
        turn_taken(fresh_database_url),
    ):
        both = [tasks.create_task(Migrator(own).down()) for own in (one, two)]
        await until_waiting(connection, "advisory", 2)
    assert sorted(len(task.result().steps) for task in both) == [0, 1]
    assert await versions(connection) == [1, 2, 3, 4, 5, 6, 7]


async def test_migrated_the_other_way_meanwhile(
    fresh_database_url: str, connection: Connection
) -> None:
    """A migrator that finds the order broken since it made its plan does nothing."""
    await Migrator(connection).up(target=5)
    async with asyncio.TaskGroup() as tasks, turn_taken(fresh_database_url) as other:
        upwards = tasks.create_task(refused(Migrator(fresh_database_url)))
        await until_waiting(connection, "advisory")
        await other.execute("DELETE FROM river_migration WHERE version = 5")
    message = upwards.result()
    assert "migrated the other way by another migrator: its versions are now 1, 2, 3, 4" in message
    assert await versions(connection) == [1, 2, 3, 4]


@pytest.mark.parametrize("by", ["task", "scope"])
async def test_cancelled(fresh_database_url: str, connection: Connection, by: str) -> None:
    """A migrator cancelled by asyncio or anyio undoes its step and leaves its connection usable."""
    await Migrator(connection).up(target=5)
    async with connected(fresh_database_url) as own, reading(fresh_database_url):
        migrator = Migrator(own, lock_timeout=timedelta(minutes=10))
        scope = anyio.CancelScope()

        async def migrate() -> None:
            with scope:
                await migrator.up()

        upwards = asyncio.create_task(migrate())
        await until_waiting(connection, "relation")
        if by == "task":
            upwards.cancel()
        else:
            scope.cancel()
        await asyncio.wait([upwards])
        assert upwards.cancelled() if by == "task" else scope.cancelled_caught
        assert not own.is_in_transaction()
        assert await own.fetchval("SELECT 1") == 1
        settings = ("lock_timeout", "statement_timeout", "application_name")
        assert [await own.fetchval(f"SHOW {name}") for name in settings] == ["0", "0", ""]
    assert await versions(connection) == [1, 2, 3, 4, 5]
