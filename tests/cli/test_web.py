"""`riverpy web` as a process, and its refusals."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.cli.invoking import invoke
from tests.cli.worker_process import RIVERPY, environment
from tests.dashboard.site_kit import insert_job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema

PATIENCE = 60.0
PASSWORD = "s3cret pass"


@asynccontextmanager
async def serving(
    *args: str, cwd: Path | None = None, **environ: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """A running `riverpy web` on a free port, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "web", "--port", "0", *args),
        env=environment(**environ),
        cwd=cwd,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            line = (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", line)
        assert found, line + (await process.stderr.read()).decode()
        yield process, found[0].rstrip("/")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stop(process: asyncio.subprocess.Process, number: signal.Signals) -> int:
    """Send a signal, and return the exit code."""
    process.send_signal(number)
    async with asyncio.timeout(PATIENCE):
        return await process.wait()


async def test_serve(schema: Schema, tmp_path: Path) -> None:
    """The command needs only the URL of a database, or a client of a module. It shows the pages,
    and sends their changes. It ends cleanly by a signal, also while a stream is open. With a
    password, browsers have to send it."""
    job_id = await insert_job(schema)
    database = ("--database-url", schema.url, "--schema", schema.name)
    async with serving(*database) as (process, url), httpx.AsyncClient(base_url=url) as http:
        assert "is alive" in (await http.get("/")).text
        assert f'/jobs/{job_id}"' in (await http.get("/jobs")).text
        assert (await http.get("/", headers={"Host": "evil.org"})).status_code == 403
        assert (await http.get("/live?path=/none")).status_code == 404
        async with asyncio.timeout(PATIENCE), http.stream("GET", "/live?path=/jobs") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            async for line in lines:
                if f'/jobs/{job_id}"' in line:
                    break
            other_id = await insert_job(schema, "discarded")
            async for line in lines:
                if f'/jobs/{other_id}"' in line:
                    break
            assert await stop(process, signal.SIGTERM) == 0
    (tmp_path / "shop.py").write_text(
        "import riverpy\n"
        f"client = riverpy.Client({schema.url!r}, config=riverpy.Config(schema={schema.name!r}))\n"
    )
    async with (
        serving("shop:client", cwd=tmp_path, RIVERPY_WEB_PASSWORD=PASSWORD) as (process, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        for auth in (None, ("ann", "wrong"), ("ann", PASSWORD[:-1])):
            answer = await http.get("/", auth=auth)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
        assert (await http.get("/api/states")).status_code == 401
        assert (await http.get("/api/health-checks/complete")).json() == {"status": "ok"}
        assert (await http.head("/api/health-checks/complete")).status_code == 200
        page = (await http.get("/jobs", auth=("ann", PASSWORD))).text
        assert "ann · can change jobs" in re.sub("<[^>]*>", "", page)
        assert await stop(process, signal.SIGINT) == 0


async def test_path_prefix(schema: Schema) -> None:
    """With a path prefix, all pages and health checks are below it. The path itself leads to Home,
    and other paths say where the dashboard is."""
    database = ("--database-url", schema.url, "--schema", schema.name)
    async with (
        serving(*database, "--path-prefix", "/ops/jobs/", RIVERPY_WEB_PASSWORD=PASSWORD) as (
            _,
            url,
        ),
        httpx.AsyncClient(base_url=url.removesuffix("/ops/jobs")) as http,
    ):
        assert url.endswith("/ops/jobs")
        assert (await http.get("/ops/jobs")).headers["location"] == "/ops/jobs/"
        assert (await http.get("/ops/jobs/")).status_code == 401
        page = (await http.get("/ops/jobs/jobs", auth=("ann", PASSWORD))).text
        paths = re.findall(r'(?:href|src|action)="(/[^"]*)"', page)
        assert paths
        assert all(path.startswith("/ops/jobs/") for path in paths)
        assert (await http.get("/ops/jobs/api/health-checks/minimal")).status_code == 200
        answer = await http.get("/jobs", auth=("ann", PASSWORD))
        assert (answer.status_code, "/ops/jobs/" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("args", "environ", "message"),
    [
        (["--host", "0.0.0.0"], {}, "--allow-network"),
        (["--host", "0.0.0.0", "--allow-network"], {}, "RIVERPY_WEB_PASSWORD"),
        ([], {"RIVERPY_WEB_PASSWORD": "short"}, "8 characters"),
        (["no_such_module:client"], {}, "no module"),
        (["--port", "99999"], {}, "whole number"),
        (["--path-prefix", "ops"], {}, "such as /ops/jobs"),
        (["--path-prefix", "//evil.org"], {}, "such as /ops/jobs"),
    ],
)
def test_refusals(args: list[str], environ: dict[str, str], message: str) -> None:
    """Wrong options are refused with a text that says what to do, before a connection is made."""
    done = invoke("web", "--database-url", "postgres://none", *args, **environ)
    assert done.exit_code == 2
    assert message in done.stderr


def test_port_in_use() -> None:
    """A port in use ends the command with exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = invoke("web", "--database-url", "postgres://none", "--port", port)
    assert done.exit_code == 1
    assert "choose another one with --port" in done.stderr
