"""The command bench, and the bare loop beside it. Nothing here asserts a speed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._postgres.sql_files import get_query
from riverpy._tools.bench import run as _bench_run
from riverpy._tools.bench.process_cost import ServerProcesses, read_process_memory_mib
from riverpy._tools.bench.run import BENCH_QUEUE, BenchLoad, BenchRun, compute_slot_occupancy
from riverpy._tools.errors import ToolError
from riverpy.errors import SchemaMissingError
from riverpy.migrate import Migrator
from tests._database import connected
from tests.cli.invoking import invoke
from tests.cli.worker_process import RIVERPY, environment

if TYPE_CHECKING:
    import asyncpg

    from riverpy._tools.bench.run import BenchResult
    from tests._database import Schema

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: few pickups, and the garbage collector as it is."""
    monkeypatch.setattr(_bench_run, "PICKUP_JOB_COUNT", 5)
    monkeypatch.setattr(_bench_run, "reduce_garbage_collection", lambda: None)


def bench(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command without the settings of this machine."""
    return subprocess.run(
        [RIVERPY, "bench", *args],
        env=environment(**environ),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


async def measure(schema: Schema, *, jobs: int = 300, slots: int = 20, **load: Any) -> BenchResult:
    """A measurement in this process, on an empty table."""
    measured = BenchRun(
        schema.url, schema.name, BenchLoad(job_count=jobs, max_workers=slots, **load)
    )
    assert await measured.require_empty_job_table(delete_jobs=False) == 0
    return await measured.measure()


def test_object(embedded_directory: Path) -> None:
    """With --json stdout is one object with a value for each measure.

    With --embedded the database is a PostgreSQL that is started for it.
    """
    done = bench(
        *("--embedded", "-n", "300", "--slots", "20", "--sleep-ms", "1", "--prefetch", "--json"),
        RIVERPY_EMBEDDED_DIR=str(embedded_directory),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.keys() == {
        "jobs",
        "slots",
        "insert_per_s",
        "work_per_s",
        "client_cpu_us_per_job",
        "server_cpu_us_per_job",
        "occupancy",
        "pickup_p50_ms",
        "pickup_p99_ms",
        "rss_mib",
        "riverpy_version",
        "postgres_version",
    }
    assert (found["jobs"], found["slots"]) == (300, 20)
    assert all(value for name, value in found.items() if name != "server_cpu_us_per_job")
    assert found["pickup_p50_ms"] <= found["pickup_p99_ms"]
    assert 0 < found["occupancy"] <= 1


async def test_jobs(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs went through the worker, in a queue of their own, and stay in the table."""
    monkeypatch.setattr(_bench_run, "JOBS_PER_COPY", 500)
    found = await measure(schema, jobs=_bench_run.JOBS_PER_COPY + 1)
    assert found.jobs == _bench_run.JOBS_PER_COPY + 1
    rows = await schema.fetch(
        "SELECT queue, state, attempt, cardinality(attempted_by) AS by, count(*) AS jobs"
        " FROM river_job GROUP BY 1, 2, 3, 4"
    )
    assert [tuple(row) for row in rows] == [(BENCH_QUEUE, "completed", 1, 1, found.jobs + 5)]


async def test_occupancy(schema: Schema) -> None:
    """The share counts only the time in which all slots have work. There is no share without
    sleeps, or with too few jobs."""
    begun, ended = [0.0, 0.0, 10.0, 14.0, 18.0, 20.0], [10.0, 12.0, 18.0, 20.0, 30.0, 30.0]
    assert compute_slot_occupancy(begun, ended, 2) == 0.5  # from 12 to 14 only the third job runs
    assert compute_slot_occupancy([0.0, 0.0, 12.0, 12.0], [10.0, 12.0, 20.0, 20.0], 2) is None
    assert compute_slot_occupancy([0.0, 0.0], [1.0, 2.0], 2) is None
    assert (await measure(schema, jobs=50, slots=20)).occupancy is None


async def test_jobs_there(schema: Schema) -> None:
    """A table with jobs is refused and not changed; --force deletes the jobs and prints a note.

    Without --json stdout is a table.
    """
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts) VALUES ('mine', '{}', 25)"
    )
    args = ("--database-url", schema.url, "--schema", schema.name, "-n", "100")
    refused = await asyncio.to_thread(bench, *args)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "river_job has 1 jobs: use --force" in refused.stderr
    assert [job["kind"] for job in await schema.jobs()] == ["mine"]
    forced = await asyncio.to_thread(bench, *args, "--force")
    assert forced.returncode == 0, forced.stderr
    assert forced.stderr == "deleted 1 jobs from the table\n"
    assert "mine" not in {job["kind"] for job in await schema.jobs()}
    lines = forced.stdout.splitlines()
    assert lines[0].endswith("100 jobs, 100 slots")
    measures = ["insert", "work", "CPU", "CPU", "occupancy", "pickup", "pickup", "memory"]
    assert [line.split()[0] for line in lines[3:]] == measures


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no database is given"),
        (["-n", "0", "--embedded"], "'0' is not a whole number from 1"),
        (["--slots", "0", "--embedded"], "'0' is not a whole number from 1 to 10000"),
        (["--slots", "10001", "--embedded"], "'10001' is not a whole number"),
        (["--sleep-ms", "nan", "--embedded"], "'nan' is not a number"),
        (["--embedded", "--database-url", "postgres://u:s3cret@h/d"], "exclude each other"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    """Wrong options are one line on stderr and exit code 2."""
    done = invoke("bench", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stderr


async def test_no_tables(fresh_database_url: str) -> None:
    """Without River's tables the error names the command that creates them."""
    with pytest.raises(SchemaMissingError, match="riverpy migrate up"):
        await BenchRun(
            fresh_database_url, None, BenchLoad(job_count=1, max_workers=1)
        ).require_empty_job_table(delete_jobs=False)


async def test_one_job(schema: Schema) -> None:
    """The smallest measurement works."""
    assert (await measure(schema, jobs=1, slots=1)).jobs == 1


async def test_paused(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are not worked end the measurement with an error."""
    monkeypatch.setattr(_bench_run, "STALL_TIMEOUT", 0.3)
    await schema.execute(
        "INSERT INTO river_queue (name, updated_at, paused_at) VALUES ($1, now(), now())",
        BENCH_QUEUE,
    )
    with pytest.RaisesGroup(pytest.RaisesExc(ToolError, match="300 jobs .* are left")):
        await measure(schema)


async def test_rival(schema: Schema) -> None:
    """Jobs that did not complete at their first attempt make the measurement void."""
    await schema.execute(
        "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN NEW.attempt := 2; RETURN NEW; END';"
        " CREATE TRIGGER spoil BEFORE UPDATE ON river_job FOR EACH ROW"
        " WHEN (OLD.id % 100 = 0 AND NEW.state = 'completed') EXECUTE FUNCTION spoil()"
    )
    try:
        with pytest.raises(ToolError, match="297 of 300 jobs were completed"):
            await measure(schema)
    finally:
        await schema.execute("DROP TRIGGER spoil ON river_job; DROP FUNCTION spoil()")


async def test_server_processes(conn: asyncpg.Connection[Any]) -> None:
    """The server's processor time is read where it runs on this machine, and else not guessed."""
    ((pid, is_local, _),) = await get_query("bench", "bench_server", None).fetch(conn)
    processes = ServerProcesses.find_by_backend(pid)
    if is_local and processes is not None:
        grew = False
        while not grew:  # the CPU time of a process that ends is lost
            before = processes.read_cpu_seconds()
            await conn.fetchval("SELECT count(*) FROM generate_series(1, 3000000)")
            grew = processes.read_cpu_seconds() > before
    assert ServerProcesses.find_by_backend(os.getpid()) is None
    assert ServerProcesses.find_by_backend(2**22 + 1) is None


def test_memory() -> None:
    """The memory of this process is in MiB: a test process has some tens to some hundreds."""
    held = read_process_memory_mib()
    assert held is not None
    assert 10 < held < 10_000


async def test_bare_loop(fresh_database_url: str) -> None:
    """The yardstick works every job of a table once."""
    await Migrator(fresh_database_url).up()
    script = ROOT / "scripts" / "bare_loop.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, fresh_database_url, "3000", "100"),
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(stdout)
    assert (found["slots"], found["left"]) == (100, 0)
    async with connected(fresh_database_url) as connection:
        rows = await connection.fetch(
            "SELECT state, attempt, count(*) FROM river_job GROUP BY state, attempt"
        )
    assert [tuple(row) for row in rows] == [("completed", 1, 3000)]
