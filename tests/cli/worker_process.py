"""A real `riverpy worker` as a test sees it: what it prints, what it logs, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

RIVERPY = Path(sys.executable).with_name("riverpy")
SIGNAL_TIMEOUT = 60.0
"""Seconds until what a process should do, or print, counts as never to come."""

JOBS = """
from __future__ import annotations

import asyncio, atexit, concurrent.futures, ctypes, logging, multiprocessing, os, re, signal
import socket, sys, threading, time, warnings
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
import riverpy

workers = riverpy.Workers()


class Do(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "do"
    what: str


left = []


@workers.job(timeout=None)
async def do(job: riverpy.Job[Do]) -> None:
    print("job", job.args.what, flush=True)
    match job.args.what:
        case "wait":
            while not Path("release").exists():
                await asyncio.sleep(0.01)
        case "sleep":
            await asyncio.sleep(3600)
        case "handle SIGHUP":
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: print("SIGHUP", flush=True))
            print("handling", flush=True)
            await asyncio.sleep(3600)
        case "take wake-ups":
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            signal.set_wakeup_fd(writer.fileno())
            print("taken", flush=True)
            await asyncio.sleep(3600)
        case "ignore":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    print("ignored", flush=True)
        case "block python":
            while True:
                pass
        case "block sleep":
            time.sleep(3600)
        case "block C":
            while True:
                ctypes.CDLL(None).usleep(3_600_000_000)
        case "block regex":  # it holds the GIL, but lets the main thread run signal handlers
            re.match("(a+)+$", "a" * 60 + "b")
        case "flood":
            os.set_blocking(2, False)
            try:
                while True:
                    os.write(2, b"x")
            except BlockingIOError:
                os.set_blocking(2, True)
            print("nobody reads this", file=sys.stderr, flush=True)
        case "fork":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
            child.start()
            child.terminate()
            await asyncio.to_thread(child.join)
            print("child", child.exitcode, flush=True)
        case "fork in a thread":
            def fork():
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    return pool.map(abs, [-1, -2])
            print("pool", await asyncio.to_thread(fork), flush=True)
        case "exit" | "interrupt" | "stop":
            errors = {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}
            async def end():
                if job.args.what == "stop":
                    asyncio.get_running_loop().stop()
                else:
                    raise errors[job.args.what]
            left.append(asyncio.create_task(end()))
        case "exit in a group":
            async with asyncio.TaskGroup() as tasks:
                async def end():
                    sys.exit(3)
                tasks.create_task(end())
        case "leave what ends":
            atexit.register(print, "atexit", flush=True)
            pool = concurrent.futures.ProcessPoolExecutor(1)
            print(await asyncio.get_running_loop().run_in_executor(pool, abs, -1), flush=True)
            left.append(pool)
            print("not flushed")
        case "leave thread of the loop":
            await asyncio.to_thread(time.sleep, 3600)
        case "leave thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
        case "leave task":
            async def stay():
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        pass
            left.append(asyncio.create_task(stay()))
        case "alarms":
            signal.signal(signal.SIGALRM, lambda *_: None)
            for _ in range(2000):
                signal.raise_signal(signal.SIGALRM)
                time.sleep(0.0002)
        case "fail":
            raise ValueError("no luck")
        case "log":
            logging.getLogger("mine").warning("from %s", "logging")
            warnings.warn("from warnings")
            logging.getLogger("mine").info("postgres://u:s3cret@h/d")
        case _:
            pass


class Block(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "block"


@workers.blocking_job(timeout=timedelta(hours=1))
def block(job: riverpy.Job[Block]) -> None:
    print("job block", flush=True)
    threading.Event().wait(3600)


class Detached(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "detached"


@workers.blocking_job(timeout=timedelta(hours=1), executor="process")
def detached(job: riverpy.Job[Detached]) -> None:
    Path("detached").touch()
    while not Path("release").exists():
        time.sleep(0.01)


class StuckClient(riverpy.Client):
    async def release_claims(self, claim_keys):
        time.sleep(3600)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=10)},
    config=riverpy.Config(hard_stop_timeout=timedelta(milliseconds=500)),
)
stuck = StuckClient(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=10)},
    config=riverpy.Config(hard_stop_timeout=timedelta(milliseconds=500)),
)
patient = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=10)},
    config=riverpy.Config(hard_stop_timeout=timedelta(hours=1)),
)


