"""`riverpy leader`: show the leader of a domain, or request that it resigns."""

from __future__ import annotations

from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING

import anyio
import click
import msgspec

from riverpy._duration import format_duration
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME, domain_lease_name
from riverpy._postgres.clients import client_list_candidates
from riverpy._postgres.domains import domain_list_leaders
from riverpy._postgres.leaders import leader_get, leader_request_resign
from riverpy._postgres.leases import lease_request_resign
from riverpy._postgres.schema import CLIENTS_MIGRATION, DOMAINS_MIGRATION, LEASE_REPORTS_MIGRATION
from riverpy._tools.domain_map import read_domains
from riverpy._tools.lease_map import leader_lease_name, read_lease_reports
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_table
from riverpy.cli._run import EXIT_FAILURE, run_async
from riverpy.cli._types import DOMAIN_NAME_TYPE, DURATION_TYPE
from riverpy.errors import NotFoundError

if TYPE_CHECKING:
    from riverpy._postgres.clients import LeaderCandidate
    from riverpy._tools.lease_map import LeaseReportMap
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings

NEXT_LEADER_WAIT_DEFAULT = timedelta(seconds=10)
LEADER_READ_INTERVAL = 0.1
"""Seconds between two reads of the leader's row after the request to resign."""

_domain_option = click.option(
    "--domain",
    metavar="NAME",
    default=DEFAULT_DOMAIN,
    show_default=True,
    type=DOMAIN_NAME_TYPE,
    help="Name of the leader domain.",
)


