"""`riverpy demo`: run example jobs, without a database to set up."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from riverpy._dsn import mask_passwords
from riverpy._tools.demo.files import FileScan
from riverpy._tools.demo.run import MAX_WORKERS, DemoRun
from riverpy._tools.health.http import Address
from riverpy._version import VERSION
from riverpy.cli._dashboard_server import (
    DASHBOARD_POOL_SIZE,
    DASHBOARD_PORT_DEFAULT,
    DashboardServer,
    is_port_free,
    require_web_packages,
)
from riverpy.cli._embedded import start_embedded_server
from riverpy.cli._logging import configure_logging
from riverpy.cli._options import database_options
from riverpy.cli._output import find_riverpy_command, print_json, print_note, print_table
from riverpy.cli._run import EXIT_FAILURE, run_async
from riverpy.cli._types import IntegerType
from riverpy.client import Client
from riverpy.config import Config
from riverpy.events import EventKind

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from riverpy._tools.demo.run import DemoResult
    from riverpy.cli._options import DatabaseSettings
    from riverpy.events import Event

EMBEDDED_SERVER_NAME = "demo"
"""The name of the embedded server that runs the demo if no database is given."""
PRINTED_PROBLEMS_MAX = 10
_WORD_BY_EVENT_KIND = {
    EventKind.JOB_COMPLETED: "completed",
    EventKind.JOB_FAILED: "failed attempts",
    EventKind.JOB_SNOOZED: "snoozed",
    EventKind.JOB_CANCELLED: "cancelled",
}

_EPILOG = """\b
Exit codes:
  0    every job ended as expected, which was checked in SQL
  1    a job did not end as expected, or the database failed
  2    wrong usage: no such directory, no file in it, --jobs below 1
  130  interrupted by Ctrl-C or SIGTERM; running jobs were released

Each run creates a schema, riverpy_demo_<8 hex digits>. It is kept until the next run, so that you
can look at its jobs. --schema names another schema, which must exist and contain no jobs.

On a terminal the command serves the dashboard at the end, and prints its address. Ctrl-C ends it.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="PATH",
    help="Compress the files below this directory. Default: Python's standard library.",
)
@click.option(
    "--jobs",
    "limit",
    type=IntegerType(min=1),
    metavar="N",
    help="Insert at most N jobs. Default: one for each file, and nine of other kinds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option(
    "--web/--no-web",
    default=None,
    help="Serve the dashboard at the end, until Ctrl-C. Default: only on a terminal, without "
    "--json, and if the variable CI is not set.",
)
@database_options
def demo(
    *,
    directory: Path | None,
    limit: int | None,
    as_json: bool,
    web: bool | None,
    database: DatabaseSettings,
) -> None:
    """Run example jobs on your files, without a database to set up.

    For each file, one job hashes and compresses the file. Other jobs fail once and then succeed,
    are snoozed, cancel themselves, are cancelled while they run, or are inserted twice and must
    exist once. At the end the results are checked in SQL.

    Without a database URL the command starts an embedded PostgreSQL, and stops it at the end.
    On a terminal it then serves the dashboard of these jobs until Ctrl-C.
    """
    if web:
        require_web_packages("riverpy demo --web")
    configure_logging("console", "error")  # some jobs fail on purpose: log only errors
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    files = FileScan(directory, limit)
    for problem in files.problems[:PRINTED_PROBLEMS_MAX]:
        print_note(f"skipped {problem}")
    if not files.paths:
        raise click.BadParameter(
            f"there is no file to read below {files.directory}", param_hint="--dir"
        )
    with ExitStack() as stack:
        url = (
            database.url
            or start_embedded_server(stack, EMBEDDED_SERVER_NAME, f"riverpy {VERSION}").url
        )
        result = run_async(_run_demo, url, database.schema, files, limit)
        for reason in result.read_errors[:PRINTED_PROBLEMS_MAX]:
            print_note(f"skipped {reason}")
        if as_json:
            _print_result_json(result)
        else:
            count = len(files.problems) + len(result.read_errors)
            _print_result_tables(result, unread_count=count)
            shown_url = None if database.url is None else mask_passwords(database.url)
            _print_next_commands(result, shown_url)
        _print_problems(result)
        if web or (web is None and not as_json and _should_serve_dashboard()):
            _serve_dashboard(url, result.schema)
    sys.exit(0 if result.is_ok else EXIT_FAILURE)


async def _run_demo(url: str, schema: str | None, files: FileScan, limit: int | None) -> DemoResult:
    progress = _ProgressPrinter()
    demo_run = DemoRun(url, schema, files, limit, progress.count_event)
    title = (
        f"working {demo_run.job_count:,} jobs in schema {demo_run.schema}, {MAX_WORKERS} at a time"
    )
    try:
        return await demo_run.run(lambda: print_note(title))
    finally:
        progress.print_final_counts()


