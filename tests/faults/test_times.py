"""Rows with infinite or ancient times, which other programs may write into the tables.

Some row has each of these times in each time column of each table. Every command, probe, call and
maintenance service works beside these rows.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import riverpy
from riverpy._dsn import PG_VARIABLES
from riverpy._log_events import HEALTH_SERVER_STARTED
from riverpy._names import SCHEMA_LEASE_NAME
from riverpy._postgres.clients import (
    ClientRegistration,
    client_delete_dead_without_jobs,
    client_list_candidates,
    client_list_heartbeats,
    client_lock_dead,
    client_register,
    client_unregister,
    client_write_heartbeat,
)
from riverpy._postgres.leaders import (
    leader_elect,
    leader_fence_transaction,
    leader_get,
    leader_renew,
    leader_resign,
)
from riverpy._postgres.leases import lease_acquire, lease_list, lease_renew
from riverpy._postgres.sql_files import sql_directory
from riverpy.cli import main
from riverpy.migrate import migrate_all
from tests._database import (
    connected,
    create_database,
    drop_database,
    new_database_name,
    run_apart,
)
from tests.cli.worker_process import running_worker
from tests.tools.health.test_worker_health import PATIENCE, Served

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from pathlib import Path
    from typing import TypeAlias

    import asyncpg

    from riverpy._postgres.driver import Transaction

    Connection: TypeAlias = asyncpg.Connection[Any]

PAST = ("-infinity", "4713-01-01 BC")
FUTURE = ("294276-12-31", "infinity")
VALUES = (*PAST, *FUTURE)

ROWS = {
    "river_job": {
        "args": "'{}'",
        "kind": "'do'",
        "max_attempts": "5",
        "created_at": "now()",
        "scheduled_at": "now() - interval '2 minutes'",
        "attempted_at": "now() - interval '2 minutes'",
        "attempt": "1",
        "attempted_by": "'{gone}'",
    },
    "river_queue": {"updated_at": "now()"},
    "riverpy_client": {
        "queues": "'{default}'",
        "kinds": "'{do}'",
        "candidate": "true",
        "poll_only": "true",
        "version": "'1'",
        "dead_after": "'1 second'",
    },
    "riverpy_lease": {
        "epoch": "1",
        "holder": "'gone'",
        "ttl": "'1 minute'",
        "expires_at": "now() - interval '1 minute'",
    },
    "riverpy_periodic": {
        "schedule": "'every 1h'",
        "next_run_at": "now() + interval '1 hour'",
    },
    "riverpy_exec": {"epoch": "1", "claimed_by": "'gone'"},
    "riverpy_job_count": dict.fromkeys(
        (
            *("attempts", "completed", "failed", "discarded", "wait_seconds", "wait_max"),
            *("waits_over_100ms", "waits_over_1s", "waits_over_10s", "waits_over_1m"),
            "waits_over_5m",
        ),
        "1",
    )
    | {"seconds": "60"},
    "riverpy_queue_owner": {"domain": "'other'", "claimed_by": "'gone'"},
}
KEYS = {
    "river_queue": "name",
    "riverpy_client": "client_id",
    "riverpy_lease": "name",
    "riverpy_periodic": "id",
    "riverpy_exec": "key",
    "riverpy_job_count": "queue",
    "riverpy_queue_owner": "queue",
}
JOB_STATES = (
    "available",
    "cancelled",
    "completed",
    "discarded",
    "pending",
    "retryable",
    "running",
    "scheduled",
)
FINAL = ("cancelled", "completed", "discarded")

LEFT = """
SELECT id, state, tags FROM river_job
WHERE state IN ('available', 'scheduled', 'retryable') AND scheduled_at <= now()
  OR state = 'running' AND attempted_at < now() - interval '2 hours'
  OR finalized_at < now() - interval '30 days'
"""
"""Jobs that a worker and its maintenance have to process."""
LEFT_IN_TABLES = """
SELECT name FROM river_queue
WHERE updated_at < now() - interval '30 days' AND paused_at IS NULL AND metadata = '{}'
UNION ALL
SELECT key FROM riverpy_exec WHERE kept_until < now()
UNION ALL
SELECT queue FROM riverpy_job_count WHERE started_at < now() - interval '9 days'
  OR started_at > now() + interval '2 days'