@asynccontextmanager
async def managed():
    print("entered", flush=True)
    try:
        yield client
    finally:
        print("left", flush=True)


async def slow_factory():
    print("factory", flush=True)
    await asyncio.sleep(3600)
"""


class WorkerProcess:
    """One process, its output read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.printed: list[str] = []
        """The lines of stdout."""
        self.logged: list[dict[str, Any]] = []
        """The lines of stderr: log entries, or `{"text": line}` where a line is no JSON."""
        self._news = asyncio.Condition()

    async def read(self, stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
        """Take each line of a stream until it ends."""
        async for line in stream:
            async with self._news:
                take(line.decode().rstrip("\n"))
                self._news.notify_all()

    def take_log(self, line: str) -> None:
        """Keep a line of stderr."""
        try:
            self.logged.append(json.loads(line))
        except ValueError:
            self.logged.append({"text": line})

    async def until_printed(self, line: str) -> None:
        """Wait for a line of stdout."""
        await self._until(lambda: line in self.printed, f"stdout {line!r}")

    async def until_logged(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait for this number of log entries and return the first."""
        await self._until(lambda: len(self.entries(event)) >= count, f"log entry {event!r}")
        return self.entries(event)[0]

    def entries(self, event: str) -> list[dict[str, Any]]:
        """The log entries with this event."""
        return [entry for entry in self.logged if entry.get("event") == event]

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def send_each(self, *numbers: signal.Signals) -> None:
        """Send signals one after the other, so that the process takes each."""
        await send_each(self._process, *numbers)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to it and its children, as a terminal does."""
        os.killpg(self._process.pid, number)

    async def exit_code(self) -> int:
        """Wait for the end."""
        return await asyncio.wait_for(self._process.wait(), SIGNAL_TIMEOUT)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(SIGNAL_TIMEOUT), self._news:
                await self._news.wait_for(condition)
        except TimeoutError:
            raise TimeoutError(f"no {what}; {self.printed=} {self.logged=}") from None


async def send_each(process: asyncio.subprocess.Process, *numbers: signal.Signals) -> None:
    """Send signals, each when the one before does not wait in the kernel any more: like signals
    that wait there at the same time become one."""
    status = Path(f"/proc/{process.pid}/status")

    def is_taken(number: signal.Signals) -> bool:
        try:
            masks = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", status.read_text(), re.MULTILINE)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    async with asyncio.timeout(SIGNAL_TIMEOUT):
        for number in numbers:
            if process.returncode is not None:
                return
            with suppress(ProcessLookupError):  # it ends
                process.send_signal(number)
            while process.returncode is None and not is_taken(number):
                await asyncio.sleep(0.01)


def environment(**environ: str) -> dict[str, str]:
    """The environment of a command without the settings of this machine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RIVERPY_", "PG")) and name != "DATABASE_URL"
    }
    return {**kept, **environ}


@asynccontextmanager
async def running_worker(
    directory: Path, *args: str, code: str = JOBS, **environ: str
) -> AsyncGenerator[WorkerProcess]:
    """`riverpy worker ARGS --log=json` beside a `jobs.py`; killed at the end if it still runs."""
    (directory / "jobs.py").write_text(code)
    process = await asyncio.create_subprocess_exec(
        RIVERPY,
        "worker",
        *args,
        "--log=json",
        cwd=directory,
        env=environment(**environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr
    worker = WorkerProcess(process)
    readers = [
        asyncio.create_task(worker.read(process.stdout, worker.printed.append)),
        asyncio.create_task(worker.read(process.stderr, worker.take_log)),
    ]
    try:
        yield worker
    finally:
        with suppress(ProcessLookupError):  # its children too: they hold the ends of the pipes
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(*readers)