def _should_serve_dashboard() -> bool:
    """Return whether to serve the dashboard by default: the command runs on a terminal, not in CI,
    and the packages of the dashboard are installed."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    return is_terminal and all(find_spec(name) for name in ("jinja2", "starlette", "uvicorn"))


def _serve_dashboard(url: str, schema: str) -> None:
    """Serve the dashboard with the jobs of the demo until a signal arrives."""
    from riverpy.web import dashboard

    async def open_client(stack: AsyncExitStack) -> Client:
        config = Config(schema=schema, pool_size=DASHBOARD_POOL_SIZE)
        return await stack.enter_async_context(Client(url, config=config))

    def print_address(address: Address) -> None:
        print_note(f"\nThe dashboard shows the jobs: http://{address}/ (Ctrl-C ends the demo)")

    address = Address("127.0.0.1", DASHBOARD_PORT_DEFAULT)
    if not is_port_free(address):
        address = address._replace(port=0)  # any free port
    run_async(DashboardServer(address, dashboard).serve, open_client, print_address)


class _ProgressPrinter:
    """Prints the number of events of each kind on stderr. On a terminal, it always updates the same
    line."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_terminal = sys.stderr.isatty()
        self._print_interval = 0.1 if self._is_terminal else 1.0
        self._last_print_at = time.monotonic()

    def count_event(self, event: Event) -> None:
        self._counts[event.kind] += 1
        if time.monotonic() - self._last_print_at >= self._print_interval:
            self._print_counts()

    def print_final_counts(self) -> None:
        """Print the final numbers, if any events were counted."""
        if self._counts:
            self._print_counts()
        if self._counts and self._is_terminal:
            click.echo(err=True)

    def _print_counts(self) -> None:
        self._last_print_at = time.monotonic()
        text = ", ".join(
            f"{self._counts[kind]:,} {word}" for kind, word in _WORD_BY_EVENT_KIND.items()
        )
        if self._is_terminal:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        else:
            print_note(text)


def _print_result_json(result: DemoResult) -> None:
    seconds = result.duration.total_seconds()
    print_json(
        {
            "jobs": result.job_count,
            "states": result.job_count_by_state,
            "duration_s": round(seconds, 3),
            "work_per_s": round(result.job_count / seconds, 1),
            "ok": result.is_ok,
        }
    )


def _print_result_tables(result: DemoResult, *, unread_count: int) -> None:
    print_table(
        ("KIND", "STATE", "JOBS", "ATTEMPTS", "WAIT P50 MS", "P95", "RUN P50 MS", "P95"),
        [tuple(row)[:8] for row in result.summary_rows],
    )
    jobs, seconds = result.job_count, result.duration.total_seconds()
    click.echo(f"\n{jobs:,} jobs in {seconds:.1f} s: {jobs / seconds:,.0f} a second")
    bytes_in, bytes_out = (
        sum(row[size] for row in result.summary_rows) for size in ("bytes_in", "bytes_out")
    )
    share = f", {100 * bytes_out / bytes_in:.0f} % of it after compression" if bytes_in else ""
    click.echo(f"{bytes_in / 2**10:,.0f} KiB read and hashed{share}")
    if unread_count:
        click.echo(f"Files and directories that could not be read: {unread_count:,}")
    for check, problems in result.problems_by_check.items():
        click.echo(f"{'FAIL' if problems else 'ok  '}  {check}")


def _print_next_commands(result: DemoResult, url: str | None) -> None:
    riverpy = find_riverpy_command()
    database = (
        f'"$({riverpy} db start {EMBEDDED_SERVER_NAME})"' if url is None else shlex.quote(url)
    )
    options = f"--database-url {database} --schema {result.schema}"
    click.echo("\nLook at the jobs, which the next demo deletes:")
    click.echo(f"  {riverpy} web {options}")
    click.echo(f"  {riverpy} job list {options}")
    click.echo(f"  {riverpy} job list --state cancelled {options}")
    if url is None:
        click.echo(f"  {riverpy} db psql {EMBEDDED_SERVER_NAME}")


def _print_problems(result: DemoResult) -> None:
    for problems in result.problems_by_check.values():
        for problem in problems[:PRINTED_PROBLEMS_MAX]:
            print_note(f"riverpy: {problem}")
        if (more := len(problems) - PRINTED_PROBLEMS_MAX) > 0:
            print_note(f"riverpy: and {more:,} more")
