"""Process jobs when their worker ends: no child keeps running, and no row is released before its
child has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.cli.test_worker import PATIENT_END, PUT_BACK, insert, worker_of
from tests.cli.worker_process import SIGNAL_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema

CODE = f"""{PATIENT_END}
import subprocess

class Child(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "child"
    what: str


@workers.blocking_job(timeout=None, executor="process")
def child(job: riverpy.Job[Child]) -> None:
    if job.args.what == "without the kernel":
        ctypes.CDLL(None).prctl(1, 0)
    program = subprocess.Popen(["sleep", "3600"])
    Path("program").write_text(str(program.pid))
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    if job.args.what == "holds the GIL":
        re.match("(a+)+$", "a" * 60 + "b")
    time.sleep(3600)
"""
IMMORTAL = f"""{CODE}
import riverpy._work.child_process
riverpy._work.child_process.ChildProcess.kill = lambda self: None
riverpy._work.child_process.ChildProcess.cancel_job = lambda self: None
"""


@asynccontextmanager
async def child_of(tmp_path: Path) -> AsyncGenerator[psutil.Process]:
    """Yield the child that runs the job. Kill it at the end."""
    async with asyncio.timeout(SIGNAL_TIMEOUT):
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    try:
        yield child
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def runs(process: psutil.Process) -> bool:
    """Whether the process still runs."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("what", ["sleeps", "without the kernel", "holds the GIL"])
async def test_child_of_a_killed_worker(schema: Schema, tmp_path: Path, what: str) -> None:
    """A child and the programs of its job end when its worker is killed: through the kernel, even
    while C code holds the child's GIL, and through the closed pipe where the kernel does not do
    it."""
    await insert(schema, what, kind="child")
    async with (
        worker_of(schema, tmp_path, "jobs", code=CODE) as worker,
        child_of(tmp_path) as child,
    ):
        processes = [child, *child.parents()[:1], *child.children()]
        assert str(processes[2].pid) == (tmp_path / "program").read_text()
        worker.send(signal.SIGKILL)
        async with asyncio.timeout(SIGNAL_TIMEOUT):
            while any(runs(process) for process in processes):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("blocker", [None, "block sleep"])
@pytest.mark.parametrize("ends", [True, False])
async def test_row_of_a_child(
    schema: Schema, tmp_path: Path, blocker: str | None, *, ends: bool
) -> None:
    """After SIGTERM, also while another job blocks the event loop, the row of a process job is
    released after its child has ended. If the child does not end, the row stays `running`."""
    await insert(schema, "sleeps", kind="child")
    args = ("jobs", "--soft-stop=100ms")
    code = CODE if ends else IMMORTAL
    async with (
        worker_of(schema, tmp_path, *args, code=code) as worker,
        child_of(tmp_path) as child,
    ):
        if blocker is not None:
            await insert(schema, blocker)
            await worker.until_printed(f"job {blocker}")
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == (4 if blocker or not ends else 0)
        assert not (ends and runs(child))
        (job,) = [job for job in await schema.jobs() if job["kind"] == "child"]
        if ends:
            found = {"state": job["state"], "attempt": job["attempt"], "errors": job["errors"]}
            assert found == PUT_BACK
        else:
            assert job["state"] == "running"


SCRIPT = """
import asyncio, os, sys
from typing import ClassVar
import msgspec, riverpy

workers = riverpy.Workers()


class Task(msgspec.Struct):
    kind: ClassVar[str] = "task"


@workers.blocking_job(executor="process")
def work(job: riverpy.Job[Task]) -> None: ...


if "hide" in sys.argv:

    @workers.blocking_job(executor="process", kind="hidden")
    def hidden(job: riverpy.Job[Task]) -> None: ...


client = riverpy.Client(
    os.environ["SCRIPT_DATABASE_URL"],
    workers=workers,
    queues={"default": riverpy.QueueConfig()},
    config=riverpy.Config(schema=os.environ["SCRIPT_SCHEMA"]),
)
"""
START = "asyncio.run(client.run(drain=True))"
GUARDED_START = f"if __name__ == '__main__':\n    {START}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("end", "args", "error"),
    [
        (START, [], "it would start the client again\nPut the code that runs once under `if __na"),
        (GUARDED_START, ["hide"], "cannot import the function of job kind 'hidden'"),
        (GUARDED_START, [], None),
    ],
    ids=["no guard", "hidden function", "guard"],
)
async def test_script_that_starts_its_client(
    schema: Schema, tmp_path: Path, end: str, args: list[str], error: str | None
) -> None:
    """A script without a main guard is refused with this reason, and a function that exists only in
    the main process too. The job stays unchanged. A script with a main guard runs its job."""
    await insert(schema, "", kind="task")
    (tmp_path / "script.py").write_text(SCRIPT + end)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "script.py",
        *args,
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"SCRIPT_DATABASE_URL": schema.url, "SCRIPT_SCHEMA": schema.name},
    )
    async with asyncio.timeout(SIGNAL_TIMEOUT):
        _, output = await process.communicate()
    text = output.decode()
    assert (process.returncode, error is None or error in text) == (int(error is not None), True)
    assert text.count("ConfigError: ") == int(error is not None)
    (job,) = await schema.jobs()
    assert job["state"] == ("completed" if error is None else "available")
