"""`riverpy worker`: run a client in its own process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import anyio
import click
import msgspec
from msgspec import UNSET

from riverpy._clock import Backoff
from riverpy._dsn import mask_passwords
from riverpy._duration import format_duration
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    FIRST_DATABASE_CONNECTION_FAILED,
    WORKER_CANCELLED,
    WORKER_STARTED,
    WORKER_STOPPED,
    WORKER_STOPPED_WITH_ABANDONED_JOBS,
)
from riverpy._main_import import disable_main_module_import
from riverpy._postgres.connection import require_writable
from riverpy._postgres.driver import CONNECT_TIMEOUT, DATABASE_ERRORS, close_connection, connect
from riverpy._postgres.passwords import make_password_source
from riverpy._tools.bench.process_cost import reduce_garbage_collection
from riverpy._tools.health.systemd import SystemdNotifier
from riverpy._version import VERSION
from riverpy.cli import _settings
from riverpy.cli._leader_options import (
    GroupedOptionsCommand,
    check_leader_settings,
    find_setting_values,
    leader_options,
)
from riverpy.cli._logging import configure_logging
from riverpy.cli._options import DATABASE_HINT, database_options
from riverpy.cli._output import print_table
from riverpy.cli._run import (
    EXIT_FAILURE,
    EXIT_LIMIT_REACHED,
    EXIT_NOT_READY,
    EXIT_UNCLEAN_STOP,
    IS_PROCESS_KEPT_KEY,
    CommandError,
    close_asyncio_runner,
    error_to_one_line,
    get_debug_flag,
    make_asyncio_runner,
    print_click_error,
    run_until_complete,
    translate_to_command_errors,
)
from riverpy.cli._settings import SettingsError, SettingSources, SettingValue, ValueBySetting
from riverpy.cli._signals import (
    StoppedBeforeStartError,
    StopPlan,
    StopSignalHandler,
    exit_process,
    raise_on_stop_signals,
)
from riverpy.cli._supervision import get_supervisor_connection
from riverpy.cli._target import load_client_target, open_client
from riverpy.cli._types import format_queues, parse_queues
from riverpy.cli._worker_limits import WorkerLimits
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT, QueueConfig
from riverpy.errors import SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._tools.health.http import Address
    from riverpy._tools.health.server import ConnectionListener
    from riverpy._tools.health.worker_health import HealthRequestHandler
    from riverpy._work.stop import StopReport
    from riverpy.cli._log_stream import LogStream
    from riverpy.cli._options import DatabaseSettings
    from riverpy.cli._target import ClientTarget
    from riverpy.client import Client
    from riverpy.worker import RegisteredWorker

FIRST_CONNECTION_TIMEOUT = 10.0
"""The maximum number of seconds that a worker waits at its start until the database accepts
writes."""
PROCESS_EXIT_TIMEOUT = 3.0
"""The maximum number of seconds from the end of the client's run until the process has ended."""
_SERVER_NOT_READY_SQLSTATES = frozenset({"57P03", "53300", "55000"})
"""The SQLSTATEs of a server that is starting or stopping, or that has too many connections."""

_EPILOG = """\b
Exit codes:
  0  stopped, and every result was stored
  1  a failure, or C code that could not be stopped
  2  wrong usage or a wrong setting
  3  not ready: no database within 10 s, or no River tables in it
  4  stopped, but jobs, maintenance or singletons were abandoned, or results could not be stored
  10 stopped because --max-jobs, --max-age or --max-rss was reached, and every result was stored

At SIGTERM or SIGINT the worker claims no more jobs, and running jobs may finish. After --soft-stop,
or at a second signal, the worker cancels them. A third signal ends the process at once, with exit
code 128 + its number. Threads and tasks that your code leaves running delay the end by at most 3 s.

If you use --max-jobs, --max-age or --max-rss, let the service manager start a new process after
exit code 10. Each process chooses its limits at random, at most 10 % below or above the given ones,
so that workers do not restart together. During this stop a first signal changes nothing, and a
second signal cancels running jobs.

With --processes one supervisor starts several workers. It replaces a worker that ends: at once
after exit code 10, otherwise after 0.5 s to 30 s. Signals to the supervisor stop all workers. If
the first worker fails at its start, the command ends with its exit code. Later the exit code is 0,
or 4 if a worker did not stop cleanly. A third signal kills all workers, and the exit code is 128 +
its number (130 for SIGINT, 143 for SIGTERM). --health answers for all workers. Each worker has
limits of its own.
"""


