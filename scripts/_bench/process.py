"""Starts, watches and stops the processes that are measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_INTERVAL = 0.05
STOP_TIMEOUT = 40.0


class Unavailable(Exception):
    """A competitor cannot be measured. The text gives the reason."""


class Output(NamedTuple):
    """The output of a program, and the last value of its memory that could be read."""

    found: dict[str, Any]
    rss_mib: float


def program(module: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """Return the command of one of our own programs."""
    return [python, "-W", "ignore", "-m", f"scripts._bench.{module}", *map(str, arguments)]


async def run_json(command: Sequence[str], limit: float) -> Output:
    """Run a program to its end and parse the JSON object in its last line.

    Raises: Unavailable: it failed, or did not end within `limit` seconds.
    """
    name = " ".join(command[:5])
    process = await _start(command, stdout=subprocess.PIPE)
    watching = asyncio.create_task(_watch_memory(process.pid))
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit)
    except TimeoutError:
        raise Unavailable(f"{name} did not end within {limit:.0f} s") from None
    finally:
        await _kill(process)
        watching.cancel()
    if process.returncode:
        raise Unavailable(f"{name} ended with exit code {process.returncode}: {_last(err)}")
    try:
        return Output(json.loads(out.splitlines()[-1]), await _result(watching))
    except (IndexError, ValueError):
        raise Unavailable(f"{name} printed no JSON: {_last(out)}") from None


@asynccontextmanager
async def running(command: Sequence[str]) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a program until the block ends, then stop it with SIGTERM."""
    process = await _start(command, stdout=subprocess.DEVNULL)
    reading = asyncio.create_task(process.stderr.read() if process.stderr else asyncio.sleep(0))
    try:
        yield process
        if process.returncode:
            raise Unavailable(f"{command[0]} ended early: {_last(await reading or b'')}")
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        await _kill(process)
        reading.cancel()


async def _start(command: Sequence[str], *, stdout: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error}") from None


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its children, which can outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


async def _watch_memory(pid: int) -> float:
    found = 0.0
    while True:
        found = memory_mib(pid) or found
        try:
            await asyncio.sleep(SAMPLE_INTERVAL)
        except asyncio.CancelledError:
            return found


async def _result(watching: asyncio.Task[float]) -> float:
    return await watching


def _last(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def memory_mib(pid: int) -> float:
    """Return the memory of a process in MiB, or 0 where it cannot be read."""
    with suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds, or 0 where it cannot be read."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
