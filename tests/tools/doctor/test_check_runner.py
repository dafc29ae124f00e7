"""The run of `riverpy doctor`: output, exit codes, and checks that fail."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg
import pytest
from click.testing import CliRunner

from riverpy._tools.doctor import server, session, snapshot, storage
from riverpy._tools.doctor.finding import add_check_name, fail_finding
from riverpy.cli import main
from riverpy.cli.doctor import _print_finding
from tests.cli.worker_process import RIVERPY, environment
from tests.tools.doctor.conftest import (
    holding,
    insert_job,
    run_doctor,
    run_text,
)
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from riverpy._tools.doctor.finding import Finding
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_unreachable_server() -> None:
    """A server that cannot be reached is a finding with an exit code. It shows neither a
    traceback nor the password (SE-02, OP-04)."""
    url = "postgresql://ada:secret@127.0.0.1:1/db"
    exit_code, text = await run_text("--database-url", url)
    assert exit_code == 1
    assert text.startswith("FAIL  connect       cannot connect to 127.0.0.1:1")
    assert text.count("\n") == 3
    assert text.endswith("\n1 FAIL\n")
    assert "      fix: check that the server runs" in text
    assert "secret" not in text
    report = await run_doctor("--database-url", url)
    assert [one["name"] for one in report.findings] == ["connect"]


async def test_debug() -> None:
    """`--debug` shows the traceback of an error that became a finding or a failed check (OP-04)."""
    url = "postgresql://ada:secret@127.0.0.1:1/db"
    runner = CliRunner()
    for command in ("doctor", "health"):
        args = [command, "--debug", "--database-url", url]
        result = await asyncio.to_thread(runner.invoke, main, args)
        assert "Traceback" in result.stderr
        assert "cannot connect to 127.0.0.1:1" in result.stdout
        assert "secret" not in result.output


async def test_no_such_database(database_url: str) -> None:
    """A missing database has its own fix."""
    url = urlunsplit(urlsplit(database_url)._replace(path="/no_such_database"))
    found = (await run_doctor("--database-url", url)).one("connect", "fail")
    assert "does not exist" in found["text"]
    assert "CREATE DATABASE" in found["fix"]


@pytest.mark.parametrize("command", ["doctor", "health"])
async def test_closed_pipe(schema: Schema, command: str) -> None:
    """When the reader of the output has gone, the command ends with its usual exit code and
    prints no error (OP-05)."""
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
    """A missing database URL or a wrong option is a usage error. `--help` explains the exit codes
    (OP-04)."""
    assert (await run_text())[0] == 2
    exit_code, text = await run_text(
        "--database-url", "postgresql://h/d", "--listen-url", "http://x"
    )
    assert exit_code == 2
    assert "--listen-url" in text
    _, text = await run_text("--help")
    assert "5 there are warnings, 1 something fails" in " ".join(text.split())


async def test_text(schema: Schema, doctor: Doctor) -> None:
    """Each finding is one line with its fix below. The last line counts the findings, and the
    exit code is that of the worst level. `--problems` hides what is ok."""
    arguments = ("--database-url", schema.url, "--schema", schema.name)
    exit_code, text = await run_text(*arguments)
    assert exit_code == 5
    lines = text.splitlines()
    assert lines[0].startswith("ok    connect       PostgreSQL ")
    place = lines.index("warn  clients       no riverpy client runs on this schema")
    assert lines[place + 1] == "      fix: start a worker: riverpy worker MODULE:ATTR"
    assert re.fullmatch(r"2 warn, \d+ ok", lines[-1])
    exit_code, text = await run_text(*arguments, "--problems")
    assert exit_code == 5
    shown = text.splitlines()
    assert [line[:17] for line in shown[::2]] == [
        "warn  leader     ",
        "warn  clients    ",
        lines[-1],
    ]
    assert (await doctor("--problems")).findings == (await doctor()).problems()


def test_wrapping(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal a long line is wrapped and indented."""
    (finding,) = add_check_name(
        "kinds", [fail_finding("one two three four five six", "seven eight nine ten")]
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    _print_finding(finding)
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  kinds         one two three four",
        "                    five six",
        "      fix: seven eight nine ten",
    ]


