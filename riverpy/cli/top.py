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

from riverpy._postgres.driver import DATABASE_ERRORS, is_server_statement_timeout
from riverpy._tools.top.status import STATEMENT_TIMEOUT, OverallStatus, StatusReader
from riverpy._tools.top.view import no_answer_line, render_frame, status_lines
from riverpy.cli._options import database_options
from riverpy.cli._output import redirect_stdout_to_devnull, should_use_color
from riverpy.cli._run import error_to_one_line, run_async
from riverpy.cli._types import DURATION_TYPE
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.top.view import ScreenLine
    from riverpy.cli._options import DatabaseSettings

READ_INTERVAL_MIN = timedelta(milliseconds=100)
READ_PAUSE_FACTOR = 9.0
"""The pause after a read is at least this multiple of the duration of the read. So reads use at
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
    type=DURATION_TYPE,
    default="2s",
    show_default=True,
    help="Time between two reads, at least 100ms.",
)
@click.option("--once", is_flag=True, help="Print the table once, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each read.")
@database_options
def top(*, interval: timedelta, once: bool, as_json: bool, database: DatabaseSettings) -> None:
    """Watch queues, workers, rates, waiting times and the leader."""
    if interval < READ_INTERVAL_MIN:
        raise click.BadParameter("must be 100ms or more", param_hint="--interval")
    reader = StatusReader(database.require_url(), database.schema)
    screen = _StatusPrinter(as_json=as_json, once=once)
    try:
        run_async(_watch_status, reader, screen, interval.total_seconds())
    except KeyboardInterrupt:
        sys.exit(0)


class _StatusPrinter:
    """Prints the status on stdout. On a terminal, the new status replaces the previous one.
    Otherwise it is printed below the previous one."""

    def __init__(self, *, as_json: bool, once: bool) -> None:
        self._as_json, self.should_print_once = as_json, once
        is_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_updated_in_place = is_screen and not as_json and not once
        self._last_status: OverallStatus | None = None
        self._last_read_at = 0.0
        self._last_error: str | None = None
        self._is_first_print = True
        self.is_stdout_closed = False
        """Whether printing has failed because the program that reads stdout has ended."""

    def print_status(self, status: OverallStatus) -> None:
        self._last_status, self._last_read_at, self._last_error = status, time.monotonic(), None
        self._print_json_or_text(status, status_lines(status))

    def print_error(self, error: str) -> None:
        self._last_error = error
        line = no_answer_line(error, time.monotonic() - self._last_read_at)
        self._print_json_or_text({"at": datetime.now(UTC), "error": error}, [line])

    def _print_json_or_text(self, json_value: object, text_lines: Sequence[ScreenLine]) -> None:
        if self._as_json:
            self._write_to_stdout(f"{msgspec.json.encode(json_value).decode()}\n")
        elif self._is_updated_in_place:
            self._repaint_terminal()
        else:
            color = should_use_color(sys.stdout)
            text = "".join(f"{line.render(None, color=color)}\n" for line in text_lines)
            self._write_to_stdout(text if self._is_first_print else f"\n{text}")

    async def repaint_on_resize(self) -> None:
        """Wait for changes of the size of the terminal, and print the status again after each of
        them."""
        if self._is_updated_in_place and sys.platform != "win32":
            with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
                async for _ in changes:
                    self._repaint_terminal()

    def _repaint_terminal(self) -> None:
        if self._last_status is None:
            return
        width, height = shutil.get_terminal_size()
        before = "\n" * height if self._is_first_print else ""  # scroll older text off the screen
        age = time.monotonic() - self._last_read_at
        lines = status_lines(self._last_status, self._last_error, age, width=width)
        color = should_use_color(sys.stdout)
        self._write_to_stdout(before + render_frame(lines, width=width, height=height, color=color))

    def _write_to_stdout(self, text: str) -> None:
        self._is_first_print = False
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.is_stdout_closed = True
            redirect_stdout_to_devnull()


async def _watch_status(reader: StatusReader, printer: _StatusPrinter, interval: float) -> None:
    try:
        status = await reader.read()  # if the first read fails, the command ends
        printer.print_status(status)
        if printer.should_print_once:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(printer.repaint_on_resize)
            busy = status.took
            while not printer.is_stdout_closed:
                await anyio.sleep(max(interval, READ_PAUSE_FACTOR * busy))
                busy = await _read_and_print_status(reader, printer)
            tasks.cancel_scope.cancel()
    finally:
        await reader.close()


async def _read_and_print_status(reader: StatusReader, printer: _StatusPrinter) -> float:
    """Read and print the status. Return how many seconds the database needed for the read."""
    try:
        status = await reader.read()
    except (RiverError, *DATABASE_ERRORS) as error:
        printer.print_error(error_to_one_line(error))
        return STATEMENT_TIMEOUT.total_seconds() if is_server_statement_timeout(error) else 0.0
    printer.print_status(status)
    return status.took
