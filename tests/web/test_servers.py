"""The lifespan in real servers: several processes, stops, outages, reloads and faults."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from riverpy._log_events import WEB_WORKER_FAILED
from riverpy.migrate import migrate_all
from tests._database import connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    Start = Callable[..., AbstractAsyncContextManager["WebServer"]]

PROGRAM = Path(__file__).with_name("web_program.py")
FREE, JOB_LOCK, REQUEST_LOCK = 1, 2, 3
"""Advisory locks: no test takes the first one."""
PATIENCE = 60.0
POLL = 0.05


class WebServer:
    """A running server, with its database and its output."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        connection: asyncpg.Connection[Any],
        http: httpx2.AsyncClient,
        directory: Path,
    ) -> None:
        self.process, self.connection, self.http = process, connection, http
        self.directory = directory

    def read_output(self) -> str:
        """Return what the server has printed."""
        return (self.directory / "output").read_text()

    def order(self, *, job_lock: int = FREE, request_lock: int = FREE) -> asyncio.Task[int]:
        """Send a request that inserts an order and a job. The result is the status code."""

        async def send() -> int:
            url = f"/orders?{job_lock=}&{request_lock=}"
            return (await self.http.post(url)).status_code

        return asyncio.get_running_loop().create_task(send())

    async def until_answer(self, status: int = 201) -> None:
        """Send orders until one gets this answer. A server that starts refuses connections, and
        after an outage a request may fail."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    if await self.order() == status:
                        return
                except httpx2.TransportError:
                    assert self.process.returncode is None, self.read_output()
                await asyncio.sleep(POLL)

    async def until_printed(self, text: str, count: int) -> None:
        """Wait until the processes of the server have printed this text so many times."""
        async with asyncio.timeout(PATIENCE):
            while self.read_output().count(text) < count:
                await asyncio.sleep(POLL)

    async def until_true(self, sql: str) -> None:
        """Wait until the statement returns true."""
        async with asyncio.timeout(PATIENCE):
            while not await self.connection.fetchval(sql):
                await asyncio.sleep(POLL)

    async def states(self) -> dict[tuple[str, int], int]:
        """Return the number of jobs by state and attempt."""
        sql = "SELECT state::text, attempt, count(*) FROM river_job GROUP BY 1, 2"
        return {(row[0], row[1]): row[2] for row in await self.connection.fetch(sql)}


@pytest.fixture
async def start(fresh_database_url: str, tmp_path: Path) -> Start:
    """Return a function that starts a server in `tmp_path`, for a block."""
    (tmp_path / "program.py").write_text(PROGRAM.read_text())

    @asynccontextmanager
    async def start(command: str, **environment: str) -> AsyncGenerator[WebServer]:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        words = shlex.split(command.format(port=port))
        environ = {**os.environ, "DATABASE_URL": fresh_database_url, "PYTHONUNBUFFERED": "1"}
        with (tmp_path / "output").open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *words),
                cwd=tmp_path,
                env=environ | environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            async with (
                connected(fresh_database_url) as connection,
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
            ):
                yield WebServer(process, connection, http, tmp_path)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async with connected(fresh_database_url) as connection:
        await migrate_all(connection)
        await connection.execute("CREATE TABLE orders (id serial PRIMARY KEY)")
    return start


HOLDING = """
SELECT count(*) = 2 FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'advisory'
"""
STOPPING = "SELECT count(*) > 0 AND bool_and(state = 'stopping') FROM riverpy_client"
END_CONNECTIONS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^riverpy'
"""
UVICORN_WORKERS = "uvicorn program:app --port {port} --workers 2"
GUNICORN = "gunicorn program:app -b 127.0.0.1:{port} -w 2 --no-control-socket -k uvicorn_worker."
HYPERCORN = "hypercorn program:app -b 127.0.0.1:{port}"
SERVERS = [(UVICORN_WORKERS, 2), (GUNICORN + "UvicornWorker", 2), (HYPERCORN, 1)]
UVICORN = "uvicorn program:app --port {port}"


@pytest.mark.parametrize(
    ("command", "processes"), SERVERS, ids=["uvicorn", "gunicorn", "hypercorn"]
)
async def test_stop(start: Start, command: str, processes: int) -> None:
    """At SIGTERM a request that inserts and a job that runs may end, in servers with one or several
    processes, and also after the database has ended riverpy's connections. The exit is clean."""
    async with start(command) as server:
        await server.until_answer()
        if command != HYPERCORN:  # it prints nothing
            await server.until_printed("Application startup complete", processes)
        await server.connection.execute("SELECT pg_advisory_lock($1)", JOB_LOCK)
        await server.connection.execute("SELECT pg_advisory_lock($1)", REQUEST_LOCK)
        assert await server.order(job_lock=JOB_LOCK) == 201
        request = server.order(request_lock=REQUEST_LOCK)
        await server.until_true(HOLDING)
        assert await server.connection.fetchval(END_CONNECTIONS) > 3
        await server.until_answer()
        server.process.terminate()
        if command != HYPERCORN:
            await server.until_printed("Shutting down", processes)
        await server.connection.execute("SELECT pg_advisory_unlock($1)", REQUEST_LOCK)
        assert await request == 201
        await server.until_true(STOPPING)
        await server.connection.execute("SELECT pg_advisory_unlock($1)", JOB_LOCK)
        assert await server.process.wait() == 0
        states = await server.states()
        orders = await server.connection.fetchval("SELECT count(*) FROM orders")
        assert sum(states.values()) == orders >= 4
        assert ("running", 1) not in states
        assert states["completed", 1] >= orders - 1
        assert server.read_output().count("own lifespan ended") == processes


async def test_reload(start: Start) -> None:
    """`uvicorn --reload` stops the client and opens it again in a new process."""
    async with start(UVICORN + " --reload") as server:
        await server.until_answer()
        program = server.directory / "program.py"
        program.write_text(program.read_text().replace('"ordered", 201', '"ordered", 202'))
        await server.until_answer(202)
        await server.until_true("SELECT bool_and(state = 'completed') FROM river_job")
        server.process.terminate()
        assert await server.process.wait() == 0
        assert server.read_output().count("own lifespan ended") == 2
        assert set(await server.states()) == {("completed", 1)}


async def test_fault_and_failed_start(start: Start, unused_tcp_port: int) -> None:
    """A fault of riverpy stops a server as at SIGTERM, and is in its log. A server without a
    database does not start, and says why."""
    async with start(UVICORN) as server:
        await server.until_answer()
        assert (await server.http.post("/fail")).status_code == 200
        assert await server.process.wait() == -signal.SIGTERM
        output = server.read_output()
        assert WEB_WORKER_FAILED in output
        assert "ZeroDivisionError: a fault of ours\n" in output
        assert "own lifespan ended" in output
        assert "Application shutdown failed" in output
    url = f"postgres://nobody@127.0.0.1:{unused_tcp_port}/none"
    async with start(UVICORN, DATABASE_URL=url) as server:
        assert await server.process.wait() == 3
        assert "connection refused\nriverpy.web.lifespan could not open the client" in (
            server.read_output()
        )
