"""`riverpy worker` as a process: start, signals, exit codes, log."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from riverpy._log_events import (
    CLIENT_STOP_STARTED,
    FIRST_DATABASE_CONNECTION_FAILED,
    JOB_FAILED,
    JOBS_FAILED,
    JOBS_WORKED,
    LEADER_ELECTED,
    PROCESS_EXIT_IGNORED,
    WORKER_STARTED,
    WORKER_STOPPED,
)
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.cli.worker_process import JOBS, RIVERPY, environment, running_worker, send_each
from tests.kit.stalls import is_stall

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

TERM, INT = signal.SIGTERM, signal.SIGINT
PATIENT_END = f"""{JOBS}
import riverpy._work.release
import riverpy.cli._signals

riverpy._work.release.RELEASE_TIMEOUT = 20.0
riverpy.cli._signals.FORCED_EXIT_TIMEOUT = 30.0
"""
"""A busy machine may need longer to put a row back than a process at its end has."""
UNREACHABLE = "postgres://u:s3cret@127.0.0.1:1/d"


async def insert(schema: Schema, what: str, *, kind: str = "do", max_attempts: int = 25) -> None:
    """Insert a job that does this."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) "
        "VALUES (jsonb_build_object('what', $1::text), $2, $3)",
        what,
        kind,
        max_attempts,
    )


async def row(schema: Schema) -> dict[str, Any]:
    """What became of the only job."""
    (job,) = await schema.jobs()
    return {"state": job["state"], "attempt": job["attempt"], "errors": job["errors"]}


PUT_BACK = {"state": "available", "attempt": 0, "errors": None}


def worker_of(
    schema: Schema, tmp_path: Path, *args: str, code: str = JOBS, **environ: str
) -> AbstractAsyncContextManager[WorkerProcess]:
    """A worker of this schema."""
    where = (f"--database-url={schema.url}", f"--schema={schema.name}")
    return running_worker(tmp_path, *args, *where, code=code, **environ)


# -- stopping


@pytest.mark.parametrize("number", [TERM, INT, signal.SIGQUIT, signal.SIGHUP])
async def test_first_signal_stops(schema: Schema, tmp_path: Path, number: signal.Signals) -> None:
    """Each signal that means an end stops an idle worker with 0 (SC-07, FR-13)."""
    async with worker_of(schema, tmp_path, "jobs") as worker:
        await worker.until_logged(WORKER_STARTED)
        worker.send(number)
        assert await worker.exit_code() == 0
    assert worker.entries(WORKER_STOPPED)


async def test_settings_of_leaders(schema: Schema, tmp_path: Path) -> None:
    """A worker claims the queues of `domain-queues` for its leader domain, and takes its lease with
    the TTL of `leader-ttl`. The settings come from flags, variables and the file."""
    (tmp_path / "riverpy.toml").write_text("domain-queues = ['mail', 'reports']\n")
    flags = ("-q", "default:1", "--leader-domain=office", "--leader-ttl=1h", "--dead-after=6s")
    environ = {"RIVERPY_ELECT_INTERVAL": "1s", "RIVERPY_ON_DOMAIN_CONFLICT": "warn"}
    async with worker_of(schema, tmp_path, "jobs", *flags, **environ) as worker:
        await worker.until_logged(LEADER_ELECTED)
        owned = "SELECT string_agg(queue, ' ' ORDER BY queue) FROM riverpy_queue_owner"
        assert await schema.fetchval(f"{owned} WHERE domain = 'office'") == "mail reports"
        ttl = "SELECT max(expires_at - now()) > interval '30 minutes' FROM riverpy_lease"
        assert await schema.fetchval(ttl)
        assert await schema.fetchval("SELECT dead_after FROM riverpy_client") == timedelta(
            seconds=6
        )
        worker.send(TERM)
        assert await worker.exit_code() == 0


async def test_first_signal_lets_jobs_end(schema: Schema, tmp_path: Path) -> None:
    """After the first signal a running job finishes, and no other job is claimed (SC-07)."""
    await insert(schema, "wait")
    async with worker_of(schema, tmp_path, "jobs", "-q", "default:1") as worker:
        await worker.until_printed("job wait")
        await insert(schema, "never")
        worker.send(TERM)
        await worker.until_logged(CLIENT_STOP_STARTED)
        (tmp_path / "release").touch()
        assert await worker.exit_code() == 0
    states = [job["state"] for job in await schema.jobs()]
    assert states == ["completed", "available"]
    assert worker.printed == ["job wait"]


