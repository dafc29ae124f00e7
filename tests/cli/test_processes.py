"""`riverpy worker --processes`: several real workers under one supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from riverpy._log_events import (
    CLIENT_STOP_STARTED,
    HEALTH_SERVER_STARTED,
    RUNNING_JOBS_CANCELLED,
    WORKER_LIMIT_REACHED,
    WORKER_PROCESS_ENDED,
    WORKER_PROCESS_STARTED,
    WORKER_STARTED,
    WORKER_STOPPED,
)
from riverpy.cli import main
from tests.cli.worker_process import RIVERPY, SIGNAL_TIMEOUT, environment, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Linux and macOS"),
    pytest.mark.timeout(180),  # a busy machine takes a while to start so many processes
]


class Supervisor:
    """A supervisor, and what its workers print and log."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker

    def pids(self) -> dict[int, int]:
        """The process id of the last process with each number."""
        entries = self.worker.entries(WORKER_PROCESS_STARTED)
        return {entry["process"]: entry["pid"] for entry in entries}

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until what is printed and logged meets a condition."""
        await self.worker._until(condition, what)

    async def until_logged(self, event: str, count: int) -> list[dict[str, Any]]:
        """Wait for so many entries of an event, and return them."""
        await self.until(lambda: len(self.worker.entries(event)) >= count, f"{count} {event!r}")
        return self.worker.entries(event)

    async def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a page of the health server."""
        port = self.worker.entries(HEALTH_SERVER_STARTED)[0]["port"]
        async with asyncio.timeout(SIGNAL_TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    @asynccontextmanager
    async def followed_events(self) -> AsyncGenerator[asyncio.StreamReader]:
        """The stream of /events, to which both workers have connected."""
        port = self.worker.entries(HEALTH_SERVER_STARTED)[0]["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events?event=job_completed HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):  # the supervisor and each worker begin with an empty line
            assert await reader.readline() == b"\n"
        try:
            yield reader
        finally:
            writer.close()
            await writer.wait_closed()

    async def probe(self, path: str) -> tuple[int, dict[str, str]]:
        """Return the status of a probe and the reason of each check."""
        status, body = await self.get(path)
        return status, {name: one["reason"] for name, one in json.loads(body)["checks"].items()}

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Return each sample: its name and the values of its labels, in the order of the names."""
        status, body = await self.get("/metrics")
        assert status == 200
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }


@asynccontextmanager
async def supervisor_of(
    schema: Schema, tmp_path: Path, *args: str, target: str = "jobs:patient"
) -> AsyncGenerator[Supervisor]:
    """A supervisor of workers of this schema; all are killed at the end."""
    where = (f"--database-url={schema.url}", f"--schema={schema.name}", "--processes=2")
    async with running_worker(tmp_path, target, *where, *args) as worker:
        supervisor = Supervisor(worker)
        try:
            yield supervisor
        finally:
            with suppress(ProcessLookupError):
                worker.send(signal.SIGKILL)
            for entry in worker.entries(WORKER_PROCESS_STARTED):
                with suppress(ProcessLookupError):
                    os.killpg(entry["pid"], signal.SIGKILL)


async def insert(schema: Schema, what: str, count: int = 1) -> None:
    """Insert jobs that do this."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) "
        "SELECT jsonb_build_object('what', $1::text), 'do', 25 FROM generate_series(1, $2)",
        what,
        count,
    )


async def until_gone(pid: int) -> None:
    """Wait until no process has this id."""
    async with asyncio.timeout(SIGNAL_TIMEOUT):
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.01)


