"""`riverpy dev`: run a worker for development, with a database and, with --reload, restarts."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from riverpy._dsn import url_for_display
from riverpy._duration import format_duration
from riverpy._tools.dev.supervisor import DevSupervisor
from riverpy._tools.health.http import Address
from riverpy.cli import _settings
from riverpy.cli._dashboard_server import (
    DASHBOARD_PORT_DEFAULT,
    open_listening_socket,
    require_web_packages,
)
from riverpy.cli._embedded import make_dev_server_name, start_embedded_server
from riverpy.cli._options import database_options
from riverpy.cli._output import print_note
from riverpy.cli._run import EXIT_USAGE_ERROR, CommandError, run_async
from riverpy.cli._settings import SettingSources
from riverpy.cli._types import IntegerType
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from riverpy.cli._options import DatabaseSettings

SOFT_STOP_TIMEOUT_DEFAULT = timedelta(seconds=5)
"""The default soft stop timeout. It is shorter than that of `riverpy worker`, because a developer
has to wait at each restart."""
WORKER_KILL_DELAY = HARD_STOP_TIMEOUT_DEFAULT.total_seconds() + 5.0
"""If the worker is still running this many seconds after the soft stop timeout, it is killed."""

_EPILOG = """\b
Exit codes: those of `riverpy worker`; 128 + n if the worker was killed by signal n.

Without a database URL the jobs are in an embedded PostgreSQL that belongs to the current directory.
Its data is kept. While it runs, other commands in this directory, such as `riverpy insert` and
`riverpy top`, use it if no URL is configured. The tables of River and riverpy are created or
updated, also in a database of your own.

With --reload, a change of pyproject.toml, riverpy.toml or a .py file below the current directory
restarts the worker. If the code cannot be loaded, the command waits for the next change.

With --web, the command prints the address of the dashboard, which only this machine can use. A
restart of the worker does not restart the dashboard.

Ctrl-C or SIGTERM stops the worker, and running jobs may finish. A second Ctrl-C or SIGTERM cancels
them, and the command ends within 2 s. Options after -- are those of `riverpy worker`.
"""


@click.command(epilog=_EPILOG)
@click.argument("target", metavar="MODULE:ATTR")
@click.argument("worker_options", metavar="[-- WORKER-OPTION...]", nargs=-1)
@click.option("--reload", is_flag=True, help="Restart the worker when code changes.")
@click.option("--web", is_flag=True, help="Also serve the dashboard, as `riverpy web` does.")
@click.option(
    "--web-port",
    type=IntegerType(0, 65535),
    help="Port of the dashboard; 0: any free port. Implies --web. Default: "
    f"{DASHBOARD_PORT_DEFAULT}.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Address of the worker's health server, as for `riverpy worker`.",
)
@_settings.SOFT_STOP.click_option(
    help="How long running jobs may continue after a stop or a change. Default: 5s."
)
@_settings.LOG_LEVEL.click_option(
    help="Lowest level that is logged. Default: debug, which logs each job."
)
@database_options
def dev(
    *,
    target: str,
    worker_options: tuple[str, ...],
    reload: bool,
    web: bool,
    web_port: int | None,
    health: str | None,
    soft_stop: timedelta | None,
    log_level: str | None,
    database: DatabaseSettings,
) -> None:
    """Run a worker for development, with a database. With --reload, restart it when code changes.

    MODULE:ATTR is the same as for `riverpy worker`.
    """
    if sys.platform == "win32":
        raise CommandError("riverpy dev runs on Linux and macOS")
    _check_options(worker_options, reload=reload)
    if web or web_port is not None:
        web_port = _choose_dashboard_port(web_port)
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    sources = SettingSources()
    stop = sources.find_value(_settings.SOFT_STOP, soft_stop).or_none() or SOFT_STOP_TIMEOUT_DEFAULT
    level = sources.find_value(_settings.LOG_LEVEL, log_level).or_none() or "debug"
    arguments = ["worker", target, "--soft-stop", format_duration(stop), "--log-level", level]
    # The option overrides a value of `processes` in the environment or in the settings file.
    arguments += ["--processes", "1"]
    if database.schema is not None:
        arguments += ["--schema", database.schema]
    if health is not None:
        arguments += ["--health", health]
    web_arguments = None if web_port is None else ["web", "--port", str(web_port)]
    if web_arguments is not None and database.schema is not None:
        web_arguments += ["--schema", database.schema]
    with ExitStack() as stack:
        url = database.url or _start_dev_server(stack)
        if database.url is not None:
            print_note(
                f"riverpy dev: using {url_for_display(url)} from {database.url_source}, "
                "not an embedded database of this directory"
            )
        run_async(_migrate_all_and_print, url, database.schema)
        if reload:
            print_note(f"riverpy dev: restarts when code below {Path.cwd()} changes")
        supervisor = DevSupervisor(
            [*arguments, *worker_options],
            web_arguments,
            {**os.environ, _settings.DATABASE_URL.environment_variable: url},
            directory=Path.cwd() if reload else None,
            stop_timeout=stop.total_seconds() + WORKER_KILL_DELAY,
            print_note=print_note,
        )
        code = run_async(supervisor.run)
    sys.exit(code)


def _check_options(worker_options: tuple[str, ...], *, reload: bool) -> None:
    if worker_options and not worker_options[0].startswith("-"):
        raise click.UsageError(f"unexpected argument {worker_options[0]!r}")
    if any(option.partition("=")[0] == "--processes" for option in worker_options):
        raise click.UsageError("riverpy dev runs one worker process, so it takes no --processes")
    if reload and find_spec("watchfiles") is None:
        raise CommandError(
            "--reload needs the package watchfiles: pip install 'riverpy-queue[dev]'",
            exit_code=EXIT_USAGE_ERROR,
        )


def _choose_dashboard_port(port: int | None) -> int:
    """Return the port for the dashboard, by default DASHBOARD_PORT_DEFAULT. Raise CommandError if
    another process uses this port."""
    require_web_packages("riverpy dev --web")
    port = DASHBOARD_PORT_DEFAULT if port is None else port
    open_listening_socket(Address("127.0.0.1", port), option="--web-port").close()
    return port


def _start_dev_server(stack: ExitStack) -> str:
    server = start_embedded_server(stack, make_dev_server_name(Path.cwd()), "riverpy dev")
    # The worker inherits the lock that keeps the server running. If this process is killed, the
    # server runs until the worker has ended, so the worker can still release its jobs.
    server.pass_on()
    return server.url


async def _migrate_all_and_print(url: str, schema: str | None) -> None:
    for result in await migrate_all(url, schema=schema):
        if result.steps:
            print_note(f"riverpy dev: migrated line {result.line} to {result.steps[-1].version}")
