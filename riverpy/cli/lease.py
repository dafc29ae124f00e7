"""`riverpy lease`: list or show leases and singletons, or request that a holder releases its
lease."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NoReturn

import anyio
import click
import msgspec

from riverpy._duration import format_duration
from riverpy._names import (
    DOMAIN_LEASE_NAME_PREFIX,
    SCHEMA_LEASE_NAME,
    USER_LEASE_NAME_PREFIX,
    domain_lease_name,
)
from riverpy._postgres.leases import lease_get, lease_list, lease_request_resign
from riverpy._postgres.schema import LEASE_REPORTS_MIGRATION, LEASES_MIGRATION
from riverpy._tools.lease_map import describe_lag, find_lease_reports, read_lease_reports
from riverpy._tools.text import format_names, format_seconds
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._options import ROW_LIMIT_MAX, database_options, json_option, limit_option
from riverpy.cli._output import (
    format_time,
    make_printable,
    print_json,
    print_note,
    print_table,
    print_text,
)
from riverpy.cli._run import EXIT_FAILURE, run_async
from riverpy.cli._types import DURATION_TYPE, LEASE_NAME_TYPE
from riverpy.errors import NotFoundError
from riverpy.stats import LeaseLag

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._postgres.leases import LeaseRow
    from riverpy._tools.lease_map import LeaseReportMap
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings

LeaseScope = Literal["user", "domain", "schema", "other"]
LeaseState = Literal["held", "expired", "released"]

RELEASE_WAIT_DEFAULT = timedelta(seconds=10)
NEXT_HOLDER_WAIT = 2.0
"""The maximum number of seconds that the command waits for the next holder after the release."""
LEASE_READ_INTERVAL = 0.1
"""Seconds between two reads of the lease's row after the request to release it."""

_name_argument = click.argument("name", metavar="NAME", type=LEASE_NAME_TYPE)


class LeaseOutput(msgspec.Struct, frozen=True):
    """A lease, as an object in the `--json` output."""

    name: str
    scope: LeaseScope
    """`user`: a lease or singleton of user code. `domain`: the lease of the leader of a domain.
    `schema`: the lease for the maintenance of the whole schema. `other`: riverpy does not know this
    name."""
    state: LeaseState
    """`held`: the lease has a holder. `expired` or `released`: any process may acquire the
    lease."""
    holder: str
    """The holder of the lease. If the state is not `held`, the last holder."""
    epoch: int
    """The number of the term. A term lasts from acquiring the lease until it expires or is
    released."""
    acquired_at: datetime
    expires_at: datetime | None
    """The time at which the lease expires if the holder does not renew it; None: the lease was
    released."""
    expires_in: float | None
    """Seconds until the lease expires, by the server's clock. The value is negative after the lease
    has expired. None: the lease was released."""
    standbys: list[str] | None = None
    """The ids of the running clients that would acquire the lease if it was free, as the clients
    have reported with their last heartbeats. None: not known, because the database has no column
    for these reports."""
    lag: LeaseLag | None = None
    """The waiting work that the code under the lease last reported with `Lease.report_lag`: the
    number of items, and the age of the oldest one. A client writes the report with its next
    heartbeat. None: there is no report in this term."""

    @property
    def is_held(self) -> bool:
        """Whether the lease has a holder."""
        return self.state == "held"

    def is_same_held_term(self, other: LeaseOutput | None) -> bool:
        """Return whether `other` shows the lease held, in the same term as here. Return False if
        `other` is None."""
        return other is not None and other.is_held and other.epoch == self.epoch


@click.group
def lease() -> None:
    """List leases and singletons, and request that a holder releases one.

    A lease is a lock that expires. A singleton is a function that runs under a lease, so only one
    process at a time runs it.
    """