async def test_workers_stop_together(schema: Schema, tmp_path: Path) -> None:
    """Two workers with ids of their own work jobs, and one health server answers for both. At a
    signal that all processes receive, as from systemd, running jobs finish, and the exit code is 0.
    """
    await insert(schema, "wait", 2)
    async with supervisor_of(schema, tmp_path, "-q", "default:1", "--health=:0") as supervisor:
        worker = supervisor.worker
        started = await supervisor.until_logged(WORKER_STARTED, 2)
        assert len({entry["client_id"] for entry in started}) == 2
        assert [entry["process"] for entry in started] == [1, 2]
        await supervisor.until(lambda: worker.printed == ["job wait"] * 2, "two jobs")
        assert await supervisor.probe("/livez") == (200, {f"process {n}": "alive" for n in (1, 2)})
        assert await supervisor.probe("/readyz?max_lag=1h") == (
            200,
            {f"process {n}": "ready" for n in (1, 2)},
        )
        assert (await supervisor.get("/readyz?max_lag=x"))[0] == 400
        assert (await supervisor.get("/events?colour=red"))[0] == 400
        metrics = await supervisor.metrics()
        for number in "12":
            assert metrics["riverpy_process_up", number] == 1
            assert metrics["riverpy_queue_running", number, "default"] == 1
            assert metrics["riverpy_process_restarts_total", number, "failure"] == 0
        async with asyncio.timeout(SIGNAL_TIMEOUT), supervisor.followed_events() as events:
            for pid in supervisor.pids().values():
                os.kill(pid, signal.SIGTERM)
            worker.send(signal.SIGTERM)
            await supervisor.until_logged(CLIENT_STOP_STARTED, 2)
            (tmp_path / "release").touch()
            lines = [json.loads(line) async for line in events if line.strip()]
        assert [line["event"] for line in lines] == ["job_completed"] * 2
        assert await worker.exit_code() == 0
        assert len(worker.entries(WORKER_STOPPED)) == 2
        assert not worker.entries(RUNNING_JOBS_CANCELLED)
    assert [job["state"] for job in await schema.jobs()] == ["completed"] * 2


async def test_worker_that_fails(schema: Schema, tmp_path: Path) -> None:
    """A killed worker is replaced, and its job runs again. A suspended one counts as not alive and
    not ready, until it continues. If the supervisor is killed, running jobs finish, and no process
    is left."""
    await insert(schema, "wait", 2)
    options = ("-q", "default:1", "--health=:0", "--dead-after=1s", "--soft-stop=1h")
    async with supervisor_of(schema, tmp_path, *options) as supervisor:
        worker = supervisor.worker
        await supervisor.until(lambda: worker.printed == ["job wait"] * 2, "two jobs")
        leader = 1 if (await supervisor.metrics())["riverpy_leader", "default", "1"] else 2
        other = 3 - leader  # the leader keeps running, and rescues the job
        os.kill(supervisor.pids()[other], signal.SIGKILL)
        (ended,) = await supervisor.until_logged(WORKER_PROCESS_ENDED, 1)
        assert (ended["process"], ended["exit_code"], ended["level"]) == (other, 137, "warning")
        assert 0.4 <= ended["restart_in"] <= 0.6
        await supervisor.until(lambda: worker.printed == ["job wait"] * 3, "the job again")

        pids = supervisor.pids()
        os.kill(pids[leader], signal.SIGSTOP)
        blocked = "no answer: the event loop of the worker is blocked, or the process is suspended"
        for path, well in (("/livez", "alive"), ("/readyz", "ready")):
            status, checks = await supervisor.probe(path)
            assert status == 503
            assert checks == {f"process {leader}": blocked, f"process {other}": well}
        metrics = await supervisor.metrics()
        assert metrics["riverpy_process_up", str(leader)] == 0
        assert metrics["riverpy_process_restarts_total", str(other), "failure"] == 1
        os.kill(pids[leader], signal.SIGCONT)
        async with asyncio.timeout(SIGNAL_TIMEOUT):
            while (await supervisor.probe("/livez"))[0] != 200:
                await asyncio.sleep(0.01)

        worker.send(signal.SIGKILL)
        await supervisor.until_logged(CLIENT_STOP_STARTED, 2)
        (tmp_path / "release").touch()
        for pid in pids.values():
            await until_gone(pid)
        assert not worker.entries(RUNNING_JOBS_CANCELLED)
    assert [job["state"] for job in await schema.jobs()] == ["completed"] * 2


