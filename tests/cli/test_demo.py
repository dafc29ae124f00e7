"""The command demo: what it runs, what it prints, and that it notices what went wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from riverpy._tools.demo import run as _demo_run
from riverpy._tools.demo.files import FileScan
from riverpy._tools.demo.jobs import CompressFileArgs, CountFilesArgs, DemoJobFunctions
from riverpy._tools.demo.run import DemoRun
from riverpy._tools.errors import ToolError
from riverpy.errors import JobCancel
from riverpy.events import EventKind
from riverpy.insert_opts import InsertOpts
from riverpy.job import Job  # noqa: TC001 (the annotations of the jobs are read at run time)
from tests._database import connected
from tests.cli.invoking import invoke
from tests.cli.worker_process import RIVERPY, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from riverpy._tools.demo.run import DemoResult
    from riverpy.events import Event
    from tests._database import Schema

HELD = """
SELECT FROM pg_locks JOIN pg_database AS d ON d.oid = database
WHERE locktype = 'advisory' AND datname = current_database()
"""
SPECIALS = 9
"""Jobs beside those for files, if there is no limit."""


def demo(*args: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command without the settings of this machine."""
    return subprocess.run(
        [RIVERPY, "demo", *args],
        env=environment(**environ),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def schema_of(stderr: str) -> str:
    """The schema that a run prints."""
    found = re.search(r"in schema (riverpy_demo_[0-9a-f]{8})", stderr)
    assert found, stderr
    return found[1]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with 20 files, some of them below it."""
    directory = tmp_path / "files"
    (directory / "below").mkdir(parents=True)
    for number in range(20):
        place = directory / "below" if number % 2 else directory
        (place / f"{number} ü.txt").write_text(f"{number}\n" * 1000 * number)
    return directory


def test_object(files: Path, database_url: str) -> None:
    """With --json stdout is one object, and progress goes to stderr."""
    done = demo("--dir", files, "--database-url", database_url, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert list(found) == ["jobs", "states", "duration_s", "work_per_s", "ok"]
    assert found["jobs"] == 20 + SPECIALS
    assert found["states"] == {"completed": 20 + SPECIALS - 2, "cancelled": 2}
    assert found["duration_s"] > 0
    assert found["work_per_s"] == pytest.approx(found["jobs"] / found["duration_s"], rel=0.01)
    assert found["ok"] is True
    assert re.search(r"^\d+ completed, \d failed attempts, ", done.stderr, re.MULTILINE)


async def test_jobs(files: Path, database_url: str) -> None:
    """Each file is hashed; some jobs are retried, snoozed, cancelled, and none is there twice.

    Without --json stdout shows the results, the checks and commands to look at the jobs.
    """
    done = await asyncio.to_thread(demo, "--dir", files, "--database-url", database_url)
    assert done.returncode == 0, done.stderr
    async with connected(database_url, search_path=schema_of(done.stderr)) as connection:
        rows = await connection.fetch("SELECT * FROM river_job ORDER BY id")
    jobs: dict[str, list[Any]] = {}
    for row in rows:
        jobs.setdefault(row["kind"], []).append(row)
    paths = {str(path) for path in files.rglob("*") if path.is_file()}
    assert {json.loads(row["args"])["path"] for row in jobs["compress_file"]} == paths
    for row in jobs["compress_file"]:
        content = Path(json.loads(row["args"])["path"]).read_bytes()
        output = json.loads(row["metadata"])["output"]
        assert output["sha256"] == hashlib.sha256(content).hexdigest()
        assert output["bytes_in"] == len(content)
    assert [(row["state"], row["attempt"], len(row["errors"])) for row in jobs["fail_once"]] == [
        ("completed", 2, 1)
    ] * 3
    (snoozed,) = jobs["snooze_once"]
    assert (snoozed["state"], snoozed["attempt"]) == ("completed", 1)
    assert json.loads(snoozed["metadata"])["snoozes"] == 1
    assert [row["state"] for row in jobs["cancel_itself"]] == ["cancelled"]
    (cancelled,) = jobs["run_until_cancelled"]
    assert cancelled["state"] == "cancelled"
    assert "cancelled remotely" in cancelled["errors"][0]
    assert [row["unique_key"] is not None for row in jobs["count_files"]] == [True] * 3
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["KIND", "STATE", "JOBS", "ATTEMPTS"]
    assert lines[1].split()[:4] == ["compress_file", "completed", "20", "20"]
    fail_once = next(line for line in lines if line.startswith("fail_once "))
    assert fail_once.split()[2:4] == ["3", "6"]
    assert len([line for line in lines if line.startswith("ok ")]) == 4
    assert "FAIL" not in done.stdout
    assert f"--schema {schema_of(done.stderr)}" in done.stdout


def test_default_directory(database_url: str) -> None:
    """--jobs limits how many jobs there are; the files are sources of the standard library."""
    done = demo("--jobs", "30", "--json", "--database-url", database_url)
    assert json.loads(done.stdout)["jobs"] == 30
    found = FileScan(None, None)
    assert len(found.paths) > 300
    assert all(path.endswith(".py") for path in found.paths)
    assert not any("site-packages" in path for path in found.paths)
    assert found.problems == []


def test_low_limit(files: Path, database_url: str) -> None:
    """A low limit leaves out the less telling jobs, but not the files."""
    done = demo("--jobs", "1", "--json", "--dir", files, "--database-url", database_url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["states"] == {"completed": 1}
    for limit in (1, 2, 9, 10, 29, 30):
        run = DemoRun(database_url, None, FileScan(files, limit), limit, lambda _event: None)
        assert run.job_count == min(limit, 20 + SPECIALS)


def test_embedded(files: Path, embedded_directory: Path) -> None:
    """Without a URL it starts a PostgreSQL of its own, twice in a row, and lets go of it."""
    for _ in range(2):
        done = demo("--dir", files, "--json", RIVERPY_EMBEDDED_DIR=str(embedded_directory))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ok"] is True
    assert re.match(r"riverpy \S+: PostgreSQL \d+\.\d+ \(\S+\) in /tmp/rp-", done.stderr)


async def test_at_once(files: Path, fresh_database_url: str) -> None:
    """Runs at once have a schema each; a later run drops those of runs that have ended."""
    args = ("--dir", files, "--json", "--database-url", fresh_database_url)
    runs = await asyncio.gather(*(asyncio.to_thread(demo, *args) for _ in range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len({schema_of(run.stderr) for run in runs}) == 3
    async with connected(fresh_database_url) as connection:
        while await connection.fetch(HELD):  # by sessions whose programs have ended
            await asyncio.sleep(0.01)
        last = await asyncio.to_thread(demo, *args)
        rows = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname ~ 'demo'")
    assert [row[0] for row in rows] == [schema_of(last.stderr)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dir", "/nope"], "'/nope' does not exist"),
        (["--dir", "/etc/passwd"], "'/etc/passwd' is a file"),
        (["--jobs", "0"], "'0' is not a whole number from 1"),
        (["--jobs", "-1"], "'-1' is not a whole number from 1"),
        (["--jobs", "many"], "'many' is not a whole number"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    """Wrong options are one line on stderr and exit code 2."""
    done = invoke("demo", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_file(tmp_path: Path) -> None:
    """A directory without a regular file is wrong usage; links, pipes and the like are none."""
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    done = demo("--dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no file to read below {tmp_path}" in done.stderr


async def test_schema(files: Path, schema: Schema) -> None:
    """--schema names where to work; jobs that are there are not touched."""
    args = ("--dir", files, "--database-url", schema.url, "--schema", schema.name, "--json")
    first = await asyncio.to_thread(demo, *args)
    assert first.returncode == 0, first.stderr
    before = await schema.jobs()
    assert len(before) == 20 + SPECIALS
    second = await asyncio.to_thread(demo, *args)
    assert (second.returncode, second.stdout) == (1, "")
    assert f"schema '{schema.name}' has 29 jobs" in second.stderr
    assert await schema.jobs() == before


async def test_absent_schema(files: Path, database_url: str) -> None:
    """A schema that is named must exist: no command but the demo makes one, and only its own."""
    args = ("--dir", files, "--database-url", database_url, "--schema", "absent_demo")
    done = await asyncio.to_thread(demo, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert "schema 'absent_demo' does not exist" in done.stderr
    async with connected(database_url) as connection:
        assert not await connection.fetch("SELECT FROM pg_namespace WHERE nspname = 'absent_demo'")


@pytest.mark.parametrize("command", [[RIVERPY], [sys.executable, "-m", "riverpy"]])
async def test_next_commands(files: Path, database_url: str, command: list[str | Path]) -> None:
    """What is printed to be run next can be run as it is, also if riverpy is not on the PATH."""
    clean = {**environment(), "PATH": "/usr/bin:/bin"}

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(args, env=clean, cwd="/", capture_output=True, text=True)

    args = ("demo", "--dir", files, "--database-url", database_url)
    done = await asyncio.to_thread(run, *command, *args)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "job list" in line]
    assert len(lines) == 2
    for line in lines:
        shown = await asyncio.to_thread(run, "/bin/sh", "-c", line)
        assert shown.returncode == 0, shown.stderr
        assert "cancel_itself" in shown.stdout


async def test_dashboard(database_url: str) -> None:
    """With --web, which is the default on a terminal, it serves the dashboard of its jobs at the
    end, until a signal. The exit code is that of the demo."""
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "demo", "--jobs=9", "--json", "--web", "--database-url", database_url),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr
    assert process.stdout
    text = ""
    while "(Ctrl-C ends the demo)" not in text:
        line = await process.stderr.readline()
        assert line, text
        text += line.decode()
    (url,) = re.findall(r"http://\S+", text)
    async with httpx.AsyncClient() as http:
        assert "cancel_itself" in (await http.get(f"{url}jobs")).text
    process.send_signal(signal.SIGINT)
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(stdout)["ok"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupt(database_url: str, number: signal.Signals) -> None:
    """Ctrl-C, or SIGTERM, ends it soon with code 130, and nothing stays running (LD-10)."""
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "demo", "--database-url", database_url),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr
    schema = schema_of((await process.stderr.readline()).decode())
    async with connected(database_url, search_path=schema) as connection:
        async with connection.transaction():
            while not await connection.fetch("SELECT FROM river_job FOR UPDATE"):
                await asyncio.sleep(0.005)
            process.send_signal(number)  # before it ends: a job that is held cannot be worked
        stdout, stderr = await process.communicate()
        states = await connection.fetch("SELECT DISTINCT state FROM river_job")
    assert process.returncode == 130
    assert stdout == b""
    assert stderr.decode().endswith("riverpy: interrupted\n")
    assert "running" not in {row[0] for row in states}


# --- what goes wrong


async def run_of(
    url: str, files: FileScan, schema: str | None = None
) -> tuple[DemoResult, list[Event]]:
    """Run the demo in this process. Return its result and its events."""
    events: list[Event] = []
    result = await DemoRun(url, schema, files, None, events.append).run(lambda: None)
    return result, events


async def test_events(files: Path, database_url: str) -> None:
    """The progress counts events of the client's own jobs."""
    result, events = await run_of(database_url, FileScan(files, None))
    assert result.is_ok
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.JOB_FAILED) == 3
    assert kinds.count(EventKind.JOB_SNOOZED) == 1