class LeaderOutput(msgspec.Struct, frozen=True):
    """The leader of a domain, as an object in the `--json` output."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    expires_in: float
    """Seconds until the lease expires, by the server's clock. The value is negative after the lease
    has expired."""
    expired: bool
    epoch: int | None = None
    """The number of this term, i.e. of this period as leader. None for the domain `default`, whose
    terms have no number."""

    def is_same_term(self, other: LeaderOutput | None) -> bool:
        """Return whether `other` is the same leader in the same term."""
        if other is None:
            return False
        return (self.leader_id, self.elected_at) == (other.leader_id, other.elected_at)


@click.group
def leader() -> None:
    """Show the leader, and request that it resigns."""


@leader.command
@_domain_option
@json_option
@database_options
def show(database: DatabaseSettings, *, domain: str, as_json: bool) -> None:
    """Show the leader, its lease, the candidates and the standbys.

    Candidates are the clients that take part in leader election. A standby is a candidate that
    would become leader now if there was none. `?` stands for a client that does not report whether
    it is a standby, for example because its riverpy version is older. Times are UTC.
    """
    found, candidates, lease_map = run_async(_read_leader_and_candidates, database, domain)
    leader_id = None if found is None or found.expired else found.leader_id
    standbys = lease_map and lease_map.standby_client_ids(
        leader_lease_name(domain), holder=leader_id
    )
    if as_json:
        # `candidates` is None if the database has no table of clients. `standbys` is None if that
        # table has no column for reports about leases.
        objects = None if candidates is None else [one._asdict() for one in candidates]
        print_json({"leader": found, "candidates": objects, "standbys": standbys})
        return
    if found is None:
        click.echo("there is no leader")
    else:
        lease = f"for {found.expires_in:.0f} s, unless renewed"
        if found.expired:
            lease = "expired: any candidate can become leader"
        print_table(
            ("LEADER", "SINCE", "LEASE"), [(found.leader_id, format_time(found.elected_at), lease)]
        )
    click.echo()
    if candidates is None:
        click.echo("candidates are not known: run `riverpy migrate up`")
    elif not candidates:
        click.echo("no client of riverpy takes part in leader election")
    else:
        unknown = (
            lease_map.client_ids_without_report if lease_map else {one[0] for one in candidates}
        )
        states = dict.fromkeys(unknown, "?")
        states |= dict.fromkeys(standbys or (), "yes")
        if leader_id is not None:
            states[leader_id] = "leader"
        print_table(
            ("CANDIDATE", "VERSION", "STARTED", "LAST HEARTBEAT", "STANDBY"),
            [
                (*one[:2], *map(format_time, one[2:]), states.get(one.client_id, "no"))
                for one in candidates
            ],
        )


@leader.command
@click.option(
    "--wait",
    type=DURATION_TYPE,
    default=format_duration(NEXT_LEADER_WAIT_DEFAULT),
    show_default=True,
    help="How long to wait for the next leader.",
)
@_domain_option
@json_option
@database_options
def resign(database: DatabaseSettings, *, wait: timedelta, domain: str, as_json: bool) -> None:
    """Request that the leader resigns.

    Then another client becomes leader. The exit code is 1 if the domain is unknown, if it has no
    leader, or if the leader did not resign. A leader that only polls does not receive the request.
    """
    before, after = run_async(_request_resign_and_wait, database, domain, wait.total_seconds())
    resigned = before is not None and not before.expired and not before.is_same_term(after)
    if as_json:
        print_json({"resigned": resigned, "before": before, "after": after})
    else:
        click.echo(_describe_resignation(before, after, wait))
    if not resigned:
        raise click.exceptions.Exit(EXIT_FAILURE)


async def _read_leader_and_candidates(
    database: DatabaseSettings, domain: str
) -> tuple[LeaderOutput | None, list[LeaderCandidate] | None, LeaseReportMap | None]:
    async with open_command_connection(database) as found:
        await _check_domain_exists(found, domain)
        leader = await _read_leader(found, domain)
        if not found.has_riverpy_migration(CLIENTS_MIGRATION):
            return leader, None, None
        lease_map = None
        if found.has_riverpy_migration(LEASE_REPORTS_MIGRATION):
            lease_map = await found.run_read_statement(read_lease_reports)
        return (
            leader,
            await found.run_read_statement(client_list_candidates, domain=domain),
            lease_map,
        )


async def _request_resign_and_wait(
    database: DatabaseSettings, domain: str, wait: float
) -> tuple[LeaderOutput | None, LeaderOutput | None]:
    """Request that the leader resigns, and wait at most `wait` seconds for the next leader. Return
    the leader before the request, and the leader at the end of the wait."""
    async with open_command_connection(database) as found:
        await _check_domain_exists(found, domain)
        before = after = await _read_leader(found, domain)
        if before is None or before.expired:
            return before, after
        await wait_for_statement("requesting a resignation", _request_resign(found, domain))
        with anyio.move_on_after(wait):
            while after is None or before.is_same_term(after):
                await anyio.sleep(LEADER_READ_INTERVAL)
                with anyio.CancelScope(shield=True):  # do not interrupt a read, which has a timeout
                    after = await _read_leader(found, domain)
        return before, after


async def _check_domain_exists(database: CommandConnection, domain: str) -> None:
    if domain == DEFAULT_DOMAIN:
        return
    database.require_riverpy_migration(DOMAINS_MIGRATION, "tables of domains")
    seen = await database.run_read_statement(read_domains)
    known = {*seen.non_default_domains, *(one.domain for one in seen.leaders)} - {SCHEMA_LEASE_NAME}
    if domain not in known:
        alike = get_close_matches(domain, known)
        hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise NotFoundError(
            f"no client, queue or lease has the domain {domain!r}{hint} (see `riverpy domain list`)"
        )


async def _request_resign(database: CommandConnection, domain: str) -> None:
    if domain == DEFAULT_DOMAIN:
        await leader_request_resign(database.connection, database.schema)
    else:
        name = domain_lease_name(domain)
        await lease_request_resign(database.connection, database.schema, name=name)


async def _read_leader(database: CommandConnection, domain: str) -> LeaderOutput | None:
    if domain == DEFAULT_DOMAIN:
        row = await database.run_read_statement(leader_get)
        return None if row is None else _make_leader_output(*row)
    for row in await database.run_read_statement(domain_list_leaders):
        if (
            row.domain == domain
            and row.expires_at is not None
            and row.seconds_until_expiry is not None
        ):
            times = (row.elected_at, row.expires_at, row.seconds_until_expiry)
            return _make_leader_output(row.holder, *times, epoch=row.epoch)
    return None


def _make_leader_output(
    leader_id: str,
    elected_at: datetime,
    expires_at: datetime,
    expires_in: float,
    *,
    epoch: int | None = None,
) -> LeaderOutput:
    expires_in = round(expires_in, 3)
    return LeaderOutput(leader_id, elected_at, expires_at, expires_in, expires_in < 0, epoch)


def _describe_resignation(
    before: LeaderOutput | None, after: LeaderOutput | None, wait: timedelta
) -> str:
    if before is None:
        return "there is no leader"
    if before.expired:
        return f"there is no leader: the lease of {before.leader_id} has expired"
    if before.is_same_term(after):
        return (
            f"{before.leader_id} is still the leader after {format_duration(wait)}: a client that "
            "only polls does not receive the request"
        )
    if after is None:
        return f"{before.leader_id} resigned; there is no leader yet"
    if after.leader_id == before.leader_id:
        return f"{before.leader_id} resigned and became leader again: no other client took over"
    return f"{before.leader_id} resigned; {after.leader_id} is the leader now"