@pytest.mark.parametrize(
    ("signals", "args"),
    [
        ([TERM, TERM], ["--soft-stop=1h"]),
        ([INT], ["--soft-stop=50ms"]),
        ([signal.SIGHUP], ["--soft-stop=50ms"]),
        ([signal.SIGQUIT], ["--soft-stop=50ms"]),
    ],
)
async def test_hard_stop_cancels(
    schema: Schema, tmp_path: Path, signals: list[signal.Signals], args: list[str]
) -> None:
    """A second signal, or the end of --soft-stop, cancels jobs; their rows are available again and
    no attempt is lost (SC-07, FR-13)."""
    await insert(schema, "sleep")
    async with worker_of(schema, tmp_path, "jobs:patient", *args) as worker:
        await worker.until_printed("job sleep")
        worker.send(signals[0])
        for number in signals[1:]:
            await worker.until_logged(CLIENT_STOP_STARTED)
            worker.send(number)
        assert await worker.exit_code() == 0
    assert await row(schema) == PUT_BACK


async def test_signal_handler_of_user_code(schema: Schema, tmp_path: Path) -> None:
    """User code may have the loop handle other signals: these reach it, and a stop still works."""
    await insert(schema, "handle SIGHUP")
    async with worker_of(schema, tmp_path, "jobs:patient", "--soft-stop=0s") as worker:
        await worker.until_printed("handling")
        worker.send(signal.SIGHUP)
        await worker.until_printed("SIGHUP")
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert await row(schema) == PUT_BACK


async def test_closed_terminal(schema: Schema, tmp_path: Path) -> None:
    """A worker whose terminal is closed stops, though nothing can be printed any more (FR-13)."""
    await insert(schema, "sleep")
    (tmp_path / "jobs.py").write_text(JOBS)
    terminal, side = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(side, termios.TIOCSCTTY, 0)

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "riverpy", "worker", "jobs:patient", "--soft-stop=50ms"),
        *(f"--database-url={schema.url}", f"--schema={schema.name}"),
        cwd=tmp_path,
        stdin=side,
        stdout=side,
        stderr=side,
        preexec_fn=take_terminal,
    )
    os.close(side)
    try:
        printed = b""
        while b"job sleep\r\n" not in printed:
            printed += await asyncio.to_thread(os.read, terminal, 10_000)
        os.close(terminal)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
    assert await row(schema) == PUT_BACK


async def test_signal_that_is_ignored(schema: Schema, tmp_path: Path) -> None:
    """A worker under `nohup` ignores SIGHUP, and SIGTERM still stops it (FR-13)."""
    nohup = f"{JOBS}\nimport signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    async with worker_of(schema, tmp_path, "jobs", code=nohup) as worker:
        await worker.until_logged(WORKER_STARTED)
        worker.send(signal.SIGHUP)
        await insert(schema, "wait")
        await worker.until_printed("job wait")
        (tmp_path / "release").touch()
        worker.send(TERM)
        assert await worker.exit_code() == 0


async def test_wake_ups_taken_by_user_code(schema: Schema, tmp_path: Path) -> None:
    """User code may take the interpreter's wake-ups for itself, as asyncio's own loop does."""
    await insert(schema, "take wake-ups")
    async with worker_of(schema, tmp_path, "jobs:patient", "--soft-stop=0s") as worker:
        await worker.until_printed("taken")
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert await row(schema) == PUT_BACK


@pytest.mark.parametrize("number", [TERM, INT])
async def test_third_signal_leaves_at_once(
    schema: Schema, tmp_path: Path, number: signal.Signals
) -> None:
    """A third signal ends the process with 128 + its number, whatever runs (SC-07)."""
    await insert(schema, "ignore")
    async with worker_of(schema, tmp_path, "jobs:patient", "--soft-stop=1h") as worker:
        await worker.until_printed("job ignore")
        worker.send(TERM)
        await worker.until_logged(CLIENT_STOP_STARTED)
        worker.send(INT)
        await worker.until_printed("ignored")
        worker.send(number)
        assert await worker.exit_code() == 128 + number