UNION ALL
SELECT id FROM riverpy_periodic WHERE next_run_at < now() AND paused_at IS NULL
"""
"""Rows that the maintenance of the domain `default` has to delete or to process."""

REGISTRATION = ClientRegistration("new", ["default"], ["do"], True, True, "1", timedelta(minutes=1))

JOBS = """
from datetime import timedelta
from typing import ClassVar

import msgspec
import riverpy

KEPT = riverpy.JobRetention(completed=timedelta(days=1))
workers = riverpy.Workers()


class Do(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "do"


@workers.job()
async def do(job: riverpy.Job[Do]) -> None:
    pass


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig()},
    periodic_jobs=[
        riverpy.PeriodicJob(riverpy.every(timedelta(hours=1)), Do(), id=f"{column}:{value}")
        for column in ("next_run_at", "last_run_at", "resumed_at", "run_requested_at")
        for value in ("-infinity", "4713-01-01_BC", "294276-12-31", "infinity")
    ],
    config=riverpy.Config(dead_after=timedelta(seconds=1), CONFIG),
)
"""


async def insert(connection: Connection, table: str, **columns: str) -> None:
    """Insert a row with these SQL expressions."""
    row = ROWS[table] | columns
    await connection.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(row.values())})"
    )


async def poison(connection: Connection) -> None:
    """Insert a row for each time in each time column of each table."""
    rows = await connection.fetch(
        "SELECT table_name, column_name FROM information_schema.columns"
        " WHERE table_schema = 'public' AND data_type = 'timestamp with time zone'"
    )
    for table, column in rows:
        for value in VALUES:
            poisoned = {column: f"'{value}'"}
            if table == "river_job":
                for state in JOB_STATES:
                    if state in FINAL or column != "finalized_at":
                        final = {"finalized_at": "now()"} if state in FINAL else {}
                        job = {"state": f"'{state}'", "tags": f"'{{{column}}}'"}
                        await insert(connection, table, **(final | job | poisoned))
            elif table in KEYS:
                name = f"{column}:{value}".replace(" ", "_")
                await insert(connection, table, **{KEYS[table]: f"'{name}'"}, **poisoned)
            elif table == "river_migration":
                version = VALUES.index(value) + 1
                await connection.execute(
                    f"UPDATE {table} SET {column} = '{value}' WHERE version = {version}"
                )
    domain = {"name": "'d:old'", "acquired_at": "'-infinity'", "expires_at": "'infinity'"}
    await insert(connection, "riverpy_lease", **domain)
    schema_lease = {"name": f"'{SCHEMA_LEASE_NAME}'", "acquired_at": "'infinity'"}
    await insert(connection, "riverpy_lease", **schema_lease, expires_at="'4713-01-01 BC'")


async def lead(connection: Connection, elected_at: str, expires_at: str) -> None:
    """Make `gone` the leader with these times."""
    await connection.execute("DELETE FROM river_leader")
    await connection.execute(
        "INSERT INTO river_leader (name, leader_id, elected_at, expires_at)"
        f" VALUES ('default', 'gone', '{elected_at}', '{expires_at}')"
    )


async def _make(server_url: str, name: str) -> str:
    url = await create_database(server_url, name)
    async with connected(url) as connection:
        await migrate_all(connection)
        await poison(connection)
    return url


@pytest.fixture(scope="module")
def read(each_server_url: str) -> Generator[str]:
    """The URL of a database with such rows that tests only read."""
    name = new_database_name()
    yield run_apart(_make, each_server_url, name)
    run_apart(drop_database, each_server_url, name)


@pytest.fixture
async def written(each_server_url: str) -> AsyncGenerator[str]:
    """The URL of a database with such rows for this test alone."""
    name = new_database_name()
    yield await _make(each_server_url, name)
    await drop_database(each_server_url, name)


def call(url: str, *args: str) -> Any:
    """Run a command on this database alone."""
    variables = ("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)
    return CliRunner(env=dict.fromkeys(variables)).invoke(
        main, [*args, "--database-url", url, "--debug"]
    )


COMMANDS = {
    "doctor": {0, 1, 5},
    "health": {0, 3},
    "top --once": {0},
    "job list --limit 10000": {0},
    "queue list": {0},
    "periodic list": {0},
    "leader show": {0},
    "domain list": {0, 5},
    "migrate list": {0},
    "migrate validate": {0},
}


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(read: str, command: str, form: str) -> None:
    """Each reading command shows the rows."""
    args = [*command.split(), *(["--json"] if form == "json" else [])]
    result = call(read, *args)
    assert result.exit_code in COMMANDS[command], result.output
    assert "Traceback" not in result.output
    assert result.exit_code != 1 or command == "doctor", result.output
    assert "this check failed" not in result.stdout
    if form == "json":
        for line in result.stdout.splitlines():
            json.loads(line)


@pytest.mark.parametrize("column", ["elected_at", "expires_at"])
async def test_leader(written: str, column: str) -> None:
    """A leader with such a time is shown, and another client becomes leader when the term
    expires."""
    for value in VALUES:
        await check_leader(
            written, {"elected_at": "now", "expires_at": "yesterday"} | {column: value}
        )


async def check_leader(written: str, times: dict[str, str]) -> None:
    """Show the leader with these times, and let another be elected."""
    async with connected(written) as connection:
        await lead(connection, **times)
        for command in ("leader show", "health", "top --once", "domain list"):
            for form in ((), ("--json",)):
                result = await asyncio.to_thread(call, written, *command.split(), *form)
                assert result.exit_code in COMMANDS[command], result.output
        found = await leader_get(connection, None)
        assert found is not None
        assert abs(found.seconds_until_expiry) < 10_000 * 366 * 86_400
        ttl = timedelta(seconds=15)
        bid = await leader_elect(connection, None, leader_id="next", ttl=ttl)
        assert bid is not None
        assert bid.is_granted == (times["expires_at"] not in FUTURE)
        if bid.is_granted:
            term = {"leader_id": "next", "elected_at": bid.acquired_at}
            assert await leader_renew(connection, None, **term, ttl=ttl)
            async with connection.transaction():
                assert await leader_fence_transaction(
                    connection, None, **term, transaction_timeout=ttl, lock_timeout=ttl
                )
            assert await leader_resign(connection, None, **term)


async def test_leases(written: str) -> None:
    """A lease with such a time is granted to the next client, with a higher epoch."""
    ttl = timedelta(minutes=1)
    async with connected(written) as connection:
        rows = await lease_list(connection, None)
        assert len(rows) == 10
        for row in rows:
            await lease_acquire(connection, None, name=row.name, holder="next", ttl=ttl)
            bid = await lease_acquire(connection, None, name=row.name, holder="next", ttl=ttl)
            assert bid is not None
            assert (bid.holder, bid.is_granted) == ("next", False)
            assert 0 < (bid.seconds_until_expiry or 0) <= 60
            terms = [(row.name, bid.epoch)]
            assert await lease_renew(connection, None, holder="next", names_and_epochs=terms) == {
                row.name: True
            }


async def test_clients(written: str) -> None:
    """Clients whose last heartbeat has such a time are observed and removed like any other."""
    async with connected(written) as connection:
        seen, start = await client_list_heartbeats(connection, None)
        heartbeats = {one.client_or_domain: one.raw_timestamp for one in seen}
        assert {"heartbeat_at:-infinity", "heartbeat_at:4713-01-01_BC"} <= set(heartbeats)
        await client_list_candidates(connection, None, domain="default")
        async with connection.transaction():
            dead = await client_lock_dead(connection, None, heartbeats, raw_server_start_time=start)
        assert dead == set(heartbeats)
        assert set(await client_delete_dead_without_jobs(connection, None, heartbeats)) <= dead
        registered_at = await client_register(connection, None, REGISTRATION)
        assert registered_at is not None
        assert await client_write_heartbeat(
            connection, None, REGISTRATION, registered_at=registered_at
        )
        await connection.execute("UPDATE riverpy_client SET started_at = 'infinity'")
        assert not await client_write_heartbeat(
            connection, None, REGISTRATION, registered_at=registered_at
        )
        await client_unregister(
            connection, None, client_id=REGISTRATION.client_id, registered_at=registered_at
        )


_COMMENT = re.compile(r"^\s*--.*$", re.MULTILINE)
_FINITE = re.compile(r"/\* finite \*/ \((?:[^()]|\([^()]*\))*\)")
_ARITHMETIC = re.compile(r"[-+]\s*[\w.(]*\w_at\b|(?<![@\w])[\w.]+_at\)*\s*[-+]\s")
"""A time of a row in an addition or a subtraction."""


def test_statements_keep_times_finite() -> None:
    """No statement calculates with a time of a row that may be infinite."""
    bare: list[str] = []
    marked = 0
    for entry in sql_directory().joinpath("queries").iterdir():
        text, found = _FINITE.subn("finite", _COMMENT.sub("", entry.read_text("utf-8")))
        marked += found
        bare += [f"{entry.name}: {one}" for one in _ARITHMETIC.findall(text)]
    assert marked > 30
    assert not bare


async def effect(connection: Transaction) -> None:
    """A job's effect that happens once."""
    await connection.execute("SELECT 1")


