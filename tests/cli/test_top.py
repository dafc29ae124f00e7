"""`riverpy top` as a process: on pipes and terminals, through an outage, to its end."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

import anyio
import pytest
from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy._tools.doctor import server
from riverpy._tools.doctor.statements import ServerRow
from riverpy.cli import main
from tests.cli.worker_process import RIVERPY, environment
from tests.kit.proxy import proxied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema

PATIENCE = 60.0
PASSWORD = "s3cret/pass"


@asynccontextmanager
async def watching(*args: str, **streams: Any) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A running `riverpy top`, killed at the end if it still runs. Its pause does not depend on the
    time of a read, which is long on a busy machine."""
    start = (
        "import sys, riverpy.cli.top\nfrom riverpy.cli import main\n"
        "sys.modules['riverpy.cli.top'].READ_PAUSE_FACTOR = 0.0\nmain(prog_name='riverpy')"
    )
    command = (sys.executable, "-c", start, "top", "--interval=100ms", *args)
    told = environment(TERM="xterm")
    for name in ("COLUMNS", "LINES"):  # set in a parallel run, and stronger than the terminal
        told.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        *command, env=told, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def call(*args: str) -> Any:
    """A command without settings of this machine."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))
    return runner.invoke(main, ["top", *args])


async def test_once(schema: Schema) -> None:
    """One read, as text and as one JSON object."""
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('empty', now())")
    where = ("--once", "--database-url", schema.url, "--schema", schema.name)
    text = await asyncio.to_thread(call, *where)
    assert text.exit_code == 0
    assert text.stdout.startswith("riverpy top")
    assert re.search(r"^empty +0 +0 +- ", text.stdout, re.MULTILINE)
    printed = await asyncio.to_thread(call, "--json", *where)
    assert printed.stdout.count("\n") == 1
    look = json.loads(printed.stdout)
    assert [queue["name"] for queue in look["queues"]] == ["empty"]
    assert look["totals"]["completed"] == 0


def test_no_tables(database_url: str) -> None:
    """If the first read fails, the command ends with an error and advice."""
    result = call("--once", "--database-url", database_url, "--schema", "nowhere")
    assert result.exit_code == 1
    assert "does not exist: correct the name, or create it with CREATE SCHEMA" in result.stderr


async def test_dropped_table(schema: Schema) -> None:
    """The error for a table that was dropped names the command that says what to do."""
    await schema.execute("DROP TABLE riverpy_client")
    where = ("--once", "--database-url", schema.url, "--schema", schema.name)
    result = await asyncio.to_thread(call, *where)
    assert result.exit_code == 1
    assert "does not exist: `riverpy doctor` finds missing tables" in result.stderr


async def test_standby(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a standby the error names the parameter that avoids standbys, also in `riverpy health`
    (NR-12)."""

    async def read_server(_connection: object) -> ServerRow:
        return ServerRow(
            "18.1", is_standby=True, is_read_only=True, session_role="ada", session_pid=1
        )

    monkeypatch.setattr(server, "read_server", read_server)
    where = ("--database-url", schema.url, "--schema", schema.name)
    result = await asyncio.to_thread(call, "--once", *where)
    assert result.exit_code == 1
    assert "is a standby" in result.stderr
    assert "target_session_attrs=primary" in result.stderr
    result = await asyncio.to_thread(CliRunner().invoke, main, ["health", *where])
    assert result.exit_code == 3
    assert "is a standby" in result.stdout


@pytest.mark.parametrize("interval", ["99ms", "0s", "soon"])
def test_wrong_interval(interval: str) -> None:
    """An interval that is too short, or none, is wrong usage."""
    assert call("--interval", interval, "--database-url", "postgres://h/d").exit_code == 2


def test_no_database_given() -> None:
    """Without a database the error explains how to configure one."""
    result = call()
    assert result.exit_code == 2
    assert "--database-url" in result.stderr


