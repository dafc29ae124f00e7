"""`riverpy worker --health`: what probes, scrapers and the service manager see of a real worker."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.cli.worker_process import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

PATIENCE = 30.0


class Served:
    """A worker with a health server."""

    def __init__(self, worker: WorkerProcess, port: int) -> None:
        self.worker, self.port = worker, port

    async def get(self, path: str) -> tuple[int, str]:
        """The status and the body of an answer."""
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
            await writer.wait_closed()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    async def checks(self, path: str) -> tuple[int, dict[str, Any]]:
        """The status, and the reason of each check."""
        status, body = await self.get(path)
        return status, {name: one["reason"] for name, one in json.loads(body)["checks"].items()}

    async def until(self, path: str, status: int) -> dict[str, Any]:
        """Ask until the answer has this status; its checks."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found, checks = await self.checks(path)
                if found == status:
                    return checks
                await asyncio.sleep(0.02)


@asynccontextmanager
async def served(
    schema: Schema, tmp_path: Path, *args: str, url: str | None = None, **environ: str
) -> AsyncGenerator[Served]:
    """A worker of this schema on a port of its own."""
    where = (f"--database-url={url or schema.url}", f"--schema={schema.name}", "--health=:0")
    async with running_worker(tmp_path, "jobs", *where, *args, **environ) as worker:
        entry = await worker.until_logged("health is served")
        yield Served(worker, entry["port"])


async def test_ready_until_it_stops(schema: Schema, tmp_path: Path) -> None:
    """OP-02: a worker whose slots are all taken is alive and ready; during its drain it is alive
    and says that it stops."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{\"what\": \"wait\"}', 'do', 25)"
    )
    async with served(schema, tmp_path, "-q", "default:1") as health:
        await health.worker.until_printed("job wait")
        checks = await health.until("/readyz", 200)
        assert checks["queue default"] == "every slot is taken"
        health.worker.send(signal.SIGTERM)
        checks = await health.until("/readyz", 503)
        assert checks["state"] == "stopping"
        assert (await health.get("/livez"))[0] == 200
        (tmp_path / "release").touch()
        assert await health.worker.exit_code() == 0


async def test_up_before_the_database(schema: Schema, tmp_path: Path) -> None:
    """OP-02: while the database cannot be reached the worker is alive, and not ready."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgres://u@127.0.0.1:{silent.getsockname()[1]}/d"
        async with served(schema, tmp_path, url=url) as health:
            assert (await health.get("/livez"))[0] == 200
            status, checks = await health.checks("/readyz")
            assert (status, checks["state"]) == (503, "starting")
            assert "riverpy_leader 0" in (await health.get("/metrics"))[1]