async def test_verbs(written: str) -> None:
    """Each call works on each row: jobs, queues, periodic jobs, executions."""
    async with connected(written) as connection, riverpy.Client(written) as client:
        ids = [row[0] for row in await connection.fetch("SELECT id FROM river_job")]
        for job_id in ids:
            job = await client.job_get(job_id)
            times = (job.created_at, job.scheduled_at, job.attempted_at, job.finalized_at)
            assert all(at is None or at.tzinfo is not None for at in times)
            await client.job_update(job_id, output={"seen": True})
            await client.job_cancel(job_id)
            await client.job_retry(job_id)
        states = await connection.fetch("SELECT DISTINCT state::text FROM river_job")
        assert {row[0] for row in states} == {"available", "running"}
        lags = await client.queue_lags(["default"])
        assert timedelta(0) < lags["default"] < timedelta(minutes=10)
        for queue in await client.queue_list():
            await client.queue_get(queue.name)
            await client.queue_pause(queue.name)
            await client.queue_resume(queue.name)
            await client.queue_update(queue.name, metadata={"seen": True})
        for (job_id,) in await connection.fetch("SELECT id FROM riverpy_periodic"):
            result = await asyncio.to_thread(call, written, "periodic", "next", job_id)
            assert result.exit_code == 0, result.output
            await client.periodic_pause(job_id)
            await client.periodic_run(job_id)
            await client.periodic_resume(job_id)
        for (key,) in await connection.fetch("SELECT key FROM riverpy_exec"):
            await client.run_once(key, effect)