def _parse_queues(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> dict[str, int] | None:
    try:
        return parse_queues(",".join(values)) if values else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(epilog=_EPILOG, cls=GroupedOptionsCommand)
@click.argument("target", metavar="MODULE:ATTR")
@_settings.QUEUES.click_option("-q", multiple=True, type=click.STRING, callback=_parse_queues)
@database_options
@_settings.POLL_ONLY.click_option()
@_settings.KNOWN_KINDS_ONLY.click_option()
@_settings.SOFT_STOP.click_option()
@_settings.MAX_PROCESSES.click_option()
@_settings.PROCESSES.click_option()
@_settings.MAX_JOBS.click_option()
@_settings.MAX_AGE.click_option()
@_settings.MAX_RSS.click_option()
@_settings.NAME.click_option()
@_settings.HEALTH.click_option()
@click.option("--drain", is_flag=True, help="Stop when the queues have no more jobs to work.")
@_settings.LOG.click_option()
@_settings.LOG_LEVEL.click_option()
@leader_options
@click.option("--print-config", is_flag=True, help="Print each setting and its source, and exit.")
def worker(
    target: str,
    *,
    database: DatabaseSettings,
    drain: bool,
    print_config: bool,
    **flags: object,
) -> None:
    """Work jobs until the process is stopped.

    MODULE:ATTR names a riverpy.Client, a function without arguments that returns one, or an async
    context manager that yields one. Without :ATTR, the names `client`, `app` and `riverpy` are
    tried. The current directory is on Python's path.
    """
    settings = find_setting_values(
        SettingSources(),
        {
            _settings.DATABASE_URL: SettingValue(database.url or UNSET, database.url_source),
            _settings.SCHEMA: SettingValue(database.schema or UNSET, database.schema_source),
        },
        {**flags, _settings.DEBUG.parameter_name: get_debug_flag()},
    )
    if print_config:
        rows = [
            (
                setting.name,
                setting.default if value.value is UNSET else setting.format_value(value.value),
                value.source,
            )
            for setting, value in settings.items()
        ]
        print_table(("SETTING", "VALUE", "SOURCE"), rows)
        return
    supervisor = get_supervisor_connection()
    stream = configure_logging(
        settings[_settings.LOG].or_none() or "console",
        settings[_settings.LOG_LEVEL].or_none() or "info",
        process_number=None if supervisor is None else supervisor.number,
    )
    disable_main_module_import()
    process_count = settings[_settings.PROCESSES].or_none() or 1
    with raise_on_stop_signals():
        try:
            if process_count > 1 and supervisor is None:
                from riverpy.cli._processes import run_worker_processes

                health = settings[_settings.HEALTH].or_none()
                code = run_worker_processes(
                    process_count, stream, health=health, should_drain=drain
                )
            else:
                loaded = load_client_target(target)
                code = _ClientRunner(settings, stream, drain=drain).run(loaded)
        except StoppedBeforeStartError:
            code = 0
    sys.exit(code)


class _ClientRunner:
    """Runs the client in this process until it stops."""

    def __init__(self, settings: ValueBySetting, stream: LogStream, *, drain: bool) -> None:
        self._settings = settings
        self._log_stream = stream
        self._should_drain = drain
        self._log = get_logger()
        self._asyncio_runner = make_asyncio_runner()
        self._loop = self._asyncio_runner.get_loop()
        self._start_cancel_scope: anyio.CancelScope | None = None
        self._has_client_started = False
        self._abandoned_claims: tuple[ClaimKey, ...] = ()
        self._limits = WorkerLimits(
            settings[_settings.MAX_JOBS],
            settings[_settings.MAX_AGE],
            settings[_settings.MAX_RSS],
        )
        self._supervisor_connection = get_supervisor_connection()
        self._is_process_kept = bool(
            click.get_current_context().find_root().meta.get(IS_PROCESS_KEPT_KEY)
        )
        health_source = (
            self._supervisor_connection.health_listener
            if self._supervisor_connection is not None
            else settings[_settings.HEALTH].or_none()
        )
        self._health_server = None if health_source is None else _make_health_server(health_source)
        self._systemd = SystemdNotifier(os.environ)
        self._client: Client | None = None
        self._signal_handler = StopSignalHandler(
            StopPlan(
                soft_stop=self._cancel_start,
                hard_stop=self._cancel_start,
                soft_stop_timeout=timedelta(0),
                hard_stop_timeout=HARD_STOP_TIMEOUT_DEFAULT,
                force_exit=partial(
                    exit_process,
                    EXIT_UNCLEAN_STOP,
                    "riverpy: the start could not be stopped in time",
                ),
            ),
            self._loop,
        )

    def run(self, target: ClientTarget) -> int:
        """Run the client of the target until it stops, and return the exit code. After that,
        threads and tasks of the user's code can delay the end of the process by at most
        `PROCESS_EXIT_TIMEOUT`."""
        self._log_stream.on_reader_ended = self._signal_handler.request_soft_stop
        if self._supervisor_connection is not None:
            self._supervisor_connection.soft_stop = self._signal_handler.request_uncounted_soft_stop
            self._supervisor_connection.hard_stop = self._signal_handler.request_hard_stop
        self._signal_handler.start()
        code = EXIT_FAILURE
        try:
            with translate_to_command_errors():
                main = self._serve_health_and_work(target)
                code = run_until_complete(main, self._loop, self._signal_handler.install_wakeup_fd)
        except click.ClickException as error:
            code = print_click_error(error)
        except asyncio.CancelledError:  # only the user's code can cancel this task
            self._log.error(WORKER_CANCELLED, effect="the worker stops")
        except Exception as error:
            # Print the error now: threads of the user's code may delay the end of the process.
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            if not self._is_process_kept:
                self._signal_handler.exit_within(code, PROCESS_EXIT_TIMEOUT)
        close_asyncio_runner(self._asyncio_runner)
        if self._is_process_kept:
            self._signal_handler.close()
        return code

    async def _serve_health_and_work(self, target: ClientTarget) -> int:
        with anyio.CancelScope() as self._start_cancel_scope:
            async with (
                self._health_server.server.serve() if self._health_server else nullcontext(),
                self._systemd.run_watchdog_pings(self._is_alive),
            ):
                return await self._open_and_run_client(target)
        return 0

    def _is_alive(self) -> bool:
        from riverpy._tools.health.probes import check_liveness  # for systemd's watchdog only

        return self._client is None or check_liveness(self._client.stats()).ok

    def _cancel_start(self) -> None:
        if self._start_cancel_scope is None:
            self._loop.call_soon(self._cancel_start)  # try again in the next event loop step
        else:
            self._start_cancel_scope.cancel()

    async def _open_and_run_client(self, target: ClientTarget) -> int:
        async with open_client(target) as client:
            self._configure_client(client)
            self._limits.check_memory_before_start()
            self._client = client
            if self._health_server is not None:
                self._health_server.client = client
            await _wait_for_writable_database(client)
            self._signal_handler.set_stop_plan(
                StopPlan(
                    soft_stop=self._stop_client,
                    hard_stop=client.stop_and_cancel,
                    soft_stop_timeout=client.config.soft_stop_timeout,
                    hard_stop_timeout=client.config.hard_stop_timeout,
                    force_exit=lambda: self._exit_from_blocked_loop(client),
                )
            )
            async with self._limits.watch(client, self._signal_handler.request_uncounted_soft_stop):
                report = await self._run_client(client)
            self._abandoned_claims = report.abandoned
        if report.abandoned:
            await self._exit_after_abandoned_jobs(client, report)
        self._log.info(WORKER_STOPPED, unstored=report.unstored)
        if not report.is_clean:
            return EXIT_UNCLEAN_STOP
        return EXIT_LIMIT_REACHED if self._limits.is_reached else 0

    def _stop_client(self) -> None:
        self._systemd.notify(STOPPING=1, STATUS="waiting for running jobs")
        if self._client is not None:
            self._client.stop()

    def _configure_client(self, client: Client) -> None:
        """Set the command's settings in the client. Raise SettingsError if neither the command nor
        the client has a database, or if settings of leader election are wrong together."""
        settings = self._settings
        if settings[_settings.DATABASE_URL].value is UNSET and client.database_url is None:
            raise SettingsError(
                f'no database is given: write Client("postgres://…"), or {DATABASE_HINT}'
            )
        check_leader_settings(client.config, settings)
        slots = settings[_settings.QUEUES].value
        client.configure(
            database=settings[_settings.DATABASE_URL].value,
            schema=settings[_settings.SCHEMA].value,
            name=settings[_settings.NAME].value,
            poll_only=settings[_settings.POLL_ONLY].value,
            known_kinds_only=settings[_settings.KNOWN_KINDS_ONLY].value,
            soft_stop_timeout=settings[_settings.SOFT_STOP].value,
            max_processes=settings[_settings.MAX_PROCESSES].value,
            candidate=settings[_settings.CANDIDATE].value,
            leader_domain=settings[_settings.LEADER_DOMAIN].value,
            domain_queues=settings[_settings.DOMAIN_QUEUES].value,
            on_domain_conflict=settings[_settings.ON_DOMAIN_CONFLICT].value,
            elect_interval=settings[_settings.ELECT_INTERVAL].value,
            leader_ttl=settings[_settings.LEADER_TTL].value,
            max_leases=settings[_settings.MAX_LEASES].value,
            spread_leases=settings[_settings.SPREAD_LEASES].value,
            dead_after=settings[_settings.DEAD_AFTER].value,
            queues=slots
            if slots is UNSET
            else {
                name: msgspec.structs.replace(
                    client.queues.get(name, QueueConfig()), max_workers=number
                )
                for name, number in slots.items()
            },
        )

    async def _run_client(self, client: Client) -> StopReport:
        try:
            return await client.run(drain=self._should_drain, task_status=self)
        except (SchemaMissingError, *DATABASE_ERRORS) as error:
            if self._has_client_started:
                raise
            raise CommandError(error_to_one_line(error), exit_code=EXIT_NOT_READY) from error

    def started(self, value: None = None) -> None:
        """Log that the worker has started, and notify systemd. The client calls this method when it
        has started to work: this object is the `task_status` of `Client.run`."""
        client = self._client
        assert client is not None  # noqa: S101 (set before the start)
        self._has_client_started = True
        config = client.config
        self._log.info(
            WORKER_STARTED,
            version=VERSION,
            client_id=client.id,
            database=mask_passwords(client.database_url or ""),
            schema=config.schema or "(search path)",
            queues=format_queues({name: q.max_workers for name, q in client.queues.items()}),
            kinds={
                unit.kind: _describe_timeout_and_attempts(unit, client)
                for unit in client.workers.list_registered_workers()
            }
            if client.workers
            else {},
            known_kinds_only=config.known_kinds_only,
            poll_only=config.poll_only,
            pooler=config.pooler,
            listen_url=mask_passwords(config.listen_url or "") or None,
            candidate=config.candidate,
            leader_domain=config.domain,
        )
        self._systemd.notify(READY=1, STATUS=f"working {', '.join(client.queues)}")
        reduce_garbage_collection()

    async def _exit_after_abandoned_jobs(self, client: Client, report: StopReport) -> NoReturn:
        """Release the jobs that did not end, and end the process. If the process continued, the
        code of these jobs would continue too."""
        self._signal_handler.exit_within(EXIT_UNCLEAN_STOP, PROCESS_EXIT_TIMEOUT)
        self._log.warning(
            WORKER_STOPPED_WITH_ABANDONED_JOBS,
            effect="the jobs are released, and the process exits",
            count=len(report.abandoned),
        )
        await _release_jobs_and_exit(client, report.abandoned)

    def _exit_from_blocked_loop(self, client: Client) -> None:
        """Release the running jobs, and end the process. A separate thread calls this, because the
        event loop is blocked."""
        claim_keys = self._abandoned_claims or client.running_claims()
        anyio.run(_release_jobs_and_exit, client, claim_keys, "the stop took too long; ")


async def _release_jobs_and_exit(
    client: Client, claim_keys: Sequence[ClaimKey], note_prefix: str = ""
) -> NoReturn:
    """Release the jobs with these claim keys, print a note, and end the process. The event loop is
    not closed, because closing it could wait for a thread."""
    try:
        count = await client.release_claims(claim_keys)
        note = f"{note_prefix}released {count} of {len(claim_keys)} running jobs"
    except DATABASE_ERRORS as error:
        note = f"{note_prefix}could not release the abandoned jobs: {error_to_one_line(error)}"
    exit_process(EXIT_UNCLEAN_STOP, f"riverpy: {note}")


def _make_health_server(source: Address | ConnectionListener) -> HealthRequestHandler:
    """Return a health server that accepts connections at an address or, in a process that a
    supervisor has started, receives them from the supervisor through a ConnectionListener."""
    from riverpy._tools.health.worker_health import HealthRequestHandler

    return HealthRequestHandler(source)


def _describe_timeout_and_attempts(unit: RegisteredWorker, client: Client) -> str:
    """Return a text for one kind of jobs: the timeout, and the default maximum number of attempts.
    `unit` is the registered worker of this kind."""
    timeout = unit.resolve_timeout(client.config.job_timeout)
    text = "by job" if unit.get_job_timeout is not None else format_duration(timeout)
    default = " (default)" if unit.timeout is UNSET and unit.get_job_timeout is None else ""
    return f"timeout {text}{default}, {client.config.max_attempts} attempts"


async def _wait_for_writable_database(client: Client) -> None:
    """Wait until the database accepts connections and writes.

    Raises:
        CommandError: the database refused the connection, or was not ready before the timeout.
    """
    give_up_at = time.monotonic() + FIRST_CONNECTION_TIMEOUT
    backoff = Backoff(timedelta(milliseconds=100), timedelta(seconds=1))
    failures = RepeatedFailureLog(get_logger())
    while True:
        try:
            await _check_database_writable(client)
        except DATABASE_ERRORS as error:
            if not _is_temporary_error(error) or time.monotonic() >= give_up_at:
                raise CommandError(
                    f"the database cannot be used: {error_to_one_line(error)}",
                    exit_code=EXIT_NOT_READY,
                ) from error
            failures.log_failure(
                FIRST_DATABASE_CONNECTION_FAILED,
                effect="the worker tries again",
                error=error_to_one_line(error),
            )
            await anyio.sleep(backoff.next_delay())
        else:
            return


async def _check_database_writable(client: Client) -> None:
    """Check that the database accepts writes now. Raise one of DATABASE_ERRORS if not."""
    connection = await connect(
        client.database_url,
        application_name="riverpy start",
        through_pooler=client.config.pooler,
        password=make_password_source(client.password, client.database_url),
    )
    try:
        with anyio.fail_after(CONNECT_TIMEOUT):
            await require_writable(connection)
    finally:
        await close_connection(connection)


def _is_temporary_error(error: BaseException) -> bool:
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is None:
        return isinstance(error, OSError | TimeoutError | EOFError)
    return sqlstate in _SERVER_NOT_READY_SQLSTATES or sqlstate.startswith("08")