@pytest.mark.parametrize("what", ["block python", "block sleep", "block C", "block regex"])
async def test_third_signal_with_a_blocked_loop(schema: Schema, tmp_path: Path, what: str) -> None:
    """Also while a job blocks the event loop, in Python or in C (SC-07)."""
    await insert(schema, what)
    async with worker_of(schema, tmp_path, "jobs:patient", "--soft-stop=1h") as worker:
        await worker.until_printed(f"job {what}")
        await worker.send_each(TERM, INT, TERM)
        assert await worker.exit_code() == 128 + TERM


@pytest.mark.parametrize("what", ["ignore", "block python", "block sleep", "block C"])
async def test_job_that_cannot_be_stopped(schema: Schema, tmp_path: Path, what: str) -> None:
    """A job that ignores its cancellation or blocks the loop delays the end of the process only up
    to the limits. The job is released last, and the exit code is 4."""
    await insert(schema, what)
    args = ("jobs:managed", "--soft-stop=100ms")
    async with worker_of(schema, tmp_path, *args, code=PATIENT_END) as worker:
        await worker.until_printed(f"job {what}")
        worker.send(TERM)
        assert await worker.exit_code() == 4
    assert await row(schema) == PUT_BACK


async def test_blocked_thread(schema: Schema, tmp_path: Path) -> None:
    """A blocking job in a thread does not delay the end of the process. The job is released."""
    await insert(schema, "", kind="block")
    args = ("jobs", "--soft-stop=100ms")
    async with worker_of(schema, tmp_path, *args, code=PATIENT_END) as worker:
        await worker.until_printed("job block")
        worker.send(TERM)
        assert await worker.exit_code() == 4
    assert await row(schema) == PUT_BACK


async def test_job_that_holds_the_gil(schema: Schema, tmp_path: Path) -> None:
    """A job that lets no other thread run: the process ends by the timer that needs none."""
    await insert(schema, "block regex")
    async with worker_of(schema, tmp_path, "jobs", "--soft-stop=100ms") as worker:
        await worker.until_printed("job block regex")
        worker.send(TERM)
        assert await worker.exit_code() == 1
    assert (await row(schema))["state"] == "running"


async def test_put_back_that_hangs(schema: Schema, tmp_path: Path) -> None:
    """The last resort is bounded too, whatever it waits for."""
    await insert(schema, "block sleep")
    async with worker_of(schema, tmp_path, "jobs:stuck", "--soft-stop=0s") as worker:
        await worker.until_printed("job block sleep")
        worker.send(TERM)
        assert await worker.exit_code() == 4


@pytest.mark.parametrize("what", ["leave thread", "leave task"])
async def test_what_a_job_left(schema: Schema, tmp_path: Path, what: str) -> None:
    """A thread or a task that a job left and that does not end holds the process no longer."""
    await insert(schema, what)
    async with worker_of(schema, tmp_path, "jobs") as worker:
        await worker.until_printed(f"job {what}")
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert worker.entries(WORKER_STOPPED)
    assert (await row(schema))["state"] == "completed"


async def test_end_of_the_interpreter(schema: Schema, tmp_path: Path) -> None:
    """What ends by itself when Python does is waited for: pools, functions of atexit, output."""
    await insert(schema, "leave what ends")
    async with worker_of(schema, tmp_path, "jobs", "--drain") as worker:
        assert await worker.exit_code() == 0
    assert worker.printed == ["job leave what ends", "1", "not flushed", "atexit"]
    assert all("text" not in entry for entry in worker.logged)


async def test_thread_of_a_cancelled_job(schema: Schema, tmp_path: Path) -> None:
    """A thread of the loop's that a cancelled job waited for holds the process no longer."""
    await insert(schema, "leave thread of the loop")
    async with worker_of(schema, tmp_path, "jobs:patient", "--soft-stop=0s") as worker:
        await worker.until_printed("job leave thread of the loop")
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert await row(schema) == PUT_BACK


