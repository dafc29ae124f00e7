"""A schema whose name is too long for a notification channel, found by the search path."""

from __future__ import annotations

import asyncio
import socket

import anyio
import pytest
from click.testing import CliRunner

from riverpy import (
    Client,
    Config,
    ConfigError,
    Job,
    LeaseManager,
    MemoryLeases,
    QueueConfig,
    RawArgs,
    Workers,
)
from riverpy._names import SCHEMA_NAME_TOO_LONG_TEXT, validate_client_id
from riverpy.cli import main
from riverpy.config import SETTING_DURATION_MAX
from riverpy.migrate import Migrator, migrate_all
from tests._database import connected
from tests.tools.doctor.conftest import run_doctor
from tests.work.rig import Task

LONG = "s" * 63
JOB = RawArgs("task", "{}")


def found_by_path(url: str, schema: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}search_path={schema}"


@pytest.fixture
async def long_url(fresh_database_url: str) -> str:
    """A database with River's tables in a schema of 63 characters, as River in Go makes them."""
    async with connected(fresh_database_url) as connection:
        await connection.execute("CREATE SCHEMA short")
        await migrate_all(fresh_database_url, schema="short")
        await connection.execute(f"ALTER SCHEMA short RENAME TO {LONG}")
    return found_by_path(fresh_database_url, LONG)


@pytest.mark.parametrize("name", [LONG, "ü" * 24])
async def test_migration(fresh_database_url: str, name: str) -> None:
    """Tables are not made in such a schema, also if no option names it."""
    async with connected(fresh_database_url) as connection:
        await connection.execute(f'CREATE SCHEMA "{name}"')
        await connection.execute(f'SET search_path = "{name}"')
        with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
            await migrate_all(connection)
        assert not await connection.fetchval("SELECT to_regclass('river_job') IS NOT NULL")


async def test_first_use(long_url: str) -> None:
    """Where the tables are there, a worker, an insert, a verb, a lease and a command refuse it with
    the same text; and the tables can be removed."""
    with pytest.raises(ConfigError) as given:
        Config(schema=LONG)
    assert SCHEMA_NAME_TOO_LONG_TEXT in str(given.value)
    async with connected(long_url) as tx, Client(long_url) as client:
        with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
            await client.insert(JOB)
        async with tx.transaction():
            with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
                await client.insert(JOB, tx=tx)
        job_id = await tx.fetchval(
            "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1) RETURNING id"
        )
        with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
            await client.job_cancel(job_id)
        with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
            await client.queue_pause("*")
    workers = Workers()

    async def work(job: Job[Task]) -> None:
        pass

    work.__annotations__ = {"job": Job[Task], "return": None}
    workers.job(work)

    worker = Client(long_url, workers=workers, queues={"default": QueueConfig()})
    with anyio.fail_after(30), pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
        await worker.run()
    with pytest.raises(ConfigError, match=SCHEMA_NAME_TOO_LONG_TEXT):
        async with LeaseManager(long_url) as leases:
            await leases.try_acquire("one")
    for command in (["job", "list"], ["insert", "task", "{}"], ["migrate", "up"]):
        args = [*command, "--database-url", long_url]
        result = await asyncio.to_thread(CliRunner().invoke, main, args)
        assert result.exit_code != 0
        assert SCHEMA_NAME_TOO_LONG_TEXT in result.stderr
    assert (
        SCHEMA_NAME_TOO_LONG_TEXT
        in (await run_doctor("--database-url", long_url)).one("schema", "fail")["text"]
    )
    await Migrator(long_url, line="riverpy").down(target=0)
    assert (await Migrator(long_url).down(target=0)).steps


def test_limits_hold_for_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default values keep the limits of those that are set: the id of a client and of the
    holder of leases, whatever the host's name, and the age of a rescue."""
    for name in ("h" * 64, "x" * 200, "ho\udcffst", "", "é\0"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        validate_client_id(Client().id)
        validate_client_id(LeaseManager(MemoryLeases()).holder)
    most = Config(job_timeout=SETTING_DURATION_MAX).rescue_age
    assert Config(rescue_after=most, job_timeout=SETTING_DURATION_MAX).rescue_age == most