async def test_limits_and_drain(schema: Schema, tmp_path: Path) -> None:
    """A worker that has reached its limit is replaced at once. One that has found the queues empty
    is not replaced."""
    await insert(schema, "nothing")
    await insert(schema, "wait")
    options = ("-q", "default:2", "--max-jobs=1", "--drain", "--soft-stop=1h")
    async with supervisor_of(schema, tmp_path, *options) as supervisor:
        await supervisor.until_logged(WORKER_LIMIT_REACHED, 1)
        await supervisor.until_logged(WORKER_PROCESS_ENDED, 1)  # the second one has drained
        (tmp_path / "release").touch()
        assert await supervisor.worker.exit_code() == 0
        ended = supervisor.worker.entries(WORKER_PROCESS_ENDED)
    assert [(entry["level"], entry["exit_code"], entry["restart_in"]) for entry in ended] == [
        ("info", 0, None),
        ("info", 10, 0.0),
        ("info", 0, None),
    ]
    assert [job["state"] for job in await schema.jobs()] == ["completed"] * 2


async def test_more_signals(schema: Schema, tmp_path: Path) -> None:
    """A second signal cancels jobs, also if all processes receive each signal. A third one kills
    the worker whose job ignores its cancellation."""
    await insert(schema, "sleep")
    await insert(schema, "ignore")
    options = ("-q", "default:1", "--soft-stop=1h")
    async with supervisor_of(schema, tmp_path, *options) as supervisor:
        worker = supervisor.worker
        await supervisor.until(lambda: len(worker.printed) == 2, "two jobs")
        pids = supervisor.pids().values()
        for event in (CLIENT_STOP_STARTED, RUNNING_JOBS_CANCELLED):
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            worker.send(signal.SIGTERM)
            await supervisor.until_logged(event, 2)
        (ended,) = await supervisor.until_logged(WORKER_PROCESS_ENDED, 1)
        assert (ended["exit_code"], ended["restart_in"]) == (0, None)
        worker.send(signal.SIGINT)
        assert await worker.exit_code() == 128 + signal.SIGINT
        killed = worker.entries(WORKER_PROCESS_ENDED)[-1]
        assert killed["reason"] == "killed by the supervisor: a third signal arrived"
        for pid in pids:
            await until_gone(pid)
    assert [(job["state"], job["attempt"]) for job in await schema.jobs()] == [
        ("available", 0),
        ("running", 1),
    ]


async def test_stop_during_the_start(schema: Schema, tmp_path: Path) -> None:
    """A signal while the first worker starts ends it, and starts no other one."""
    async with supervisor_of(schema, tmp_path, target="jobs:slow_factory") as supervisor:
        await supervisor.worker.until_printed("factory")
        supervisor.worker.send(signal.SIGTERM)
        assert await supervisor.worker.exit_code() == 0
        assert len(supervisor.pids()) == 1


def test_failing_start(tmp_path: Path) -> None:
    """If the first worker cannot start, its error is printed once, and its exit code is the exit
    code of the command."""
    done = subprocess.run(
        [RIVERPY, "worker", "nowhere", "--processes=3", "--database-url=postgres://127.0.0.1:1/d"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("there is no module nowhere") == 1
    assert done.stderr.count(WORKER_PROCESS_STARTED) == 1


@pytest.mark.parametrize("number", ["0", "-1", "abc", "129"])
def test_wrong_number(number: str) -> None:
    """A number of processes that is none is refused."""
    result = CliRunner().invoke(main, ["worker", "jobs", f"--processes={number}"])
    assert result.exit_code == 2
    assert "'--processes'" in result.stderr


ORPHANS = """
import os
from riverpy._tools.processes.orphans import collect_orphan_exit_codes_once

def start_and_end():
    if (pid := os.fork()) == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

collect_orphan_exit_codes_once(set())  # there is none
orphan = start_and_end()
collect_orphan_exit_codes_once(set())
try:
    os.waitpid(orphan, 0)
except ChildProcessError:
    print("collected")
own = start_and_end()
collect_orphan_exit_codes_once({own})
print(os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="a system without containers")
def test_orphans() -> None:
    """The exit codes of orphans are collected, and those of workers are left to the supervisor."""
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("collected\n7\n", "")


def test_development() -> None:
    """`riverpy dev` refuses a number of processes."""
    result = CliRunner().invoke(main, ["dev", "jobs", "--", "--processes=2"])
    assert result.exit_code == 2
    assert "riverpy dev runs one worker process" in result.stderr
