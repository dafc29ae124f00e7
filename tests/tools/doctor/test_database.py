"""What `riverpy doctor` finds about the server, the tables, and what makes them slow."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from click.testing import CliRunner

from riverpy._tools.doctor import check_runner as examination
from riverpy._tools.doctor import listeners, server, session, storage
from riverpy._tools.doctor import snapshot as patient
from riverpy._tools.doctor.finding import (
    Finding,
    Level,
    count,
    masked_query,
    names,
    size,
    span,
    worst,
)
from riverpy._tools.doctor.statements import ServerRow, SnapshotRow, TableRow
from riverpy.cli import main
from riverpy.cli.doctor import _show
from riverpy.migrate import Migrator, migrate_all
from tests._database import connected
from tests.cli.worker_process import RIVERPY, environment
from tests.kit.pgbouncer import is_installed, pooled
from tests.tools.doctor.conftest import examine, put, register, seat, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_unreachable_server() -> None:
    """A server that cannot be reached is a finding with an exit code, without a traceback or the
    password (SE-02, OP-04)."""
    url = "postgresql://ada:secret@127.0.0.1:1/db"
    exit_code, text = await text_of("--database-url", url)
    assert exit_code == 1
    assert text.startswith("FAIL  connect       cannot connect to 127.0.0.1:1")
    assert text.count("\n") == 3
    assert text.endswith("\n1 FAIL\n")
    assert "      fix: see that the server runs" in text
    assert "secret" not in text
    report = await examine("--database-url", url)
    assert [one["name"] for one in report.findings] == ["connect"]


async def test_debug() -> None:
    """--debug shows the traceback of an error that became a finding, or a verdict (OP-04)."""
    url = "postgresql://ada:secret@127.0.0.1:1/db"
    runner = CliRunner()
    for command in ("doctor", "health"):
        args = [command, "--debug", "--database-url", url]
        result = await asyncio.to_thread(runner.invoke, main, args)
        assert "Traceback" in result.stderr
        assert "cannot connect to 127.0.0.1:1" in result.stdout
        assert "secret" not in result.output


async def test_no_such_database(database_url: str) -> None:
    """A database that is not there has a remedy of its own."""
    url = urlunsplit(urlsplit(database_url)._replace(path="/no_such_database"))
    found = (await examine("--database-url", url)).one("connect", "fail")
    assert "does not exist" in found["text"]
    assert "CREATE DATABASE" in found["fix"]


@pytest.mark.parametrize("command", ["doctor", "health"])
async def test_closed_pipe(schema: Schema, command: str) -> None:
    """When the reader has gone, the exit code is the verdict all the same, without a word
    (OP-05)."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [RIVERPY, command, "--database-url", schema.url, "--schema", schema.name],
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    # No client lives: a warning, and not well.
    assert (done.returncode, done.stderr) == ({"doctor": 5, "health": 3}[command], b"")


async def test_usage() -> None:
    """No database, or a wrong option, is a usage error; --help tells of the exit codes (OP-04)."""
    assert (await text_of())[0] == 2
    exit_code, text = await text_of(
        "--database-url", "postgresql://h/d", "--listen-url", "http://x"
    )
    assert exit_code == 2
    assert "--listen-url" in text
    _, text = await text_of("--help")
    assert "5 if the worst is a warning, 1 if something fails" in " ".join(text.split())


async def test_text(schema: Schema, doctor: Doctor) -> None:
    """Each finding is a line, and what is not ok has its remedy below it; the last line and the
    exit code tell the worst. What is ok can be left out."""
    arguments = ("--database-url", schema.url, "--schema", schema.name)
    exit_code, text = await text_of(*arguments)
    assert exit_code == 5
    lines = text.splitlines()
    assert lines[0].startswith("ok    connect       PostgreSQL ")
    place = lines.index("warn  clients       no client of riverpy's runs on this schema")
    assert lines[place + 1] == "      fix: start a worker: riverpy worker MODULE:ATTR"
    assert re.fullmatch(r"2 warn, \d+ ok", lines[-1])
    exit_code, text = await text_of(*arguments, "--problems")
    assert exit_code == 5
    shown = text.splitlines()
    assert [line[:17] for line in shown[::2]] == [
        "warn  leader     ",
        "warn  clients    ",
        lines[-1],
    ]
    assert (await doctor("--problems")).findings == (await doctor()).problems()


