"""River in Go: its program, built once from `go/`, and its processes."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

SOURCES = Path(__file__).parent / "go"
"""The sources of the program. `go.mod` has the version of River for the tests."""
SOURCES_VARIABLE = "RIVERPY_TEST_GO"
"""Variable with the directory of another copy of `SOURCES`. `scripts/interop` makes one with
another version of River."""
BUILD_TIMEOUT = 600
"""Timeout in seconds. The first build downloads and compiles the modules."""
UNUSED_AGE = 7 * 86400
"""Seconds after which the unused program of other sources is deleted."""
PATIENCE = 30.0
"""Timeout of a wait for a process, in seconds."""
BUFFER = 2**26
"""Bytes of unread output after which the process has to wait."""

Row = dict[str, Any]


def build() -> Path | None:
    """Return the program, and build it if no run has; None where it cannot be built.

    It cannot be built without Go or its modules. Raises CalledProcessError if the sources do not
    compile.
    """
    sources = Path(os.environ.get(SOURCES_VARIABLE) or SOURCES)
    files = sorted([*sources.glob("*.go"), *sources.glob("go.*")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "riverpy"
    binary = cache / f"interop-{digest}"
    if binary.exists():
        binary.touch()
        return binary
    if shutil.which("go") is None:
        return None
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "interop.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists() and not _build(sources, binary):
            return None
    return binary


def _build(sources: Path, binary: Path) -> bool:
    """Build the program, delete unused ones, and return whether the modules were available."""
    fetched = subprocess.run(
        ["go", "mod", "download"],
        cwd=sources,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    if fetched.returncode:
        return False
    unfinished = binary.with_name("interop.unfinished")
    subprocess.run(
        ["go", "build", "-o", unfinished, "."], cwd=sources, timeout=BUILD_TIMEOUT, check=True
    )
    for other in binary.parent.glob("interop-*"):
        if time.time() - other.stat().st_mtime > UNUSED_AGE:
            other.unlink()
    unfinished.rename(binary)
    return True


class RiverGoError(Exception):
    """A verb failed. The text is its standard error."""


class Lines:
    """The output of a worker, one event per line. Lines are kept until a test takes them."""

    def __init__(self) -> None:
        self._waiting: list[Row] = []

    async def line(self) -> Row:
        """Take the next line."""
        raise NotImplementedError

    async def until(self, event: str, **fields: object) -> Row:
        """Wait for an event with these fields, and take it. Earlier lines stay."""
        wanted = {"event": event, **fields}.items()
        for index, line in enumerate(self._waiting):
            if line.items() >= wanted:
                return self._waiting.pop(index)
        with anyio.fail_after(PATIENCE, reason=f"no {event} {fields}: {self._waiting}"):
            while not (line := await self.line()).items() >= wanted:
                self._waiting.append(line)
        return line

    def passed(self, event: str, **fields: object) -> list[Row]:
        """Return the lines with these fields that came before those that were taken."""
        wanted = {"event": event, **fields}.items()
        return [line for line in self._waiting if line.items() >= wanted]


class GoProcess(Lines):
    """A running verb."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> Row:
        """Return the next line. Raises RiverGoError if the process exited instead."""
        assert self._process.stdout is not None
        with anyio.fail_after(PATIENCE):
            text = await self._process.stdout.readline()
        if not text:
            raise RiverGoError(f"the process ended: {await self._errors()}")
        return json.loads(text)

    def send(self, line: object) -> None:
        """Write a line of JSON to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(line) + b"\n")

    async def insert(self, *requests: Row) -> list[Row]:
        """Send these requests to an inserter one by one, and return the row or the error of
        each."""
        rows: list[Row] = []
        for request in requests:
            self.send(request)
            rows.append(await self.line())
        return rows

    def terminate(self) -> None:
        """Send SIGTERM: a worker lets its jobs end. At the second one it cancels them."""
        self._process.terminate()

    def interrupt(self) -> None:
        """Send SIGINT, which does the same. Two SIGTERM at once may count as one."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def freeze(self) -> None:
        """Send SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    async def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        with anyio.fail_after(PATIENCE):
            return await self._process.wait()

    async def close(self) -> None:
        """Stop it if it still runs: by the end of its input and SIGTERM, then by SIGKILL."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.returncode is None:
            self.thaw()
            self.terminate()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(5):
                await self._process.wait()
            if self._process.returncode is None:
                self.kill()
                await self._process.wait()

    async def _errors(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()


class RiverGo:
    """River in Go on one schema."""

    def __init__(self, binary: Path, url: str, schema: str) -> None:
        self._binary = binary
        self._url = url
        self.schema = schema
        self.zone = "UTC"
        """The time zone of its processes."""

    async def run(
        self, verb: str, *args: object, requests: Iterable[Row] | None = None
    ) -> list[Row]:
        """Run a verb with these flags and arguments to its end, and return the printed lines.

        `requests` are the lines of its input. Raises RiverGoError if it fails.
        """
        lines = b"".join(msgspec.json.encode(request) + b"\n" for request in requests or ())
        process = await self.start(verb, *args)
        try:
            with anyio.fail_after(PATIENCE):
                out, err = await process.communicate(lines or None)
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RiverGoError(err.decode())
        return [json.loads(line) for line in out.splitlines()]

    @asynccontextmanager
    async def worker(self, *flags: object) -> AsyncGenerator[GoProcess]:
        """Run a worker, and wait for its start."""
        async with self.process("work", *flags) as process:
            await process.until("started")
            yield process

    @asynccontextmanager
    async def process(self, verb: str, *args: object) -> AsyncGenerator[GoProcess]:
        """Run a verb until the end of the block."""
        process = GoProcess(await self.start(verb, *args))
        try:
            yield process
        finally:
            await process.close()

    async def start(self, verb: str, *args: object) -> asyncio.subprocess.Process:
        """Start a verb; the caller stops it."""
        return await asyncio.create_subprocess_exec(
            self._binary,
            verb,
            "--schema",
            self.schema,
            *map(str, args),
            env={
                **os.environ,
                "DATABASE_URL": self._url,
                "PGAPPNAME": f"go {verb}",
                "TZ": self.zone,
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=BUFFER,
        )