@pytest.mark.parametrize("signals", [1, 3])
async def test_reader_of_stderr_does_not_read(schema: Schema, tmp_path: Path, signals: int) -> None:
    """A job that prints to a stderr without a reader blocks the loop. The time limits still hold,
    the jobs are released, and a third signal ends the process at once."""
    await insert(schema, "flood")
    (tmp_path / "jobs.py").write_text(PATIENT_END)
    reader, writer = os.pipe()
    soft_stop = "100ms" if signals == 1 else "1h"
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "worker", "jobs", f"--soft-stop={soft_stop}"),
        *(f"--database-url={schema.url}", f"--schema={schema.name}"),
        cwd=tmp_path,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=writer,
    )
    try:
        os.close(writer)
        assert process.stdout
        await process.stdout.readline()
        await send_each(process, *[TERM] * signals)
        code = await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
        os.close(reader)
    if signals == 1:
        assert code == 4
        assert await row(schema) == PUT_BACK
    else:
        assert code == 128 + TERM


# -- user code that has to do with processes and signals


@pytest.mark.parametrize(
    ("what", "printed"), [("fork", "child -15"), ("fork in a thread", "pool [1, 2]")]
)
async def test_forks(schema: Schema, tmp_path: Path, what: str, printed: str) -> None:
    """A SIGTERM to a forked child ends the child, and is none to the worker."""
    for _ in range(5):
        await insert(schema, what)
    async with worker_of(schema, tmp_path, "jobs", "--drain") as worker:
        assert await worker.exit_code() == 0
    assert worker.printed.count(printed) == 5
    assert {job["state"] for job in await schema.jobs()} == {"completed"}


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_tasks_that_would_end_the_process(schema: Schema, tmp_path: Path, loop: str) -> None:
    """SystemExit or KeyboardInterrupt in a task of a job, or a job that stops the loop, is logged
    each time, and the worker keeps running."""
    await insert(schema, "wait")
    code = JOBS if loop == "uvloop" else f"{JOBS}\nsys.modules['uvloop'] = None\n"
    async with worker_of(schema, tmp_path, "jobs", code=code) as worker:
        await worker.until_printed("job wait")
        # The last one may be logged twice: for the task and for its group.
        for number, what in enumerate(("exit", "interrupt", "stop", "exit in a group"), 1):
            await insert(schema, what)
            await worker.until_logged(PROCESS_EXIT_IGNORED, number)
        (tmp_path / "release").touch()
        await insert(schema, "last")
        await worker.until_printed("job last")
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert {entry["level"] for entry in worker.entries(PROCESS_EXIT_IGNORED)} == {"error"}
    states = {json.loads(job["args"])["what"]: job["state"] for job in await schema.jobs()}
    assert states["wait"] == states["last"] == "completed"
    assert "running" not in states.values()


async def test_flood_of_signals(schema: Schema, tmp_path: Path) -> None:
    """Signals of user code that come faster than the loop takes them do not keep ours away."""
    await insert(schema, "alarms")
    await insert(schema, "block sleep")
    async with worker_of(schema, tmp_path, "jobs", "-q", "default:1", "--soft-stop=0s") as worker:
        await worker.until_printed("job block sleep")
        worker.send(TERM)
        assert await worker.exit_code() == 4


async def test_interrupt_of_the_process_group(schema: Schema, tmp_path: Path) -> None:
    """A Ctrl-C in a terminal reaches all processes of the group: jobs in processes keep running."""
    await insert(schema, "", kind="detached")
    async with worker_of(schema, tmp_path, "jobs") as worker:
        await worker.until_logged(WORKER_STARTED)
        while not (tmp_path / "detached").exists():
            await asyncio.sleep(0.01)
        worker.send_to_group(INT)
        await worker.until_logged(CLIENT_STOP_STARTED)
        (tmp_path / "release").touch()
        assert await worker.exit_code() == 0
    assert await row(schema) == {"state": "completed", "attempt": 1, "errors": None}


RAISES = """
import msgspec, riverpy
from typing import ClassVar

workers = riverpy.Workers()

class Raise(msgspec.Struct):
    kind: ClassVar[str] = "raise"

@workers.job
async def work(job: riverpy.Job[Raise]) -> None:
    {}["user_id"]

client = riverpy.Client(workers=workers, queues={"default": riverpy.QueueConfig()})
"""