@lease.command("list")
@click.option(
    "--all",
    "with_internal",
    is_flag=True,
    help="List also the leases of leader domains and of the schema.",
)
@limit_option
@json_option
@database_options
def list_(database: DatabaseSettings, *, with_internal: bool, limit: int, as_json: bool) -> None:
    """List the leases and singletons of your code by name. Times are UTC.

    HOLDER is the client or LeaseManager that holds the lease, or held it last. A term lasts from
    the acquisition of the lease until it expires or is released. EPOCH is the number of the term,
    and rises with each term. SINCE is the start of the term. LEASE says, by the server's clock,
    whether the lease is held, has expired or was released. If it has expired or was released, any
    process may acquire it. A lease is listed after a process has acquired it once.

    STANDBYS is the number of running clients that would acquire the lease if it was free, as they
    reported with their last heartbeat. Clients that report nothing are not counted. LAG is the work
    that the code under the lease had not done yet, as it last reported with Lease.report_lag: the
    number of items, and the age of the oldest one. A client sends this with its next heartbeat.

    The leader of the domain default has no row here: see riverpy leader show.
    """
    found, lease_map = run_async(_list_leases, database, with_internal, limit + 1)
    leases = found[:limit]
    if as_json:
        print_json(
            {
                "leases": leases,
                "clients_without_report": _list_clients_without_standby_report(lease_map),
            }
        )
    elif leases:
        _print_leases(leases, with_scope=with_internal)
    else:
        print_text("there is no lease: one exists after a process has acquired it")
    if len(found) > limit:
        print_note(f"there are more than {limit:,} leases: raise --limit")


@lease.command
@_name_argument
@json_option
@database_options
def show(database: DatabaseSettings, *, name: str, as_json: bool) -> None:
    """Show a lease or singleton: holder, epoch, times, lag and standbys.

    Standbys are the running clients that would acquire the lease if it was free, as they reported
    with their last heartbeat (by default every 10 seconds). A LeaseManager, which holds leases
    without a client, reports nothing, so it is never listed as a standby. Times are UTC.

    The exit code is 1 if no process has acquired a lease of this name yet.
    """
    found, lease_map = run_async(_read_existing_lease, database, name)
    if as_json:
        print_json(
            {
                "lease": found,
                "clients_without_report": _list_clients_without_standby_report(lease_map),
            }
        )
        return
    _print_leases([found], with_scope=False)
    print_text("")
    _print_standbys(found, lease_map)