async def test_locked_table(
    schema: Schema, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that fails or takes too long is a finding, and the other checks run."""
    monkeypatch.setattr(session, "LOCK_TIMEOUT", timedelta(milliseconds=20))
    monkeypatch.setattr(storage, "LOCK_AGE_WARN_SECONDS", 0)
    await insert_job(schema)
    async with holding(schema, "BEGIN", "LOCK TABLE riverpy_client"):
        report = await doctor()
    failed = [one for one in report.findings if "this check failed" in one["text"]]
    assert [one["name"] for one in failed] == [
        *(
            "listeners",
            "leader",
            "domains",
            "clients",
            "stuck",
            "set aside",
            "running",
            "unregistered",
            "queues",
            "kinds",
        ),
        "failing",
        "leases",
    ]
    assert {one["level"] for one in failed} == {"warn"}
    assert all("lock timeout" in one["text"] and "`locks`" in one["fix"] for one in failed)
    assert 'locks all of "riverpy_client"' in report.one("locks", "warn")["text"]
    assert report.one("indexes", "ok")


async def test_timeouts(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cancels a slow statement. If the server does not answer, doctor gives up and
    continues over a new connection."""

    limits: dict[str, object] = {"STATEMENT_TIMEOUT": timedelta(milliseconds=50)}
    running = snapshot.DatabaseSnapshot.running_job_groups

    async def limited(*args: Any) -> list[Any]:
        """Run this read with short timeouts."""
        with pytest.MonkeyPatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(session, name, limit)
            return await running(*args)

    async def slow(connection: Any, *_: object, **__: object) -> list[Any]:
        return await connection.fetch("SELECT pg_sleep(60)")

    monkeypatch.setattr(snapshot.DatabaseSnapshot, "running_job_groups", limited)
    monkeypatch.setattr(snapshot, "read_running_job_groups", slow)
    report = await doctor()
    assert "statement timeout" in report.one("clients", "warn")["text"]
    limits = {"STATEMENT_TIMEOUT": timedelta(seconds=5), "READ_TIMEOUT": 0.5}
    report = await doctor()
    assert "no answer within 0.5 s" in report.one("clients", "warn")["text"]
    assert report.one("indexes", "ok")


async def test_lost_connection(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server goes away, the run ends with the findings that it has."""

    async def lose(found: session.DoctorSession, _role: str) -> list[Finding]:
        (await found.ensure_connection()).terminate()
        found.url = "postgresql://127.0.0.1:1/db"
        return []

    monkeypatch.setattr(server, "check_settings", lose)
    report = await doctor()
    assert [one["name"] for one in report.findings] == ["connect", "pooler", "connect"]
    assert "the connection was lost" in report.findings[-1]["text"]


async def test_reads_are_read_only(schema: Schema) -> None:
    """Each read is a read-only transaction, and the server refuses writes in it."""
    found = session.DoctorSession(schema.url)
    try:
        async with found.read_only_transaction() as connection:
            with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                await connection.execute(f"TRUNCATE {schema.name}.river_job")
            raise LookupError
    except LookupError:
        assert not (await found.ensure_connection()).is_in_transaction()
    finally:
        await found.close()


async def test_healthy(schema: Schema, doctor: Doctor) -> None:
    """A healthy fleet has only findings that are ok, in a fixed order, and the exit code is 0."""
    rig = Rig(schema)
    begun, end = anyio.Event(), anyio.Event()

    async def work(job: Any) -> None:
        begun.set()
        await end.wait()

    rig.job(work)
    async with rig.working(id="one") as client, rig.working(id="two"):
        await rig.until("SELECT count(*) FROM river_leader")
        await rig.until("SELECT count(*) FROM riverpy_client", 2)
        await client.insert(Task())
        await begun.wait()
        report = await doctor()
        end.set()
    assert report.problems() == []
    assert report.exit_code == 0
    names = list(dict.fromkeys(one["name"] for one in report.findings))
    assert names == [
        *("connect", "pooler", "settings", "clock", "connections", "schema", "grants"),
        *("notifications", "listen"),
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
        *("failing", "damaged", "scheduled", "periodic", "leases", "references"),
        *("snapshots", "locks", "vacuum", "indexes"),
    ]
    assert report.one("listeners", "ok")["data"]["needed"] == 2
    assert report.one("leader", "ok")["data"]["leader_id"] in {"one", "two"}
    clients = report.one("clients", "ok")["data"]["clients"]
    assert {one["client_id"]: one["alive"] for one in clients} == {"one": True, "two": True}
    assert sum(one["running_jobs"] for one in clients) == 1
    assert 'kind "task"' in report.one("running", "ok")["text"]
    assert report.one("queues", "ok")["data"]["queues"] == {
        "default": {"available": 0, "oldest_due": None, "paused_for": None, "clients": 2}
    }