def test_wrapping(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal what is too long goes on below where it began."""
    finding = Finding(Level.FAIL, "kinds", "one two three four five six", "seven eight nine ten")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    _show(finding)
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  kinds         one two three four",
        "                    five six",
        "      fix: seven eight nine ten",
    ]


async def test_tables_are_missing_or_old(fresh_database_url: str) -> None:
    """No tables, tables that are too old, a line that only a newer riverpy knows, and tables of
    which nothing is recorded: each is reported with the command that helps, and ends what depends
    on it. Version 8 of `main`, which changes nothing, may be missing."""
    arguments = ("--database-url", fresh_database_url)
    report = await examine(*arguments)
    assert "does not have River's tables" in report.one("schema", "fail")["text"]
    assert "riverpy migrate up" in report.one("schema", "fail")["fix"]
    assert report.of("leader") == []
    await Migrator(fresh_database_url).up(target=6)
    old = (await examine(*arguments)).one("schema", "fail")
    assert old["text"] == 'River\'s tables in "public" lack version 7, which this riverpy needs'
    await Migrator(fresh_database_url).up(target=7)
    await Migrator(fresh_database_url, line="riverpy").up()
    report = await examine(*arguments)
    river, _own = report.of("schema", "ok")
    assert "river 7 of 8" in river["text"]
    assert "version 8 changes nothing on PostgreSQL" in river["text"]
    assert river["data"]["missing"] == [8]
    assert report.of("leader") != []
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        await connection.execute(
            "INSERT INTO river_migration (line, version) VALUES ('main', 99), ('riverpy', 99)"
        )
        report = await examine(*arguments)
        assert [one["data"]["unknown"] for one in report.of("schema", "warn")] == [[99], [99]]
        assert {one["fix"] for one in report.of("schema", "warn")} == {"update riverpy"}
        assert report.of("leader") != []
        await connection.execute("DELETE FROM river_migration WHERE version IN (3, 99)")
        found = (await examine(*arguments)).one("schema", "fail")
        assert "but not 3 below it" in found["text"]
        await connection.execute("DELETE FROM river_migration")
        found = (await examine(*arguments)).one("schema", "fail")
        assert "records no version" in found["text"]
    report = await examine(*arguments, "--schema", "nowhere")
    assert "does not exist" in report.one("schema", "fail")["text"]


async def test_read_only_server(fresh_database_url: str) -> None:
    """A server that lets nobody write is a failure, and the rest is looked at all the same
    (NR-12)."""
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    report = await examine("--database-url", fresh_database_url)
    assert "lets nobody write" in report.one("connect", "fail")["text"]
    assert "reset" in report.one("connect", "fail")["fix"].lower()
    assert report.of("indexes", "ok") != []
    assert not [one for one in report.findings if "could not be looked at" in one["text"]]


async def test_standby(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby is told of with the parameter that leads past it, and no job is looked for there
    (NR-12)."""

    async def look(_connection: object) -> ServerRow:
        return ServerRow("18.1", is_standby=True, is_read_only=True, role="ada", pid=1)

    monkeypatch.setattr(server, "doctor_server", look)
    report = await doctor()
    assert "a standby" in report.one("connect", "fail")["text"]
    assert "target_session_attrs=primary" in report.one("connect", "fail")["fix"]
    assert report.findings[-1]["name"] == "schema"


async def test_settings(fresh_database_url: str) -> None:
    """Settings of the role or database that end what works as it should are told of with their
    source; a high limit and synchronous_commit are not."""
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        name = await connection.fetchval("SELECT current_database()")
        for setting in (
            "statement_timeout = '200ms'",
            "idle_session_timeout = '5s'",
            "default_transaction_isolation = 'serializable'",
            "lock_timeout = '1min'",
            "synchronous_commit = off",
        ):
            await connection.execute(f'ALTER DATABASE "{name}" SET {setting}')
    report = await examine("--database-url", fresh_database_url)
    found = {one["data"]["setting"]: one for one in report.of("settings", "warn")}
    assert set(found) == {
        "statement_timeout",
        "idle_session_timeout",
        "default_transaction_isolation",
    }
    assert "statement_timeout is 0.2s, set by the database" in found["statement_timeout"]["text"]
    assert "SET statement_timeout = '5s'" in found["statement_timeout"]["fix"]
    assert "'read committed'" in found["default_transaction_isolation"]["fix"]
    url = f"{fresh_database_url}&statement_timeout=300"
    found = {
        one["data"]["setting"]: one for one in (await examine("--database-url", url)).of("settings")
    }
    assert "out of the URL" in found["statement_timeout"]["fix"]


async def test_clock(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is off is told of, in which direction and how sure that is."""
    monkeypatch.setattr(server, "now", lambda: datetime.now(UTC) + timedelta(minutes=1))
    found = (await doctor()).one("clock", "warn")
    assert "ahead of the server" in found["text"]
    assert abs(found["data"]["skew"] - 60) < 1 + found["data"]["error"]
    assert "NTP" in found["fix"]
    monkeypatch.setattr(server, "now", lambda: datetime.now(UTC) - timedelta(minutes=1))
    assert "behind the server" in (await doctor()).one("clock", "warn")["text"]


async def test_latency_and_connections(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long round trip is told of, and connections that run out."""
    monkeypatch.setattr(server, "LATENCY_WARN", 0)
    monkeypatch.setattr(server, "CONNECTIONS_WARN", 0)
    report = await doctor()
    assert "a round trip is long" in report.one("connect", "warn")["text"]
    found = report.one("connections", "warn")
    assert found["data"]["used"] >= found["data"]["own"] >= 1
    assert "max_connections" in found["fix"]
    monkeypatch.setattr(server, "CONNECTIONS_FAIL", 0)
    assert "may be refused" in (await doctor()).one("connections", "fail")["text"]


@pytest.mark.skipif(not is_installed(), reason="pgbouncer or setpriv is not installed")
async def test_pooler(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through PgBouncer in transaction mode the pooler is seen, and that nobody can listen there,
    which is told once; a listen URL that leads past it is proven. All else is looked at as without
    it (PB-05)."""
    await register(schema, "deaf", poll_only=False)
    await seat(schema, "deaf")
    with pooled(schema.url, size=2) as url:
        with monkeypatch.context() as patch:
            patch.setattr(listeners, "PROBE_TIMEOUT", 0.2)  # it never comes
            report = await doctor(url=url)
        assert report.one("pooler", "ok")["data"] == {"is_pooled": True}
        found = report.one("listen", "warn")
        assert "pooler in transaction mode" in found["text"]
        assert "Config(pooler=True, listen_url=…)" in found["fix"]
        assert "see `listen`" in report.one("listeners", "ok")["text"]
        assert len(report.problems()) == 1
        report = await doctor("--listen-url", schema.url, url=url)
        assert "over the listen URL" in report.one("listen", "ok")["text"]
        assert {one["name"] for one in report.problems()} == {"listeners"}
    found = (await doctor("--listen-url", "postgresql://h:secret@127.0.0.1:1/d")).one(
        "listen", "warn"
    )
    assert "cannot connect" in found["text"]
    assert "secret" not in str(found)


@asynccontextmanager
async def holding(schema: Schema, begin: str, *statements: str) -> AsyncGenerator[int]:
    """The process id of a session with an open transaction in which these were executed."""
    async with schema.connected(application_name="report") as connection:
        await connection.execute(begin)
        for statement in statements:
            await connection.execute(statement)
        yield connection.get_server_pid()


async def test_snapshot_holder(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds an old snapshot is named, with process, role, program, age and statement, but no
    literal of it, and how to end it (PF-03)."""
    statement = "SELECT count(*), 'secret' FROM river_job"
    async with holding(schema, "BEGIN ISOLATION LEVEL REPEATABLE READ", statement) as pid:
        assert (await doctor()).one("snapshots", "ok")["text"].startswith("1 open one")
        monkeypatch.setattr(storage, "SNAPSHOT_AGE", 0)
        found = (await doctor()).one("snapshots", "warn")
    assert (
        f"session {pid} (postgres, 'report', idle in transaction: SELECT count(*), '…' FROM"
        in (found["text"])
    )
    assert "holds a snapshot for" in found["text"]
    assert f"pg_terminate_backend({pid})" in found["fix"]
    assert found["data"]["application"] == "report"
    assert "secret" not in str(found)
    assert (await doctor()).one("snapshots", "ok")["text"] == "nobody holds one"


async def test_other_snapshot_holders(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared transactions and replication slots hold snapshots too; a slot in use does so for
    moments, and where the age hides from the role the transactions since count (PF-03)."""
    holders = [
        SnapshotRow("prepared transaction", "order 7", "ada", "", "prepared", 90.0, 5, ""),
        SnapshotRow("replication slot", "lost", "", "", "inactive", None, 3, ""),
        SnapshotRow("replication slot", "used", "", "", "active", None, 3, ""),
        SnapshotRow("replication slot", "slow", "", "", "active", None, 2_000_000, ""),
        SnapshotRow("session", "7", "", "", "", None, 2_000_000, ""),
        SnapshotRow("session", "8", "ada", "", "active", 59.0, 2_000_000, ""),
    ]

    async def look(_connection: object) -> list[SnapshotRow]:
        return holders

    monkeypatch.setattr(storage, "doctor_snapshots", look)
    found = {one["data"]["id"]: one for one in (await doctor()).of("snapshots", "warn")}
    assert set(found) == {"order 7", "lost", "slow", "7"}
    assert "ROLLBACK PREPARED" in found["order 7"]["fix"]
    assert "pg_drop_replication_slot" in found["lost"]["fix"]
    assert (
        "session 7 (unknown role, unknown state) holds a snapshot: rows that died since then "
        "stay (2,000,000" in (found["7"]["text"])
    )


async def test_foreign_key_that_stops_clean_up(schema: Schema, doctor: Doctor) -> None:
    """A foreign key of another table that keeps jobs from being deleted is a warning that names
    both; one with ON DELETE CASCADE is none (FR-03)."""
    await schema.execute(
        "CREATE TABLE invoice (job_id bigint CONSTRAINT invoice_job REFERENCES river_job,"
        " other_id bigint REFERENCES river_job ON DELETE CASCADE)"
    )
    try:
        report = await doctor()
        found = report.one("references", "warn")
        assert found["data"]["constraint"] == "invoice_job"
        assert "invoice" in found["text"]
    finally:
        await schema.execute("DROP TABLE invoice")
    assert (await doctor()).one("references", "ok")


async def test_locks(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that holds locks on jobs is named, and how many wait for it."""
    job_id = await put(schema)
    update = f"UPDATE river_job SET priority = 2 WHERE id = {job_id}"
    async with holding(schema, "BEGIN", update) as pid, schema.connected() as rival:
        assert (await doctor()).of("locks", "warn") == []
        monkeypatch.setattr(storage, "LOCK_WAIT_AGE", 0)
        assert (await doctor()).of("locks", "warn") == []
        waiting_one = asyncio.create_task(rival.execute(update))
        while not await schema.fetchval(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1",
            rival.get_server_pid(),
        ):
            await asyncio.sleep(0.01)
        found = (await doctor()).of("locks", "warn")
        rival.terminate()
        await asyncio.gather(waiting_one, return_exceptions=True)
    assert [one["data"]["pid"] for one in found if one["data"]["waiting"]] == [str(pid)]
    found_one = next(one for one in found if one["data"]["waiting"])
    assert 'holds locks on rows of "river_job"' in found_one["text"]
    assert "1 session waits for it" in found_one["text"]
    assert f"pg_terminate_backend({pid})" in found_one["fix"]


async def test_locked_table(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that fails or takes too long is a finding of its own, and the others go on."""
    monkeypatch.setattr(session, "LOCK_LIMIT", timedelta(milliseconds=20))
    monkeypatch.setattr(storage, "LOCK_AGE", 0)
    await put(schema)
    async with holding(schema, "BEGIN", "LOCK TABLE riverpy_client"):
        report = await doctor()
    unseen = [one for one in report.findings if "could not be looked at" in one["text"]]
    assert [one["name"] for one in unseen] == [
        *(
            "listeners",
            "leader",
            "domains",
            "clients",
            "stuck",
            "set aside",
            "running",
            "queues",
            "kinds",
        ),
        "failing",
    ]
    assert {one["level"] for one in unseen} == {"warn"}
    assert all("lock timeout" in one["text"] and "`locks`" in one["fix"] for one in unseen)
    assert 'holds locks on all of "riverpy_client"' in report.one("locks", "warn")["text"]
    assert report.one("indexes", "ok")


async def test_statement_limit(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends what takes too long, and where it does not answer the doctor does; it goes
    on over a new connection."""

    limits: dict[str, object] = {"STATEMENT_LIMIT": timedelta(milliseconds=50)}
    running = patient.DatabaseSnapshot.running

    async def limited(*args: Any) -> list[Any]:
        """This look alone has little time."""
        with pytest.MonkeyPatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(session, name, limit)
            return await running(*args)

    async def slow(connection: Any, *_: object, **__: object) -> list[Any]:
        return await connection.fetch("SELECT pg_sleep(60)")

    monkeypatch.setattr(patient.DatabaseSnapshot, "running", limited)
    monkeypatch.setattr(patient, "doctor_running", slow)
    report = await doctor()
    assert "statement timeout" in report.one("clients", "warn")["text"]
    limits = {"STATEMENT_LIMIT": timedelta(seconds=60), "READ_TIMEOUT": 0.5}
    report = await doctor()
    assert "no answer within 0.5 s" in report.one("clients", "warn")["text"]
    assert report.one("indexes", "ok")


async def test_lost_connection(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is gone in the middle ends the run with what was found until then."""

    async def lose(found: session.Session, _role: str) -> list[Finding]:
        (await found.connection()).terminate()
        found.url = "postgresql://127.0.0.1:1/db"
        return []

    monkeypatch.setattr(examination, "check_settings", lose)
    report = await doctor()
    assert [one["name"] for one in report.findings] == ["connect", "pooler", "connect"]
    assert "the connection was lost" in report.findings[-1]["text"]


async def test_vacuum(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autovacuum that is off, for the table or the server, is told of, and dead rows that it has
    had time for (PF-03)."""
    dead = TableRow(
        live=10,
        dead=100_001,
        vacuumed=7200.0,
        waited=7200.0,
        is_under_way=False,
        is_on=True,
        is_off_here=False,
    )
    rows = {
        "dead": dead,
        "new": dead._replace(vacuumed=None, waited=599.0),
        "under way": dead._replace(is_under_way=True),
        "off": dead._replace(dead=1, is_on=False),
        "held": dead._replace(dead=20),
        "live": dead._replace(live=300_000, dead=200_000),
    }
    await schema.execute("ALTER TABLE river_job SET (autovacuum_enabled = off)")
    try:
        found = (await doctor()).one("vacuum", "warn")
    finally:
        await schema.execute("ALTER TABLE river_job RESET (autovacuum_enabled)")
    assert "autovacuum is off for the table" in found["text"]
    assert "RESET (autovacuum_enabled)" in found["fix"]
    current = ""

    async def look(*_: object, **__: object) -> TableRow:
        return rows[current]

    monkeypatch.setattr(storage, "doctor_table", look)
    current = "dead"
    found = (await doctor()).one("vacuum", "warn")
    assert "100,001 dead ones, vacuumed 2h ago: more dead than live" in found["text"]
    current = "off"
    assert "ALTER SYSTEM SET autovacuum" in (await doctor()).one("vacuum", "warn")["fix"]
    for current in ("live", "new", "under way"):
        found = (await doctor()).one("vacuum", "ok")
        assert ("a vacuum is under way" in found["text"]) == (current == "under way")
    current = "held"
    assert "`snapshots`" not in (await doctor()).one("vacuum", "ok")["text"]
    monkeypatch.setattr(storage, "SNAPSHOT_AGE", 0)
    async with holding(schema, "BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1"):
        assert (
            "they stay as long as somebody holds an older snapshot (`snapshots`)"
            in ((await doctor()).one("vacuum", "ok")["text"])
        )


async def test_invalid_index_and_artifact(schema: Schema, doctor: Doctor) -> None:
    """An index whose build failed is a failure, what a rebuild left a warning, each with the
    statement that mends it; a missing index of River's is a failure (MG-03, LM-11)."""
    await schema.execute("CREATE INDEX river_job_kind_ccnew ON river_job (kind)")
    await schema.execute("CREATE INDEX river_job_extra ON river_job (kind)")
    await schema.execute("ALTER INDEX river_job_unique_idx RENAME TO elsewhere")
    try:
        assert (await doctor()).of("indexes", "warn") == []  # somebody may name his index so
        await schema.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid IN"
            " ('river_job_kind_ccnew'::regclass, 'river_job_extra'::regclass)"
        )
        report = await doctor()
    finally:
        await schema.execute("ALTER INDEX elsewhere RENAME TO river_job_unique_idx")
        await schema.execute("DROP INDEX river_job_kind_ccnew, river_job_extra")
    artifact = report.one("indexes", "warn")
    assert "river_job_kind_ccnew is what an interrupted rebuild left" in artifact["text"]
    assert f'DROP INDEX CONCURRENTLY "{schema.name}"."river_job_kind_ccnew"' in artifact["fix"]
    missing, invalid = sorted(report.of("indexes", "fail"), key=lambda one: "index" in one["data"])
    assert invalid["fix"] == f'REINDEX INDEX CONCURRENTLY "{schema.name}"."river_job_extra"'
    assert missing["data"]["missing"] == ["river_job_unique_idx"]
    assert report.exit_code == 1


async def test_bloat(schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is much larger than its entries need is told of as an estimate; after a rebuild
    it is not."""
    monkeypatch.setattr(storage, "BLOAT_SIZE", 100_000)
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args)"
        " SELECT 'kind ' || i, 25, '{}' FROM generate_series(1, 10000) AS i"
    )
    await schema.execute("ANALYZE river_job")
    assert (await doctor()).of("indexes", "warn") == []
    await schema.execute("DELETE FROM river_job WHERE id % 500 <> 0")
    await schema.execute("VACUUM ANALYZE river_job")
    found = {one["data"]["index"]: one for one in (await doctor()).of("indexes", "warn")}
    assert {"river_job_pkey", "river_job_kind", "river_job_prioritized_fetching_index"} <= set(
        found
    )
    assert "an estimate" in found["river_job_pkey"]["text"]
    await schema.execute("REINDEX TABLE river_job")
    assert (await doctor()).of("indexes", "warn") == []


async def test_nothing_is_written(schema: Schema) -> None:
    """Each look is a read-only transaction, and the server refuses what writes."""
    found = session.Session(schema.url)
    try:
        async with found.reading() as connection:
            with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                await connection.execute(f"TRUNCATE {schema.name}.river_job")
            raise LookupError
    except LookupError:
        assert not (await found.connection()).is_in_transaction()
    finally:
        await found.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("SELECT  1\n FROM t", "SELECT 1 FROM t"),
        ("SELECT 'it''s' || E'a\\'b' || 'open", "SELECT '…' || E'…' || '…'"),
        ("DO $x$ 'secret' $x$", "DO '…'"),
        ("DO $$ secret", "DO '…'"),
        ("ALTER ROLE ada PASSWORD 'secret'", "ALTER ROLE ada PASSWORD '…'"),
        ("SELECT 1 -- don't\nFROM t WHERE p = 'secret'", "SELECT 1 FROM t WHERE p = '…'"),
        ("/* it's */ SELECT 'secret'", "SELECT '…'"),
        ("/* /* */ it's */ SELECT 'secret'", ""),
        ("SELECT \"it's\" FROM t WHERE p = 'secret'", "SELECT \"it's\" FROM t WHERE p = '…'"),
        (r"SELECT 'C:\x', 'C:\', 'secret'", "SELECT '…', '…'"),
        (r"SELECT 'a\' || ', secret", "SELECT '…'"),
        ("CONNECT postgresql://ada:secret@host/db", "CONNECT postgresql://ada:***@host/db"),
        ("x" * 100, "x" * 79 + "…"),
        ("", ""),
    ],
)
def test_masked_query(text: str, shown: str) -> None:
    """The head of a statement has no string in it (SE-02)."""
    assert masked_query(text) == shown


def test_words() -> None:
    """Durations, sizes, counts and names as people read them."""
    assert [span(n) for n in (-1, 0.04, 2, 9.96, 61, 3725, 3630, 200_000)] == [
        *("0s", "0s", "2s", "10s", "1m1s", "1h2m", "1h", "2d7h"),
    ]
    assert [size(n) for n in (0, 9_999, 20_480, 5e7, 2e10, 2e16)] == [
        *("0 bytes", "9,999 bytes", "20 kB", "48 MB", "19 GB", "18,190 TB"),
    ]
    assert count(1, "job") == "1 job"
    assert count(2_000, "index", plural="indexes") == "2,000 indexes"
    assert count(10, "job", limit=10) == "at least 10 jobs"
    assert names("abcdefg") == '"a", "b", "c", "d", "e" and 2 more'
    assert worst([]) is Level.OK
    assert worst([Finding(Level.FAIL, "a", ""), Finding(Level.WARN, "a", "")]) is Level.FAIL
