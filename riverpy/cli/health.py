"""`riverpy health`: report whether jobs are being worked, for probes and scripts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click
import msgspec

from riverpy._duration import format_duration
from riverpy._postgres.clients import client_count_live
from riverpy._postgres.driver import DATABASE_ERRORS, InsufficientPrivilegeError
from riverpy._postgres.queues import queue_get_lags, queue_list_with_waiting_jobs
from riverpy._postgres.schema import CLIENTS_MIGRATION, DOMAINS_MIGRATION, make_migrate_command
from riverpy._tools.doctor.server import require_primary
from riverpy._tools.domain_map import TABLE_MISSING_SQLSTATE, read_domains
from riverpy._tools.health.http_client import NO_HEALTH_SERVER_ERROR, http_get, parse_address_or_url
from riverpy._tools.health.probes import CheckResult, ProbeResult, check_leaders
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import make_printable, print_json, print_text
from riverpy.cli._run import EXIT_NOT_READY, error_to_one_line, print_traceback_if_debug, run_async
from riverpy.cli._types import DURATION_TYPE, ParsedType
from riverpy.errors import DatabaseError, SchemaMissingError

if TYPE_CHECKING:
    from riverpy._tools.health.http import Address
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings

CHECKED_QUEUES_MAX = 1_000
QUEUE_LAG_MAX_DEFAULT = timedelta(seconds=60)
TABLES_MISSING_RESULT = CheckResult(
    ok=True, reason="not known: riverpy's own tables are missing (riverpy migrate up)"
)

_EPILOG = """\b
Exit codes:
  0  healthy
  2  wrong usage or a wrong setting
  3  not healthy, or no answer
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--url",
    "address",
    metavar="URL",
    type=ParsedType("url", parse_address_or_url),
    help="URL of a worker's health server, such as http://127.0.0.1:8378 or :8378.",
)
@click.option(
    "--max-lag",
    type=DURATION_TYPE,
    help="How long a job may wait after it is due, and how long there may be no leader. Default: "
    "60s; with --url: not checked.",
)
@json_option
@database_options
def health(
    database: DatabaseSettings, *, address: Address | None, max_lag: timedelta | None, as_json: bool
) -> None:
    """Report in one line whether workers run jobs.

    With --url, the command reads /readyz of the worker with this URL. Without --url, it checks
    three things in the database: a riverpy worker sends heartbeats, there is a leader, and no job
    has waited longer than --max-lag. It ignores paused queues.
    """
    try:
        if address is not None:
            verdict = run_async(_probe_worker, address, max_lag)
        else:
            limit = QUEUE_LAG_MAX_DEFAULT if max_lag is None else max_lag
            verdict = run_async(_probe_database, database, limit)
    except click.UsageError:
        raise
    except click.ClickException as error:
        verdict = ProbeResult.from_checks(
            {"answer": CheckResult(ok=False, reason=error.format_message())}
        )
    if as_json:
        print_json(verdict)
    else:
        reasons = "; ".join(f"{name}: {one.reason}" for name, one in verdict.checks.items())
        print_text(
            make_printable(f"ok: {reasons}" if verdict.ok else f"not ready: {verdict.summary}")
        )
    if not verdict.ok:
        raise click.exceptions.Exit(EXIT_NOT_READY)


async def _probe_worker(address: Address, max_lag: timedelta | None) -> ProbeResult:
    query = "" if max_lag is None else f"?{urlencode({'max_lag': format_duration(max_lag)})}"
    try:
        async with http_get(address, f"/readyz{query}") as answer:
            return msgspec.json.decode(await answer.read_body(), type=ProbeResult)
    except (OSError, ValueError) as error:  # a DecodeError is a ValueError
        print_traceback_if_debug(error)
        why = error_to_one_line(error) if isinstance(error, OSError) else NO_HEALTH_SERVER_ERROR
        reason = f"none from {address}: {why}"
        return ProbeResult.from_checks({"answer": CheckResult(ok=False, reason=reason)})


async def _probe_database(database: DatabaseSettings, max_lag: timedelta) -> ProbeResult:
    url = database.require_url()
    try:
        return await _run_database_checks(database, max_lag)
    except (DatabaseError, *DATABASE_ERRORS) as error:
        print_traceback_if_debug(error)
        failed, reason = "database", error_to_one_line(error)
        if isinstance(error, SchemaMissingError):
            failed = "schema"
        elif getattr(error, "sqlstate", None) == TABLE_MISSING_SQLSTATE:
            failed = "schema"
            place = f'schema "{database.schema}"' if database.schema else "the default schema"
            command = make_migrate_command("riverpy doctor", database.schema, url)
            reason += (
                f": {place} lacks this table, although its migration is recorded. Run `{command}`: "
                "it shows how to create the table again"
            )
        return ProbeResult.from_checks({failed: CheckResult(ok=False, reason=reason)})


async def _run_database_checks(database: DatabaseSettings, max_lag: timedelta) -> ProbeResult:
    async with open_command_connection(database) as found:
        await wait_for_statement(
            "reading the role of the server", require_primary(found.connection)
        )
        checks: dict[str, CheckResult] = {}
        if found.has_riverpy_migration(CLIENTS_MIGRATION):
            living = await found.run_read_statement(client_count_live)
            checks["workers"] = CheckResult(
                ok=living > 0,
                reason=f"{living} with heartbeats" if living else "none sends heartbeats",
            )
        else:
            checks["workers"] = TABLES_MISSING_RESULT
        checks["leaders"] = await _check_leaders(found, max_lag)
        names = await found.run_read_statement(queue_list_with_waiting_jobs, CHECKED_QUEUES_MAX)
        lags = await found.run_read_statement(queue_get_lags, names)
    queue, lag = max(lags.items(), key=lambda one: one[1], default=(None, None))
    if queue is None or lag is None or not lag:
        checks["lag"] = CheckResult(ok=True, reason="no due job waits")
    else:
        seconds = f"{lag.total_seconds():.1f} s"
        reason = f"the oldest due job, of queue {queue}, has waited {seconds}"
        checks["lag"] = CheckResult(ok=lag <= max_lag, reason=reason)
    return ProbeResult.from_checks(checks)


async def _check_leaders(database: CommandConnection, max_lag: timedelta) -> CheckResult:
    if not database.has_riverpy_migration(DOMAINS_MIGRATION):
        return TABLES_MISSING_RESULT
    try:
        seen = await database.run_read_statement(read_domains)
    except InsufficientPrivilegeError as error:
        print_traceback_if_debug(error)
        return CheckResult(ok=True, reason=f"not known: {error_to_one_line(error)}")
    return check_leaders(max_lag, seen)