async def test_traceback_of_a_failed_job(schema: Schema, tmp_path: Path) -> None:
    """A console log for debugging shows the type and the text of a job's error, and its traceback
    as lines."""
    (tmp_path / "jobs.py").write_text(RAISES)
    await insert(schema, "", kind="raise", max_attempts=1)
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "worker", "jobs:client", "--drain", "--log=console", "--log-level=debug"),
        *(f"--database-url={schema.url}", f"--schema={schema.name}"),
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    _, written = await process.communicate()
    lines = [line.strip() for line in written.decode().splitlines()]
    assert "Traceback (most recent call last):" in lines
    assert '{}["user_id"]' in lines
    assert any(JOB_FAILED in line and "KeyError: 'user_id'" in line for line in lines)


# -- stopping while it starts


@pytest.mark.parametrize(
    ("spec", "code", "printed"),
    [
        ("jobs", "import time\nprint('importing', flush=True)\ntime.sleep(3600)\n", "importing"),
        ("jobs:slow_factory", JOBS, "factory"),
    ],
)
async def test_stop_during_the_start(tmp_path: Path, spec: str, code: str, printed: str) -> None:
    """A signal while the module is imported or the factory waits ends the process with 0."""
    async with running_worker(tmp_path, spec, f"--database-url={UNREACHABLE}", code=code) as worker:
        await worker.until_printed(printed)
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert worker.logged == []


async def test_stop_while_waiting_for_the_database(tmp_path: Path) -> None:
    """A signal while the database is awaited: 0, and the context manager is left."""
    async with running_worker(tmp_path, "jobs:managed", f"--database-url={UNREACHABLE}") as worker:
        waiting = await worker.until_logged(FIRST_DATABASE_CONNECTION_FAILED)
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert worker.printed == ["entered", "left"]
    assert "s3cret" not in str(waiting)


async def test_waits_for_a_database_that_takes_no_connections(
    server_url: str, fresh_database_url: str, tmp_path: Path
) -> None:
    """A worker waits while an administrator blocks connections for a moment, or while the server
    starts. Then it works."""
    await migrate_all(fresh_database_url)
    name = urlsplit(fresh_database_url).path[1:]
    async with connected(server_url) as administrator:
        await administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        async with running_worker(
            tmp_path, "jobs:managed", f"--database-url={fresh_database_url}"
        ) as worker:
            waiting = await worker.until_logged(FIRST_DATABASE_CONNECTION_FAILED)
            await administrator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            await worker.until_logged(WORKER_STARTED)
            worker.send(TERM)
            assert await worker.exit_code() == 0
    assert "not currently accepting connections" in waiting["error"]


async def test_waits_for_a_database_that_can_be_written(
    server_url: str, fresh_database_url: str, tmp_path: Path
) -> None:
    """A worker that starts on a read-only server, such as a standby, logs one line, waits, and
    works when the server can be written (NR-12)."""
    await migrate_all(fresh_database_url)
    name = urlsplit(fresh_database_url).path[1:]
    async with connected(server_url) as administrator:
        await administrator.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only=on')
        async with running_worker(
            tmp_path, "jobs:managed", f"--database-url={fresh_database_url}"
        ) as worker:
            waiting = await worker.until_logged(FIRST_DATABASE_CONNECTION_FAILED)
            await administrator.execute(
                f'ALTER DATABASE "{name}" RESET default_transaction_read_only'
            )
            await worker.until_logged(WORKER_STARTED)
            worker.send(TERM)
            assert await worker.exit_code() == 0
    assert "is read-only: it is a standby" in waiting["error"]
    warnings = [entry for entry in worker.logged if entry["level"] == "warning"]
    assert [one for one in warnings if not is_stall(one)] == [waiting]


async def test_drain(schema: Schema, tmp_path: Path) -> None:
    """--drain works what there is and ends with 0."""
    for _ in range(3):
        await insert(schema, "nothing")
    async with worker_of(schema, tmp_path, "jobs:managed", "--drain") as worker:
        assert await worker.exit_code() == 0
    assert [job["state"] for job in await schema.jobs()] == ["completed"] * 3
    assert worker.printed == ["entered", *["job nothing"] * 3, "left"]