@lease.command
@_name_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--wait",
    type=DURATION_TYPE,
    default=format_duration(RELEASE_WAIT_DEFAULT),
    show_default=True,
    help="How long to wait until the holder's term has ended.",
)
@json_option
@database_options
def resign(
    database: DatabaseSettings, *, name: str, yes: bool, wait: timedelta, as_json: bool
) -> None:
    """Request that the holder of a lease or singleton releases it.

    The holder cancels the code that runs under the lease, and releases the lease when this code has
    ended. Then another process can acquire the lease. The old holder tries again after a renewal
    interval (5 seconds by default). The command waits until the lease has no holder, or a different
    holder. After the release it waits up to 2 seconds for the next holder.

    The exit code is 1 if the lease is unknown, if it has no holder, or if the holder still has it
    after --wait. Running clients that listen receive the request. A LeaseManager, and a client that
    only polls, do not receive it.

    \b
    riverpy lease resign projection:totals
    riverpy lease resign projection:totals --yes --wait 30s --json
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "this cancels code that runs under the lease, and there is no terminal to ask for "
            "confirmation: add --yes"
        )
    before, _ = run_async(_read_existing_lease, database, name)
    after: LeaseOutput | None = before
    if before.is_held:
        if not yes:
            question = f"Ask {before.holder} to release the lease {name!r}, and cancel its code?"
            click.confirm(make_printable(question), abort=True, err=True)
        after = run_async(_request_release_and_wait, database, before, wait.total_seconds())
    is_term_ended = before.is_held and not before.is_same_held_term(after)
    if as_json:
        print_json({"resigned": is_term_ended, "before": before, "after": after})
    else:
        print_text(make_printable(_describe_release(before, after, wait)))
    if not is_term_ended:
        raise click.exceptions.Exit(EXIT_FAILURE)


async def _list_leases(
    database: DatabaseSettings, with_internal: bool, limit: int
) -> tuple[list[LeaseOutput], LeaseReportMap | None]:
    async with open_command_connection(database) as found:
        _require_lease_table(found)
        prefix = None if with_internal else USER_LEASE_NAME_PREFIX
        rows = await found.run_read_statement(lease_list, prefix=prefix, limit=limit)
        lease_map = await _read_lease_reports_if_stored(found)
        return [_make_lease_output(row, lease_map) for row in rows], lease_map


async def _read_existing_lease(
    database: DatabaseSettings, name: str
) -> tuple[LeaseOutput, LeaseReportMap | None]:
    """Return the lease with this name, and the reports of the clients about leases. Raise
    NotFoundError if no process has acquired a lease with this name yet."""
    async with open_command_connection(database) as found:
        _require_lease_table(found)
        lease_map = await _read_lease_reports_if_stored(found)
        lease = await _read_lease(found, name, lease_map)
        if lease is None:
            await _raise_lease_not_found(found, name)
        return lease, lease_map


async def _read_lease_reports_if_stored(database: CommandConnection) -> LeaseReportMap | None:
    """Return the reports of the clients about leases, or None if the database has no column for
    them."""
    if not database.has_riverpy_migration(LEASE_REPORTS_MIGRATION):
        return None
    return await database.run_read_statement(read_lease_reports)


async def _request_release_and_wait(
    database: DatabaseSettings, lease: LeaseOutput, wait: float
) -> LeaseOutput | None:
    """Request that the holder releases the lease, and wait at most `wait` seconds until the
    holder's term has ended. After a release, also wait up to NEXT_HOLDER_WAIT for the next holder.
    Return the lease after the wait, or None if its row was deleted."""
    async with open_command_connection(database) as found:
        request = lease_request_resign(
            found.connection,
            found.schema,
            name=USER_LEASE_NAME_PREFIX + lease.name,
            epoch=lease.epoch,
        )
        await wait_for_statement("requesting a release", request)
        lease_map = await _read_lease_reports_if_stored(found)
        after = await _read_lease(found, lease.name, lease_map)

        async def read_again_while(holds: Callable[[], bool], seconds: float) -> None:
            nonlocal after
            with anyio.move_on_after(seconds):
                while holds():
                    await anyio.sleep(LEASE_READ_INTERVAL)
                    with anyio.CancelScope(shield=True):  # a read has its own timeout
                        after = await _read_lease(found, lease.name, lease_map)

        await read_again_while(lambda: lease.is_same_held_term(after), wait)
        await read_again_while(
            lambda: after is not None and after.state == "released", NEXT_HOLDER_WAIT
        )
        return after


def _require_lease_table(database: CommandConnection) -> None:
    database.require_riverpy_migration(LEASES_MIGRATION, "table of leases")


async def _read_lease(
    database: CommandConnection, name: str, lease_map: LeaseReportMap | None
) -> LeaseOutput | None:
    row = await database.run_read_statement(lease_get, name=USER_LEASE_NAME_PREFIX + name)
    return None if row is None else _make_lease_output(row, lease_map)


async def _raise_lease_not_found(database: CommandConnection, name: str) -> NoReturn:
    """Raise NotFoundError for this name. The error text lists leases with similar names. If there
    is a leader domain with this name, the text has the commands for the lease of that domain
    instead."""
    if await database.run_read_statement(lease_get, name=domain_lease_name(name)):
        raise NotFoundError(
            f"{name!r} is the lease of a domain, not of your code: use `riverpy leader show "
            f"--domain {name}` or `riverpy leader resign --domain {name}`"
        )
    rows = await database.run_read_statement(
        lease_list, prefix=USER_LEASE_NAME_PREFIX, limit=ROW_LIMIT_MAX
    )
    alike = get_close_matches(name, [row.name.removeprefix(USER_LEASE_NAME_PREFIX) for row in rows])
    hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""
    raise NotFoundError(
        f"no process has acquired a lease with the name {name!r}{hint} (see `riverpy lease list`)"
    )


def _make_lease_output(row: LeaseRow, lease_map: LeaseReportMap | None) -> LeaseOutput:
    name, scope = _split_lease_name(row.name)
    state: LeaseState = "held" if row.is_held else "expired"
    seconds = row.seconds_until_expiry
    holder = row.holder if row.is_held else None
    reports = find_lease_reports(lease_map, row.name, holder=holder, epoch=row.epoch)
    return LeaseOutput(
        name,
        scope,
        "released" if seconds is None else state,
        row.holder,
        row.epoch,
        row.acquired_at,
        row.expires_at,
        None if seconds is None else round(seconds, 3),
        *reports,
    )


def _split_lease_name(name: str) -> tuple[str, LeaseScope]:
    """Convert the name of a lease in the database to the name that users know. Return that name and
    the scope of the lease."""
    if name.startswith(USER_LEASE_NAME_PREFIX):
        return name.removeprefix(USER_LEASE_NAME_PREFIX), "user"
    if name.startswith(DOMAIN_LEASE_NAME_PREFIX):
        return name.removeprefix(DOMAIN_LEASE_NAME_PREFIX), "domain"
    return name, "schema" if name == SCHEMA_LEASE_NAME else "other"


def _print_leases(leases: list[LeaseOutput], *, with_scope: bool) -> None:
    is_one_without_holder = len(leases) == 1 and not leases[0].is_held
    holder_heading = "LAST HOLDER" if is_one_without_holder else "HOLDER"
    columns: dict[str, Callable[[LeaseOutput], object]] = {
        "NAME": lambda one: one.name,
        "SCOPE": lambda one: one.scope,
        holder_heading: lambda one: one.holder,
        "EPOCH": lambda one: one.epoch,
        "SINCE": lambda one: format_time(one.acquired_at),
        "STANDBYS": lambda one: None if one.standbys is None else len(one.standbys),
        "LAG": lambda one: None if one.lag is None else describe_lag(one.lag),
        "LEASE": _describe_state,
    }
    if not with_scope:
        del columns["SCOPE"]
    if not any(one.lag for one in leases):
        del columns["LAG"]
    print_table(list(columns), [[cell(one) for cell in columns.values()] for one in leases])


def _print_standbys(lease: LeaseOutput, lease_map: LeaseReportMap | None) -> None:
    if lease_map is None:
        print_text("standbys are not known: run `riverpy migrate up`, and restart the workers")
        return
    holder = lease.holder if lease.is_held else None
    clients = lease_map.standby_clients(USER_LEASE_NAME_PREFIX + lease.name, holder=holder)
    if clients:
        print_table(
            ("STANDBY", "VERSION", "LAST HEARTBEAT"),
            [(one.client_id, one.version, format_time(one.heartbeat_at)) for one in clients],
        )
    else:
        print_text("no running client reports that it stands by for this lease")
    if unknown := _list_clients_without_standby_report(lease_map):
        print_text(make_printable(f"clients without a complete report: {format_names(unknown)}"))


def _list_clients_without_standby_report(lease_map: LeaseReportMap | None) -> list[str] | None:
    """Return the ids of the running clients that do not report whether they are standbys. None: not
    known, because the database has no column for these reports."""
    return None if lease_map is None else sorted(lease_map.client_ids_without_report)


def _describe_state(lease: LeaseOutput) -> str:
    if lease.expires_in is None:
        return "released"
    if lease.is_held:
        return f"held: expires in {format_seconds(lease.expires_in)}, unless renewed"
    if lease.expires_in < 0:
        return f"expired {format_seconds(-lease.expires_in)} ago"
    return "expired: the server's clock was set back"


def _describe_release(before: LeaseOutput, after: LeaseOutput | None, wait: timedelta) -> str:
    name, holder = before.name, before.holder
    if not before.is_held:
        return f"the lease {name!r} has no holder: {holder} held it last ({before.state})"
    if before.is_same_held_term(after):
        return (
            f"{holder} still holds the lease {name!r} after {format_duration(wait)}: its code "
            "under the lease has not ended yet, or it did not receive the request, because it is a "
            "LeaseManager or a client that only polls or does not run"
        )
    if after is None or not after.is_held:
        how = "" if after is None else f" ({after.state})"
        return f"{holder} does not hold the lease {name!r} any more{how}; it has no holder yet"
    if after.holder == holder:
        return f"{holder} released the lease {name!r} and acquired it again"
    return f"{holder} does not hold the lease {name!r} any more; {after.holder} holds it now"