async def test_unreadable(files: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cannot be listed or read are counted, and are no failure."""
    Path(os.fsdecode(os.fsencode(files) + b"/\xff")).write_text("no text")
    found = FileScan(files, None)
    assert found.problems == [rf"b'{files}/\xff': its name is not UTF-8"]
    (files / "0 ü.txt").unlink()
    result, _ = await run_of(database_url, found)
    assert result.is_ok
    assert result.read_errors == [f"{files}/0 ü.txt: cannot read it: No such file or directory"]
    assert result.job_count_by_state["cancelled"] == 3

    def walk(_top: Path, onerror: Callable[[OSError], None]) -> Iterator[Any]:  # root reads all
        onerror(PermissionError(13, "Permission denied", "/a/b"))
        return iter(())

    monkeypatch.setattr(os, "walk", walk)
    assert FileScan(files, None).problems == ["/a/b: Permission denied"]


def _wrong_digest(self: DemoJobFunctions, path: Path) -> dict[str, object]:
    return {"bytes_in": path.stat().st_size, "bytes_out": 1, "sha256": "0" * 64}


def _no_output(self: DemoJobFunctions, job: Job[CompressFileArgs]) -> None:
    pass


def _gives_up(self: DemoJobFunctions, job: Job[CompressFileArgs]) -> None:
    raise JobCancel("no wish to")


def _not_unique(self: CountFilesArgs) -> InsertOpts:
    return InsertOpts()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "problem"),
    [
        (DemoJobFunctions, "_compress_and_hash", _wrong_digest, [False, False, False, True]),
        (DemoJobFunctions, "compress_file", _no_output, [False, False, True, False]),
        (DemoJobFunctions, "compress_file", _gives_up, [True, False, False, False]),
        (CountFilesArgs, "insert_opts", _not_unique, [True, True, False, False]),
    ],
)
async def test_checks(
    owner: type,
    name: str,
    broken: Any,
    problem: list[bool],
    files: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that did not do what it should is found, by the check that is for it."""
    monkeypatch.setattr(owner, name, broken)
    result, _ = await run_of(database_url, FileScan(files, None))
    assert not result.is_ok
    assert [bool(problems) for problems in result.problems_by_check.values()] == problem


async def test_stall(files: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that no client works end the run with an error."""
    monkeypatch.setattr(_demo_run, "STALL_TIMEOUT", 0.3)
    await schema.execute(
        "INSERT INTO river_queue (name, updated_at, paused_at) VALUES ('default', now(), now())"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(ToolError, match="29 jobs .* are left")):
        await run_of(schema.url, FileScan(files, None), schema.name)
