"""`riverpy top`: a live table of queues, workers, rates, waiting times and the leader."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio
import click
import msgspec

from riverpy._postgres.driver import DATABASE_ERRORS, is_statement_timeout
from riverpy._tools.top.status import STATEMENT_TIMEOUT, FleetStatus, StatusReader
from riverpy._tools.top.view import no_answer_line, render_frame, status_lines
from riverpy.cli._options import database_options
from riverpy.cli._output import drop_output, has_color
from riverpy.cli._run import describe, run
from riverpy.cli._types import DURATION
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.top.view import ScreenLine
    from riverpy.cli._options import DatabaseSettings

INTERVAL_MIN = timedelta(milliseconds=100)
PAUSE_FACTOR = 9.0
"""The minimum pause after a read, as a multiple of the time that the read took. So reads use at
most a tenth of the time."""

_EPILOG = """\b
Exit codes:
  0  ended by Ctrl-C, by a closed pipe, or after --once
  1  the first read failed: no database, or no River tables in it
  2  wrong usage or a wrong setting

On a terminal the table is updated in place. Elsewhere each table is printed below the last one.
Numbers of jobs end at 10k+. Rates are those of the last 10 seconds, and of at most the newest
10,000 jobs that ended. Each read is one read-only transaction on one connection. Its statements use
indexes and take at most 5 s. After a slow read, the next one starts later than --interval, so that
reads use at most a tenth of the time. During an outage the command shows the error and tries again.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--interval",
    type=DURATION,
    default="2s",
    show_default=True,
    help="Time between two reads, at least 100ms.",
)
@click.option("--once", is_flag=True, help="Print the table once, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each read.")
@database_options
def top(*, interval: timedelta, once: bool, as_json: bool, database: DatabaseSettings) -> None:
    """Watch queues, workers, rates, waiting times and the leader."""
    if interval < INTERVAL_MIN:
        raise click.BadParameter("must be 100ms or more", param_hint="--interval")
    reader = StatusReader(database.required_url(), database.schema)
    screen = _Screen(as_json=as_json, once=once)
    try:
        run(_watch_status, reader, screen, interval.total_seconds())
    except KeyboardInterrupt:
        sys.exit(0)


class _Screen:
    """Shows the status. On a terminal the status is updated in place. Elsewhere each status is
    printed below the last one."""

    def __init__(self, *, as_json: bool, once: bool) -> None:
        self._as_json, self.is_once = as_json, once
        is_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_live = is_screen and not as_json and not once
        self._status: FleetStatus | None = None
        self._read_at = 0.0
        self._error: str | None = None
        self._is_empty = True
        self.is_closed = False
        """Whether the reader of stdout has ended."""

    def show(self, status: FleetStatus) -> None:
        """Show a status."""
        self._status, self._read_at, self._error = status, time.monotonic(), None
        self._show(status, status_lines(status))

    def show_error(self, error: str) -> None:
        """Show the error of a failed read."""
        self._error = error
        line = no_answer_line(error, time.monotonic() - self._read_at)
        self._show({"at": datetime.now(UTC), "error": error}, [line])

    def _show(self, value: object, lines: Sequence[ScreenLine]) -> None:
        if self._as_json:
            self._write(f"{msgspec.json.encode(value).decode()}\n")
        elif self._is_live:
            self._repaint()
        else:
            color = has_color(sys.stdout)
            text = "".join(f"{line.render(None, color=color)}\n" for line in lines)
            self._write(text if self._is_empty else f"\n{text}")

    async def follow_size(self) -> None:
        """Print the status again when the size of the terminal changes."""
        if self._is_live and sys.platform != "win32":
            with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
                async for _ in changes:
                    self._repaint()

    def _repaint(self) -> None:
        if self._status is None:
            return
        width, height = shutil.get_terminal_size()
        before = "\n" * height if self._is_empty else ""  # this scrolls older text off the screen
        age = time.monotonic() - self._read_at
        lines = status_lines(self._status, self._error, age, width=width)
        color = has_color(sys.stdout)
        self._write(before + render_frame(lines, width=width, height=height, color=color))

    def _write(self, text: str) -> None:
        self._is_empty = False
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.is_closed = True
            drop_output()


async def _watch_status(reader: StatusReader, screen: _Screen, interval: float) -> None:
    try:
        status = await reader.read()  # an error of the first read ends the command
        screen.show(status)
        if screen.is_once:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(screen.follow_size)
            busy = status.took
            while not screen.is_closed:
                await anyio.sleep(max(interval, PAUSE_FACTOR * busy))
                busy = await _read_again(reader, screen)
            tasks.cancel_scope.cancel()
    finally:
        await reader.close()


async def _read_again(reader: StatusReader, screen: _Screen) -> float:
    """Read and show the status. Return the seconds that the database needed."""
    try:
        status = await reader.read()
    except (RiverError, *DATABASE_ERRORS) as error:
        screen.show_error(describe(error))
        return STATEMENT_TIMEOUT.total_seconds() if is_statement_timeout(error) else 0.0
    screen.show(status)
    return status.took