async def test_reader_of_the_log_goes_away(schema: Schema, tmp_path: Path) -> None:
    """`riverpy worker 2>&1 | head -1` stops in peace at the next line of its log (OP-05)."""
    (tmp_path / "jobs.py").write_text(JOBS)
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        RIVERPY,
        *("worker", "jobs", f"--database-url={schema.url}", f"--schema={schema.name}"),
        cwd=tmp_path,
        env=environment(),
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    try:
        told = b""
        while b"worker started" not in told:
            told += (read := await asyncio.to_thread(os.read, reader, 100_000))
            assert read, told
        os.close(reader)
        await insert(schema, "log")
        await insert(schema, "nothing")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    jobs = await schema.jobs()
    assert not [job for job in jobs if job["state"] == "running"]


# -- starting


START_EACH = """
import io, json, sys
from contextlib import redirect_stderr
import riverpy.cli.worker
from riverpy.cli import main

sys.modules["riverpy.cli.worker"].FIRST_CONNECTION_TIMEOUT = 0.0
ends = []
for args in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as err:
        try:
            main(["worker", *args], prog_name="riverpy")
        except SystemExit as end:
            ends.append((end.code, err.getvalue()))
print(json.dumps(ends))
"""


def failing_workers(directory: Path, *starts: list[str], code: str = JOBS) -> list[tuple[int, str]]:
    """Run workers that do not start and do not wait, one after the other in one process; their exit
    codes and what each wrote to stderr."""
    (directory / "jobs.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", START_EACH, json.dumps(starts)],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr == ""
    return [(exit_code, err) for exit_code, err in json.loads(done.stdout)]


FAILING_STARTS: list[tuple[list[str], int, str]] = [
    (["jobs"], 2, "no database is given: write Client("),
    (["jobs:nope", f"--database-url={UNREACHABLE}"], 2, "module jobs has no 'nope'"),
    (["jobs", f"--database-url={UNREACHABLE}"], 3, "the database cannot be used: "),
    (["jobs", "-q", "default", f"--database-url={UNREACHABLE}"], 2, "is not NAME:SLOTS"),
    (["jobs", "--soft-stop=5", f"--database-url={UNREACHABLE}"], 2, "'5' is not a duration"),
    (["jobs", "--database-url=http://u:s3cret@h/d"], 2, "a database URL must start with"),
]


def test_failing_starts(tmp_path: Path) -> None:
    """A failing start prints one line without a password. The exit code is 2 for a wrong command,
    and 3 if the database is not ready (OP-04)."""
    ends = failing_workers(tmp_path, *(args for args, *_ in FAILING_STARTS))
    for (_, code, message), (exit_code, err) in zip(FAILING_STARTS, ends, strict=True):
        assert exit_code == code
        assert message in err
        assert err.startswith("riverpy: ")
        assert err.count("\n") == 1
        assert "s3cret" not in err


async def test_missing_schema(fresh_database_url: str, tmp_path: Path) -> None:
    """A database without River's tables is code 3 and the command that makes them (OP-04)."""
    url = fresh_database_url.replace("://postgres@", "://postgres:s3cret@")
    ((exit_code, err),) = await asyncio.to_thread(
        failing_workers, tmp_path, ["jobs", f"--database-url={url}"]
    )
    assert exit_code == 3
    assert "riverpy migrate up" in err
    assert err.count("\n") == 1
    assert "s3cret" not in err


async def test_nothing_to_work(database_url: str, tmp_path: Path) -> None:
    """A client without queues or without workers is an error in one line (OP-04)."""
    code = (
        f"{JOBS}\nno_queue = riverpy.Client(queues={{}}, workers=workers)\n"
        "no_worker = riverpy.Client(workers=riverpy.Workers())\n"
    )
    starts = [
        [f"jobs:{name}", f"--database-url={database_url}"] for name in ("no_queue", "no_worker")
    ]
    ends = await asyncio.to_thread(lambda: failing_workers(tmp_path, *starts, code=code))
    for message, (exit_code, err) in zip(
        ("there is no queue to work", "there is no"), ends, strict=True
    ):
        assert exit_code == 2
        assert message in err
        assert err.count("\n") == 1


