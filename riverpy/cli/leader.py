"""`riverpy leader`: show the leader of a domain, and request that it resigns."""

from __future__ import annotations

from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING

import anyio
import click
import msgspec

from riverpy._duration import format_duration
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE, domain_lease
from riverpy._postgres.clients import client_candidates
from riverpy._postgres.domains import domain_leaders
from riverpy._postgres.leaders import leader_get, leader_request_resign
from riverpy._postgres.leases import lease_request_resign
from riverpy._postgres.schema import CLIENTS_VERSION, DOMAINS_VERSION
from riverpy._tools.domain_map import read_domains
from riverpy.cli._connected import connected, with_timeout
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_table
from riverpy.cli._run import EXIT_FAILURE, run
from riverpy.cli._types import DOMAIN, DURATION
from riverpy.errors import NotFoundError

if TYPE_CHECKING:
    from datetime import datetime

    from riverpy._postgres.domains import DomainLeader
    from riverpy._postgres.leaders import LeaderRow
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings

WAIT_DEFAULT = timedelta(seconds=10)
READ_INTERVAL = 0.1
"""Seconds between two reads of the row of a leader that was requested to resign."""

_domain_option = click.option(
    "--domain",
    metavar="NAME",
    default=DEFAULT_DOMAIN,
    show_default=True,
    type=DOMAIN,
    help="Name of the leader domain.",
)


class LeaderOutput(msgspec.Struct, frozen=True):
    """A leader in `--json` output."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    expires_in: float
    """The time until the lease expires, in seconds by the server's clock. Negative after the
    expiry."""
    expired: bool
    epoch: int | None = None
    """The number of the term. None for domain `default`, whose terms have no number."""

    @classmethod
    def of(cls, row: LeaderRow) -> LeaderOutput:
        """Return the output for the leader of `default`."""
        expires_in = round(row.remaining, 3)
        return cls(row.leader_id, row.elected_at, row.expires_at, expires_in, row.remaining < 0)

    @classmethod
    def of_domain(cls, row: DomainLeader) -> LeaderOutput | None:
        """Return the output for a domain's lease. None: the lease was released."""
        if row.expires_at is None or row.remaining is None:
            return None
        left = round(row.remaining, 3)
        return cls(row.holder, row.elected_at, row.expires_at, left, row.remaining < 0, row.epoch)

    def is_term_of(self, other: LeaderOutput) -> bool:
        """Whether this output and `other` show the same term."""
        return (self.leader_id, self.elected_at) == (other.leader_id, other.elected_at)


class CandidateOutput(msgspec.Struct, frozen=True):
    """A client that takes part in leader election, in `--json` output."""

    client_id: str
    version: str
    started_at: datetime
    heartbeat_at: datetime


class ShowOutput(msgspec.Struct, frozen=True):
    """The `--json` output of `leader show`."""

    leader: LeaderOutput | None
    """The leader. None: there is no leader."""
    candidates: list[CandidateOutput] | None
    """The clients of riverpy that take part in leader election and send heartbeats. None if the
    database lacks the table of clients."""


class ResignOutput(msgspec.Struct, frozen=True):
    """The `--json` output of `leader resign`."""

    resigned: bool
    """Whether the leader's term ended."""
    before: LeaderOutput | None
    after: LeaderOutput | None


@click.group
def leader() -> None:
    """Show the leader, and request that it resigns."""


@leader.command
@_domain_option
@json_option
@database_options
def show(database: DatabaseSettings, *, domain: str, as_json: bool) -> None:
    """Show the leader, its lease and the candidates.

    Candidates are the clients that take part in leader election. Times are UTC.
    """
    found = run(_read_show, database, domain)
    if as_json:
        print_json(found)
        return
    row = found.leader
    if row is None:
        click.echo("there is no leader")
    else:
        until = "expired: any candidate can become leader" if row.expired else _left(row)
        print_table(
            ("LEADER", "SINCE", "LEASE"),
            [(row.leader_id, format_time(row.elected_at), until)],
        )
    click.echo()
    if found.candidates is None:
        click.echo("candidates are not known: run `riverpy migrate up`")
        return
    if not found.candidates:
        click.echo("no client of riverpy takes part in leader election")
        return
    print_table(
        ("CANDIDATE", "VERSION", "STARTED", "LAST HEARTBEAT"),
        [
            (one.client_id, one.version, format_time(one.started_at), format_time(one.heartbeat_at))
            for one in found.candidates
        ],
    )


