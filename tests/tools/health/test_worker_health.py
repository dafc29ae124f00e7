"""`riverpy worker --health`: probes, metrics and systemd with a real worker."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from riverpy._log_events import HEALTH_SERVER_STARTED
from riverpy.cli import main
from riverpy.migrate import Migrator
from tests.cli.worker_process import RIVERPY, environment, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

PATIENCE = 60.0


class Served:
    """A worker with a health server."""

    def __init__(self, worker: WorkerProcess, port: int) -> None:
        self.worker, self.port = worker, port

    async def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a response."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
            await writer.wait_closed()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    async def checks(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the reason of each check."""
        status, body = await self.get(path)
        return status, {name: one["reason"] for name, one in json.loads(body)["checks"].items()}

    async def until(self, path: str, status: int, state: str | None = None) -> dict[str, Any]:
        """Send requests until the response has this status and state. Return its checks."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found, checks = await self.checks(path)
                if found == status and state in {None, checks["state"]}:
                    return checks
                await asyncio.sleep(0.02)


@asynccontextmanager
async def served(
    schema: Schema, tmp_path: Path, *args: str, url: str | None = None, **environ: str
) -> AsyncGenerator[Served]:
    """Start a worker of this schema with its health server on its own port."""
    where = (f"--database-url={url or schema.url}", f"--schema={schema.name}", "--health=:0")
    async with running_worker(tmp_path, "jobs", *where, *args, **environ) as worker:
        entry = await worker.until_logged(HEALTH_SERVER_STARTED)
        yield Served(worker, entry["port"])


async def test_ready_until_it_stops(schema: Schema, tmp_path: Path) -> None:
    """A worker without a free slot is alive and ready. During its drain it is alive and reports
    that it stops (OP-02)."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{\"what\": \"wait\"}', 'do', 25)"
    )
    async with served(schema, tmp_path, "-q", "default:1") as health:
        await health.worker.until_printed("job wait")
        checks = await health.until("/readyz", 200)
        assert checks["queue default"] == "all slots are in use"
        health.worker.send(signal.SIGTERM)
        await health.until("/readyz", 503, "stopping")
        assert (await health.get("/livez"))[0] == 200
        (tmp_path / "release").touch()
        assert await health.worker.exit_code() == 0