async def test_outage(schema: Schema) -> None:
    """An outage of the database is shown with its reason, without the password, and the command
    continues. SIGINT ends it with exit code 0 (SE-02)."""
    async with proxied(schema.url) as proxy:
        parts = urlsplit(proxy.url)
        place = f"postgres:{quote(PASSWORD, safe='')}@{parts.netloc.rpartition('@')[2]}"
        url = urlunsplit(parts._replace(netloc=place))
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        args = ("--json", "--database-url", url, "--schema", schema.name)
        async with watching(*args, **pipes) as process:
            assert process.stdout
            assert process.stderr
            lines: list[bytes] = []

            async def until(key: str) -> None:
                with anyio.fail_after(PATIENCE):
                    while True:
                        lines.append(await process.stdout.readline())
                        if key in json.loads(lines[-1]):
                            return

            await until("queues")
            proxy.refusing = True
            proxy.cut()
            await until("error")
            proxy.refusing = False
            await until("queues")
            process.send_signal(signal.SIGINT)
            rest, errors = await process.communicate()
            assert process.returncode == 0
            told = b"".join(lines) + rest + errors
            assert b"s3cret" not in told
            assert errors == b""


async def test_closed_pipe(schema: Schema) -> None:
    """When the reader has gone, it ends with 0 and without a word (OP-05)."""
    reader, writer = os.pipe()
    args = ("--database-url", schema.url, "--schema", schema.name)
    pipes = {"stdout": writer, "stderr": asyncio.subprocess.PIPE}
    async with watching(*args, **pipes) as process:
        os.close(writer)
        await asyncio.to_thread(os.read, reader, 1)
        os.close(reader)
        with anyio.fail_after(PATIENCE):
            _, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")


class Terminal:
    """A pseudo terminal and what was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.before = termios.tcgetattr(self.theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end in a character
        self.text = ""

    def resize(self, width: int, height: int) -> None:
        """As a window does."""
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def until(self, pattern: str) -> str:
        """Read until the new text has this; returns the new text."""
        seen = ""
        with anyio.fail_after(PATIENCE, reason=f"no {pattern!r} in {self.text!r}"):
            while not re.search(pattern, seen, re.DOTALL):
                try:
                    seen += self._decoder.decode(os.read(self._ours, 65536))
                except BlockingIOError:  # no thread: one that reads could not be given up
                    await asyncio.sleep(0.01)
        self.text += seen
        return seen

    def close(self) -> None:
        """Close both ends."""
        os.close(self.theirs)
        os.close(self._ours)


async def test_terminal(schema: Schema) -> None:
    """On a terminal each frame is painted over the one before, in its size of the moment; no mode
    is changed, so that nothing is left behind, however it ends."""
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('painted', now())")
    terminal = Terminal()
    terminal.resize(120, 30)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    args = ("--database-url", schema.url, "--schema", schema.name)
    async with watching(*args, **streams) as process:
        assert terminal.before == termios.tcgetattr(terminal.theirs)
        await terminal.until("painted.*\x1b\\[J.*\x1b\\[H.*painted.*\x1b\\[J")
        terminal.resize(40, 8)
        process.send_signal(signal.SIGWINCH)
        small = await terminal.until(r"… \d+ more lines.*" + "\x1b\\[J")
        frame = re.findall("\x1b\\[H(.*?)\x1b\\[J", small, re.DOTALL)[-1]
        painted = re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", frame)
        assert max(map(len, painted.splitlines())) <= 40
        assert terminal.before == termios.tcgetattr(terminal.theirs)
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(PATIENCE):
            assert await process.wait() == 0
    codes = set(re.findall("\x1b\\[([0-9;?]*[A-Za-z])", terminal.text))
    assert codes <= {"H", "K", "J", "0m", "1m", "31m", "33m"}
    terminal.close()


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_no_color(schema: Schema, environ: dict[str, str]) -> None:
    """NO_COLOR is obeyed on a terminal, and one that is dumb gets plain text."""
    terminal = Terminal()
    terminal.resize(120, 30)
    done = await asyncio.to_thread(
        subprocess.run,
        [RIVERPY, "top", "--once", "--database-url", schema.url, "--schema", schema.name],
        env=environment(**environ),
        stdout=terminal.theirs,
        check=True,
    )
    assert done.returncode == 0
    assert "\x1b" not in await terminal.until("no worker")
    terminal.close()