@leader.command
@click.option(
    "--wait",
    type=DURATION,
    default=format_duration(WAIT_DEFAULT),
    show_default=True,
    help="How long to wait for the next leader.",
)
@_domain_option
@json_option
@database_options
def resign(database: DatabaseSettings, *, wait: timedelta, domain: str, as_json: bool) -> None:
    """Request that the leader resigns.

    Then another client becomes leader. The exit code is 1 if the domain is unknown, has no leader,
    or the leader did not resign: one that only polls does not receive the request.
    """
    result = run(_resign, database, domain, wait.total_seconds())
    if as_json:
        print_json(result)
    else:
        click.echo(_resign_text(result, wait))
    if not result.resigned:
        raise click.exceptions.Exit(EXIT_FAILURE)


async def _read_show(database: DatabaseSettings, domain: str) -> ShowOutput:
    async with connected(database) as found:
        await _expect_domain(found, domain)
        leader = await _read_leader(found, domain)
        candidates = None
        if found.has_version(CLIENTS_VERSION):
            rows = await found.read(client_candidates, domain=domain)
            candidates = [CandidateOutput(*candidate) for candidate in rows]
        return ShowOutput(leader, candidates)


async def _resign(database: DatabaseSettings, domain: str, wait: float) -> ResignOutput:
    async with connected(database) as found:
        await _expect_domain(found, domain)
        before = after = await _read_leader(found, domain)
        if before is None or before.expired:
            return ResignOutput(resigned=False, before=before, after=before)
        await with_timeout("requesting a resignation", _request_resign(found, domain))
        with anyio.move_on_after(wait):
            while after is None or after.is_term_of(before):
                await anyio.sleep(READ_INTERVAL)
                with anyio.CancelScope(shield=True):  # a read has its own timeout
                    after = await _read_leader(found, domain)
        resigned = after is None or not after.is_term_of(before)
        return ResignOutput(resigned, before, after)


async def _expect_domain(found: CommandConnection, domain: str) -> None:
    """Check that the domain exists.

    Raises:
        NotFoundError: no client, queue or lease has this domain.
        SchemaMissingError: the tables of domains are missing.
    """
    if domain == DEFAULT_DOMAIN:
        return
    found.expect_version(DOMAINS_VERSION, "tables of domains")
    seen = await found.read(read_domains)
    known = {*seen.others, *(one.domain for one in seen.leaders)} - {SCHEMA_LEASE}
    if domain not in known:
        alike = get_close_matches(domain, known)
        hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise NotFoundError(
            f"no client, queue or lease has the domain {domain!r}{hint} (see `riverpy domain list`)"
        )


async def _request_resign(found: CommandConnection, domain: str) -> None:
    if domain == DEFAULT_DOMAIN:
        await leader_request_resign(found.connection, found.schema)
    else:
        name = domain_lease(domain)
        await lease_request_resign(found.connection, found.schema, name=name)


async def _read_leader(found: CommandConnection, domain: str) -> LeaderOutput | None:
    if domain == DEFAULT_DOMAIN:
        row = await found.read(leader_get)
        return None if row is None else LeaderOutput.of(row)
    rows = await found.read(domain_leaders)
    lead = next((one for one in rows if one.domain == domain), None)
    return None if lead is None else LeaderOutput.of_domain(lead)


def _resign_text(result: ResignOutput, wait: timedelta) -> str:
    before, after = result.before, result.after
    if before is None:
        return "there is no leader"
    if before.expired:
        return f"there is no leader: the lease of {before.leader_id} has expired"
    if not result.resigned:
        return (
            f"{before.leader_id} is still the leader after {format_duration(wait)}: a client that "
            "only polls does not receive the request"
        )
    if after is None:
        return f"{before.leader_id} resigned; there is no leader yet"
    if after.leader_id == before.leader_id:
        return f"{before.leader_id} resigned and became leader again: no other client took over"
    return f"{before.leader_id} resigned; {after.leader_id} is the leader now"


def _left(row: LeaderOutput) -> str:
    return f"for {row.expires_in:.0f} s, unless renewed"