@pytest.mark.parametrize("config", ["", "leader_domain='mine'", "retention_by_kind={'do': KEPT}"])
async def test_worker(written: str, tmp_path: Path, config: str) -> None:
    """A worker claims, finishes, rescues, cleans up and inserts periodic jobs beside such rows, and
    its probes and metrics answer."""
    where = (f"--database-url={written}", "--schema=public", "--health=:0")
    async with connected(written) as connection:
        usual = {"state": "'running'", "attempted_at": "now() - interval '1 day'"}
        await insert(connection, "river_job", **usual)
        dead = usual | {"attempted_by": "'{heartbeat_at:-infinity}'"}
        await insert(connection, "river_job", **dead)
        if config == "":
            await connection.execute("DELETE FROM riverpy_queue_owner")
        async with running_worker(
            tmp_path, "jobs", *where, code=JOBS.replace("CONFIG", config)
        ) as worker:
            health = Served(worker, (await worker.until_logged(HEALTH_SERVER_STARTED))["port"])
            await health.until("/readyz", 200)
            async with asyncio.timeout(PATIENCE):
                while left := await connection.fetch(LEFT):
                    await asyncio.sleep(0.05)
                while not config and (left := await connection.fetch(LEFT_IN_TABLES)):
                    await asyncio.sleep(0.05)
            assert not left
            assert (await health.get("/metrics"))[0] == 200
            assert (await health.get("/livez"))[0] == 200
            worker.send(signal.SIGTERM)
            assert await worker.exit_code() == 0
        events = {entry.get("event") for entry in worker.logged if entry.get("level") == "error"}
        assert not events
