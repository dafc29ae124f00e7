"""`riverpy top`: a live table of queues, workers, rates, waits and the leader."""

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
from riverpy._tools.top.view import frame, no_answer, scroll, view
from riverpy.cli._options import database_options
from riverpy.cli._output import drop_output, has_color
from riverpy.cli._run import describe, run
from riverpy.cli._types import DURATION
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.top.view import Line
    from riverpy.cli._options import DatabaseSettings

INTERVAL_LEAST = timedelta(milliseconds=100)
REST = 9.0
"""The rest after a look is at least so many times as long as the look was, so that the database is
busy with us for a tenth of the time at most."""

_EPILOG = """\b
Exit codes:
  0  ended by Ctrl-C, by a closed pipe, or after --once
  1  the first look failed: no database, or no River tables in it
  2  wrong usage or a wrong setting

On a terminal the table is painted over; elsewhere looks are printed one below the other. Numbers
of jobs stop at 10k+. Rates are of the last 10 seconds, and of the newest 10,000 jobs that ended.
Each look is one read-only transaction over one connection, of statements of at most 5 s that follow
indexes. After one that took long the next comes later than --interval says: top keeps the database
busy for at most a tenth of the time. An outage is shown, and survived.
"""


class Unanswered(msgspec.Struct, frozen=True):
    """A look that failed, as `--json` prints it."""

    at: datetime
    error: str


@click.command(epilog=_EPILOG)
@click.option(
    "--interval",
    type=DURATION,
    default="2s",
    show_default=True,
    help="Time from one look to the next; at least 100ms.",
)
@click.option("--once", is_flag=True, help="FleetStatus once, print it, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each look.")
@database_options
def top(*, interval: timedelta, once: bool, as_json: bool, database: DatabaseSettings) -> None:
    """Show queues, workers, rates, waits and the leader, again and again."""
    if interval < INTERVAL_LEAST:
        raise click.BadParameter("must be 100ms or more", param_hint="--interval")
    reader = StatusReader(database.required_url(), database.schema)
    screen = _Screen(as_json=as_json, once=once)
    try:
        run(_watch, reader, screen, interval.total_seconds())
    except KeyboardInterrupt:
        sys.exit(0)


class _Screen:
    """Where looks are shown: painted over on a terminal, one below the other elsewhere."""

    def __init__(self, *, as_json: bool, once: bool) -> None:
        self._as_json, self.is_once = as_json, once
        is_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_live = is_screen and not as_json and not once
        self._look: FleetStatus | None = None
        self._seen_at = 0.0
        self._error: str | None = None
        self._is_empty = True
        self.is_closed = False
        """Whether the reader has gone."""

    def show(self, look: FleetStatus) -> None:
        """A look succeeded."""
        self._look, self._seen_at, self._error = look, time.monotonic(), None
        if self._as_json:
            self._write(_json_line(look))
        elif self._is_live:
            self._paint()
        else:
            self._print(view(look))

    def show_error(self, error: str) -> None:
        """A look failed."""
        self._error = error
        if self._as_json:
            self._write(_json_line(Unanswered(datetime.now(UTC), error)))
        elif self._is_live:
            self._paint()
        else:
            self._print([no_answer(error, time.monotonic() - self._seen_at)])

    async def follow_size(self) -> None:
        """Paint anew whenever the terminal changes its size."""
        if self._is_live and sys.platform != "win32":
            with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
                async for _ in changes:
                    self._paint()

    def _paint(self) -> None:
        if self._look is None:
            return
        width, height = shutil.get_terminal_size()
        before = scroll(height) if self._is_empty else ""
        age = time.monotonic() - self._seen_at
        lines = view(self._look, self._error, age, width=width)
        color = has_color(sys.stdout)
        self._write(before + frame(lines, width=width, height=height, color=color))

    def _print(self, lines: Sequence[Line]) -> None:
        color = has_color(sys.stdout)
        drawn = "".join(f"{line.rendered(None, color=color)}\n" for line in lines)
        self._write(drawn if self._is_empty else f"\n{drawn}")

    def _write(self, text: str) -> None:
        self._is_empty = False
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.is_closed = True
            drop_output()


async def _watch(reader: StatusReader, screen: _Screen, interval: float) -> None:
    try:
        look = await reader.read()  # one that fails ends the command
        screen.show(look)
        if screen.is_once:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(screen.follow_size)
            busy = look.took
            while not screen.is_closed:
                await anyio.sleep(max(interval, REST * busy))
                busy = await _read_again(reader, screen)
            tasks.cancel_scope.cancel()
    finally:
        await reader.close()


async def _read_again(reader: StatusReader, screen: _Screen) -> float:
    """Returns for how many seconds the database was busy with it."""
    try:
        look = await reader.read()
    except (RiverError, *DATABASE_ERRORS) as error:
        screen.show_error(describe(error))
        return STATEMENT_TIMEOUT.total_seconds() if is_statement_timeout(error) else 0.0
    screen.show(look)
    return look.took


def _json_line(value: FleetStatus | Unanswered) -> str:
    return f"{msgspec.json.encode(value).decode()}\n"