async def test_up_before_the_database(schema: Schema, tmp_path: Path) -> None:
    """Without the database the worker is alive and not ready (OP-02)."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgres://u@127.0.0.1:{silent.getsockname()[1]}/d"
        async with served(schema, tmp_path, url=url) as health:
            assert (await health.get("/livez"))[0] == 200
            status, checks = await health.checks("/readyz")
            assert (status, checks["state"]) == (503, "starting")
            assert 'riverpy_leader{domain="default"} 0' in (await health.get("/metrics"))[1]


def count_of(page: str, name: str) -> float:
    """Return the sum of this metric over its labels."""
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.mark.timeout(240)  # a busy machine takes a while to start so many processes
async def test_totals_of_a_fleet(schema: Schema, tmp_path: Path) -> None:
    """The counts of four worker processes add up to all jobs. A restarted process counts from
    zero (OP-12)."""
    jobs = 200
    async with AsyncExitStack() as stack:
        fleet = [
            await stack.enter_async_context(served(schema, tmp_path, f"--name=w{number}"))
            for number in range(4)
        ]
        for health in fleet:
            await health.until("/readyz", 200)
        await schema.execute(
            "INSERT INTO river_job (args, kind, max_attempts)"
            " SELECT '{\"what\": \"nothing\"}', 'do', 25 FROM generate_series(1, $1::int)",
            jobs,
        )

        async def totals(name: str) -> float:
            pages = [await health.get("/metrics") for health in fleet]
            return sum(count_of(page, name) for _, page in pages)

        async with asyncio.timeout(PATIENCE):
            while await totals("riverpy_attempts_total") < jobs:
                await asyncio.sleep(0.05)
        for name in ("attempts_total", "wait_seconds_count", "run_seconds_count", "claim_jobs_sum"):
            assert await totals(f"riverpy_{name}") == jobs, name
    async with served(schema, tmp_path, "--name=w0") as health:
        await health.until("/readyz", 200)
        _, page = await health.get("/metrics")
        assert count_of(page, "riverpy_attempts_total") == 0
        assert count_of(page, "riverpy_claim_jobs_sum") == 0


async def run_command(*args: str, **environ: str) -> tuple[int, str, str]:
    """Run `riverpy ARGS`. Return its exit code and output."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [RIVERPY, *args],
            env=environment(**environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout, done.stderr


async def test_port_in_use(schema: Schema, tmp_path: Path) -> None:
    """If the health port is in use, the worker ends with exit code 1 and one line (OP-03)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = (f"--database-url={schema.url}", f"--health={port}")
        async with running_worker(tmp_path, "jobs", *where) as worker:
            assert await worker.exit_code() == 1
    assert len(worker.logged) == 1
    assert f"cannot serve health on 127.0.0.1:{port}" in worker.logged[0]["text"]


async def test_events_and_health_commands(schema: Schema, tmp_path: Path) -> None:
    """`riverpy events` shows the requested events without args, and those of leadership. It waits
    for the next worker when the worker ends, and ends on a signal. `riverpy health` checks the
    worker and the database. A stop does not wait for readers (ME-04, OP-03)."""
    async with served(schema, tmp_path) as health:
        await health.until("/readyz", 200)
        url = f"http://127.0.0.1:{health.port}"
        follower = await asyncio.create_subprocess_exec(
            RIVERPY,
            *("events", "--json", "--kind=do", "--event=job_failed", f"--url={url}"),
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert follower.stdout
        assert follower.stderr
        leader_follower = await asyncio.create_subprocess_exec(
            RIVERPY,
            *("events", "--lease=default", f"--url={url}"),
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert leader_follower.stdout
        assert leader_follower.stderr
        async with asyncio.timeout(PATIENCE):
            assert b"follows" in await follower.stderr.readline()
            assert b"follows" in await leader_follower.stderr.readline()
        await schema.execute(
            "INSERT INTO river_job (args, kind, max_attempts)"
            " SELECT jsonb_build_object('what', what), 'do', 1 FROM unnest($1::text[]) AS what",
            ["nothing", "fail"],
        )
        async with asyncio.timeout(PATIENCE):
            event = json.loads(await follower.stdout.readline())
        assert event.pop("wait") >= 0
        assert event.pop("run") >= 0
        assert datetime.fromisoformat(event.pop("at")).tzinfo is not None
        del event["job_id"]
        assert event == {
            "event": "job_failed",
            "queue": "default",
            "kind": "do",
            "state": "discarded",
            "attempt": 1,
            "max_attempts": 1,
            "error": "ValueError: no luck",
        }
        async with asyncio.timeout(PATIENCE):  # a worker that stood still is not ready for a moment
            while (found := await run_command("health", "--url", url))[0] != 0:
                assert found[1].startswith("not ready: ")
        assert found[1].startswith("ok:")
        where = (f"--database-url={schema.url}", f"--schema={schema.name}")
        assert (await run_command("health", *where))[0] == 0
        await schema.execute(
            "INSERT INTO river_job (args, kind, max_attempts, queue, scheduled_at, created_at)"
            " VALUES ('{}', 'k', 1, 'nobody', now() - interval '1 hour', now() - interval '1 hour')"
        )
        code, printed, _ = await run_command("health", *where, "--max-lag=30m")
        assert code == 3
        assert printed.startswith("not ready: lag: the oldest due job, of queue nobody, has waited")
        health.worker.send(signal.SIGTERM)
        assert await health.worker.exit_code() == 0
        code, printed, _ = await run_command("health", "--url", url, "--json")
        assert (code, json.loads(printed)["ok"]) == (3, False)
        async with asyncio.timeout(PATIENCE):
            assert b"waiting for a worker there" in await follower.stderr.readline()
            line = (await leader_follower.stdout.readline()).decode()
        assert " lease_released default use=leader epoch=" in line
        assert line.endswith("reason='this client is stopping'\n")
        for one in (follower, leader_follower):
            one.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(one.wait(), PATIENCE) == 0


async def test_no_health_server() -> None:
    """The error is clear if no program listens, or a program that is not a health server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(run_command("health", f"--url=:{port}"))
            connection, _ = await asyncio.to_thread(listener.accept)
            connection.sendall(b"220 mail\r\n\r\n")
            code, printed, _ = await asked
            connection.close()
    why = f"127.0.0.1:{port}: the program that listens there is not a health server"
    assert (code, printed) == (3, f"not ready: answer: none from {why}\n")
    code, printed, _ = await run_command("health", "--url=:1")
    assert (code, printed) == (3, "not ready: answer: none from 127.0.0.1:1: connection refused\n")


async def test_only_river_tables(fresh_database_url: str) -> None:
    """Without riverpy's own tables `riverpy health` reports that workers are not known."""
    await Migrator(fresh_database_url).up()
    args = ["health", "--database-url", fresh_database_url]
    result = await asyncio.to_thread(CliRunner().invoke, main, args)
    assert (result.exit_code, result.stdout[:22]) == (0, "ok: workers: not known")


async def test_service_manager(schema: Schema, tmp_path: Path) -> None:
    """systemd is notified that the worker is ready, is alive, and stops."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(PATIENCE)

        async def heard(text: str) -> None:
            while text not in (await asyncio.to_thread(manager.recv, 1000)).decode():
                pass

        where = (f"--database-url={schema.url}", f"--schema={schema.name}")
        environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}
        async with running_worker(tmp_path, "jobs", *where, **environ) as worker:
            await heard("READY=1\nSTATUS=working default")
            await heard("WATCHDOG=1")
            worker.send(signal.SIGTERM)
            await heard("STOPPING=1")
            assert await worker.exit_code() == 0
