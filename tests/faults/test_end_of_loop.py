"""An event loop that ends under a client: all of its tasks are cancelled without a stop of the
client."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.cli.worker_process import SIGNAL_TIMEOUT, environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema

JOBS = """
import asyncio, os, sys, time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
import riverpy

workers = riverpy.Workers()
ready = asyncio.Event()


class Do(msgspec.Struct):
    kind: ClassVar[str] = "do"
    what: str


@workers.job(timeout=None)
async def do(job: riverpy.Job[Do]) -> None:
    match job.args.what:
        case "end":
            ready.set()
        case "end when cancelled":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
        case _:
            await asyncio.sleep(3600)


class Child(msgspec.Struct):
    kind: ClassVar[str] = "child"


@workers.blocking_job(timeout=None, executor="process")
def child(job: riverpy.Job[Child]) -> None:
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    time.sleep(3600)


client = riverpy.Client(
    os.environ["DATABASE_URL"],
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=10)},
    config=riverpy.Config(schema=os.environ["SCHEMA"], fetch_poll_interval=timedelta(hours=1)),
)
"""
PLAIN = """
import asyncio, os, sys
from jobs import Do, client, ready

tasks = []

async def main():
    tasks.append(asyncio.create_task(client.run()))
    while not os.path.exists("pid"):
        await asyncio.sleep(0.01)
    print("works", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await client.insert(Do("end"))
    await ready.wait()

asyncio.run(main())
"""
AT_CLAIM = """
import asyncio, os, sys
from jobs import Do, client, ready
from riverpy._work import producer
from riverpy._work.executor import JobExecutor

tasks = []

async def main():
    print("works", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    tasks.append(asyncio.create_task(client.run()))
    await ready.wait()

def cancel_all():
    for task in asyncio.all_tasks():
        task.cancel()

def launch(*args):
    waiting = launch_as_ever(*args)
    cancel_all()
    return waiting

async def claim(*args, **kwargs):
    await claim_as_ever(*args, **kwargs)
    cancel_all()
    await asyncio.sleep(0)

if sys.argv[1] == "launched":
    launch_as_ever = JobExecutor.make_and_start_attempts
    JobExecutor.make_and_start_attempts = launch
else:
    claim_as_ever, producer.job_claim = producer.job_claim, claim
try:
    asyncio.run(main())
except asyncio.CancelledError:
    pass
"""
WEB = """
import asyncio
from contextlib import asynccontextmanager
from jobs import client
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

@asynccontextmanager
async def lifespan(app):
    async with client, client.working():
        yield

async def stream(request):
    async def forever():
        while True:
            yield b"x"
            await asyncio.sleep(0.05)
    return StreamingResponse(forever())

app = Starlette(routes=[Route("/stream", stream)], lifespan=lifespan)
"""


@asynccontextmanager
async def running(
    schema: Schema, directory: Path, *command: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a Python program beside the files above. At the end it is killed with the child process
    of its job."""
    (directory / "jobs.py").write_text(JOBS)
    (directory / "web.py").write_text(WEB)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=directory,
        env=environment(DATABASE_URL=schema.url, SCHEMA=schema.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        if (directory / "pid").exists():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int((directory / "pid").read_text())).kill()
        await process.wait()


async def until_line(process: asyncio.subprocess.Process, pattern: str) -> str:
    """Wait for a line of the output that matches, and return it."""
    assert process.stdout is not None
    seen: list[str] = []
    async with asyncio.timeout(SIGNAL_TIMEOUT):
        async for line in process.stdout:
            seen.append(line.decode())
            if re.search(pattern, seen[-1]):
                return seen[-1]
    raise AssertionError("".join(seen))


async def insert(schema: Schema, kind: str, what: str = "") -> None:
    """Insert a job with one attempt."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts)"
        " VALUES (jsonb_build_object('what', $1::text), $2, 1)",
        what,
        kind,
    )


async def outcomes(schema: Schema) -> list[tuple[str, int, list[str] | None]]:
    """Return the states and errors of the jobs."""
    return [(job["state"], job["attempt"], job["errors"]) for job in await schema.jobs()]


INTERRUPTED = ("available", 0, None)
COMPLETED = ("completed", 1, None)


async def test_plain_main_that_ends(schema: Schema, tmp_path: Path) -> None:
    """The main coroutine of `asyncio.run` returns while a task runs the client. Finished jobs are
    completed, the others are released without a counted attempt, and their child processes end
    (FR-21)."""
    await insert(schema, "do", "sleep")
    await insert(schema, "do", "end when cancelled")
    await insert(schema, "child")
    async with running(schema, tmp_path, "-c", PLAIN) as process:
        await until_line(process, "works")
        assert process.stdin is not None
        process.stdin.write(b"\n")
        out, _ = await asyncio.wait_for(process.communicate(), SIGNAL_TIMEOUT)
        assert process.returncode == 0, out.decode()
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert await outcomes(schema) == [INTERRUPTED, COMPLETED, INTERRUPTED, COMPLETED]


@pytest.mark.parametrize("when", ["launched", "answer lost"])
async def test_loop_that_ends_at_a_claim(schema: Schema, tmp_path: Path, when: str) -> None:
    """Jobs that were claimed and have not started are released too, including those of a claim
    without an answer (FR-21)."""
    await insert(schema, "do", "sleep")
    await insert(schema, "do", "sleep")
    async with running(schema, tmp_path, "-c", AT_CLAIM, when) as process:
        out, _ = await asyncio.wait_for(process.communicate(b"\n"), SIGNAL_TIMEOUT)
        assert process.returncode == 0, out.decode()
    assert await outcomes(schema) == [INTERRUPTED, INTERRUPTED]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_second_interrupt_of_uvicorn(schema: Schema, tmp_path: Path, loop: str) -> None:
    """With an open stream, the first Ctrl-C waits and the second ends the loop: the job is released
    without a counted attempt, and uvicorn exits within 5 s (FR-21)."""
    await insert(schema, "do", "sleep")
    await insert(schema, "child")
    command = ("-m", "uvicorn", "web:app", "--port=0", f"--loop={loop}")
    async with running(schema, tmp_path, *command) as process:
        line = await until_line(process, "running on http")
        port = int(re.findall(r":(\d+)", line)[-1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.read(1)
        async with asyncio.timeout(SIGNAL_TIMEOUT):
            while not (tmp_path / "pid").exists():
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        await until_line(process, "Waiting for connections to close")
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 5.0)
        writer.close()
    assert await outcomes(schema) == [INTERRUPTED, INTERRUPTED]