async def test_start_line(schema: Schema, tmp_path: Path) -> None:
    """The first line has version, masked URL, schema, queues, each kind's limits (TY-03)."""
    url = re.sub(r"^(\w+)://([^@:/]*)(:[^@/]*)?@", r"\1://\2:s3cret@", schema.url)
    async with running_worker(
        tmp_path,
        *("jobs", f"--database-url={url}", f"--schema={schema.name}", "-q", "default:3,mail:2"),
    ) as worker:
        started = await worker.until_logged(WORKER_STARTED)
        worker.send(TERM)
        assert await worker.exit_code() == 0
    assert started["version"].startswith("0.")
    assert ":***@" in started["database"]
    assert started["schema"] == schema.name
    assert started["queues"] == "default:3,mail:2"
    assert started["kinds"] == {
        "do": "timeout none, 25 attempts",
        "block": "timeout 1h, 25 attempts",
        "detached": "timeout 1h, 25 attempts",
    }
    assert started["candidate"] is True
    assert "s3cret" not in str(worker.logged)


def test_print_config(tmp_path: Path) -> None:
    """--print-config shows values and sources and ends, without importing the module."""
    (tmp_path / "pyproject.toml").write_text('[tool.riverpy]\nsoft-stop = "5s"\n')
    done = subprocess.run(
        [RIVERPY, "worker", "nowhere", "--print-config", "-q", "a:1", "-q", "b:2"],
        cwd=tmp_path,
        env=environment(DATABASE_URL="postgres://u:s3cret@h/d", RIVERPY_LOG="json"),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["database-url", "postgres://u:***@h/d", "DATABASE_URL"] in lines
    assert ["queues", "a:1,b:2", "--queues"] in lines
    assert ["soft-stop", "5s", str(tmp_path / "pyproject.toml")] in lines
    assert ["log", "json", "RIVERPY_LOG"] in lines
    assert ["log-level", "info", "default"] in lines


# -- log


async def test_log_of_user_code(schema: Schema, tmp_path: Path) -> None:
    """Loggers and warnings of user code come as lines of the same log, masked."""
    await insert(schema, "log")
    async with worker_of(schema, tmp_path, "jobs", "--drain") as worker:
        assert await worker.exit_code() == 0
    (entry,) = worker.entries("from logging")
    assert entry["level"] == "warning"
    assert entry["logger"] == "mine"
    assert any("from warnings" in entry["event"] for entry in worker.logged)
    assert worker.entries("postgres://u:***@h/d")
    assert all("text" not in entry for entry in worker.logged)


async def test_failing_job_is_no_error_of_the_worker(schema: Schema, tmp_path: Path) -> None:
    """At level debug a failed job is logged with its id, kind, queue and attempt. At level info
    only a warning names the failing kinds, and nothing is logged as an error (OP-07)."""
    await insert(schema, "fail", max_attempts=1)
    async with worker_of(schema, tmp_path, "jobs", "--drain", "--log-level=debug") as worker:
        assert await worker.exit_code() == 0
    (failed,) = worker.entries(JOB_FAILED)
    assert failed["level"] == "debug"
    assert {"job_id", "kind", "queue", "attempt"} <= failed.keys()
    (fail,) = worker.entries(JOBS_FAILED)
    assert fail["level"] == "warning"
    assert fail["kinds"] == {"do": {"failed": 1, "error": "ValueError: no luck"}}
    (worked,) = worker.entries(JOBS_WORKED)
    assert (worked["failed"], worked["discarded"]) == (1, 1)
    others = [entry for entry in worker.logged if "no luck" in str(entry)]
    assert others in ([failed, fail], [fail, failed])


async def test_log_level(schema: Schema, tmp_path: Path) -> None:
    """--log-level=error leaves out what is below, of ours and of user code."""
    await insert(schema, "log")
    async with worker_of(schema, tmp_path, "jobs", "--drain", "--log-level=error") as worker:
        assert await worker.exit_code() == 0
    assert worker.logged == []
