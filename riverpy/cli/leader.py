"""`riverpy leader`: show who leads `default` or another domain, and ask the leader to resign."""

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
from riverpy._postgres.schema import CLIENTS_VERSION, OWN_LINE
from riverpy._tools.domain_map import read_domains
from riverpy.cli._connected import bounded, connected
from riverpy.cli._domain import domain_name, expect_domains
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_table
from riverpy.cli._run import EXIT_FAILURE, run
from riverpy.cli._types import DURATION
from riverpy.errors import NotFoundError

if TYPE_CHECKING:
    from datetime import datetime

    from riverpy._postgres.domains import DomainLeader
    from riverpy._postgres.leaders import LeaderRow
    from riverpy.cli._connected import Connected
    from riverpy.cli._options import DatabaseSettings

WAIT_DEFAULT = timedelta(seconds=10)
LOOK_INTERVAL = 0.1
"""Seconds between two looks at the row of a leader that was asked to resign."""

_domain_option = click.option(
    "--domain",
    metavar="NAME",
    default=DEFAULT_DOMAIN,
    show_default=True,
    callback=domain_name,
    help="Which leader domain.",
)


class LeaderOutput(msgspec.Struct, frozen=True):
    """The row of the leader, as `--json` prints it."""

    leader_id: str
    elected_at: datetime
    expires_at: datetime
    expires_in: float
    """Seconds, by the server's clock; below zero: the lease has expired."""
    expired: bool
    epoch: int | None = None
    """The number of the term. None: the domain is `default`, whose terms have none."""

    @classmethod
    def of(cls, row: LeaderRow) -> LeaderOutput:
        """What to print of the row of `default`."""
        expires_in = round(row.remaining, 3)
        return cls(row.leader_id, row.elected_at, row.expires_at, expires_in, row.remaining < 0)

    @classmethod
    def of_domain(cls, row: DomainLeader) -> LeaderOutput | None:
        """What to print of a domain's lease. None: it was released."""
        if row.expires_at is None or row.remaining is None:
            return None
        left = round(row.remaining, 3)
        return cls(row.holder, row.elected_at, row.expires_at, left, row.remaining < 0, row.epoch)

    def is_term_of(self, other: LeaderOutput) -> bool:
        """Whether it is the same term."""
        return (self.leader_id, self.elected_at) == (other.leader_id, other.elected_at)


class CandidateOutput(msgspec.Struct, frozen=True):
    """A client that stands for election, as `--json` prints it."""

    client_id: str
    version: str
    started_at: datetime
    heartbeat_at: datetime


class ShowOutput(msgspec.Struct, frozen=True):
    """Who leads, and who could."""

    leader: LeaderOutput | None
    """None: nobody leads."""
    candidates: list[CandidateOutput] | None
    """Clients of riverpy that stand for election and give signs of life. None: the database has not
    the table in which they are."""


class ResignOutput(msgspec.Struct, frozen=True):
    """What became of the request."""

    resigned: bool
    """Whether the term ended that was asked to."""
    before: LeaderOutput | None
    after: LeaderOutput | None


@click.group
def leader() -> None:
    """Show who leads, and ask the leader to resign."""


@leader.command
@_domain_option
@json_option
@database_options
def show(database: DatabaseSettings, *, domain: str, as_json: bool) -> None:
    """Show who leads, and who stands for election.

    Also since when somebody leads, and until when the lease lasts. Times are UTC.
    """
    found = run(_read_show, database, domain)
    if as_json:
        print_json(found)
        return
    row = found.leader
    if row is None:
        click.echo("nobody leads")
    else:
        until = "expired, so that any candidate may take over" if row.expired else _left(row)
        print_table(
            ("LEADER", "SINCE", "LEASE"),
            [(row.leader_id, format_time(row.elected_at), until)],
        )
    click.echo()
    if found.candidates is None:
        click.echo("candidates are not known: run `riverpy migrate up`")
        return
    if not found.candidates:
        click.echo("no client of riverpy stands for election")
        return
    print_table(
        ("CANDIDATE", "VERSION", "STARTED", "LAST SIGN OF LIFE"),
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
    help="How long to watch for the next leader.",
)
@_domain_option
@json_option
@database_options
def resign(database: DatabaseSettings, *, wait: timedelta, domain: str, as_json: bool) -> None:
    """Ask the leader to resign, so that another client leads.

    Exit code 1 if nobody knows the domain or leads it, or if nobody obeyed: a leader that only
    polls does not hear it.
    """
    result = run(_resign, database, domain, wait.total_seconds())
    if as_json:
        print_json(result)
    else:
        click.echo(_tell(result, wait))
    if not result.resigned:
        raise click.exceptions.Exit(EXIT_FAILURE)


async def _read_show(database: DatabaseSettings, domain: str) -> ShowOutput:
    async with connected(database) as found:
        await _expect_domain(found, database, domain)
        leader = await _read_leader(found, database, domain)
        candidates = None
        if CLIENTS_VERSION in found.state.versions(OWN_LINE):
            rows = await bounded(
                "reading who could lead",
                client_candidates(found.connection, found.schema, domain=domain),
            )
            candidates = [CandidateOutput(*candidate) for candidate in rows]
        return ShowOutput(leader, candidates)


async def _resign(database: DatabaseSettings, domain: str, wait: float) -> ResignOutput:
    async with connected(database) as found:
        await _expect_domain(found, database, domain)
        before = after = await _read_leader(found, database, domain)
        if before is None or before.expired:
            return ResignOutput(resigned=False, before=before, after=before)
        await bounded("asking to resign", _request_resign(found, domain))
        with anyio.move_on_after(wait):
            while after is None or after.is_term_of(before):
                await anyio.sleep(LOOK_INTERVAL)
                with anyio.CancelScope(shield=True):  # a look is not cut, and has its own bound
                    after = await _read_leader(found, database, domain)
        resigned = after is None or not after.is_term_of(before)
        return ResignOutput(resigned, before, after)


async def _expect_domain(found: Connected, database: DatabaseSettings, domain: str) -> None:
    """The domain is `default`, or somebody knows it.

    Raises:
        NotFoundError: nobody does.
        SchemaMissingError: the tables of domains are not there.
    """
    if domain == DEFAULT_DOMAIN:
        return
    expect_domains(found, database)
    seen = await bounded("reading the domains", read_domains(found.connection, found.schema))
    known = {*seen.others, *(one.domain for one in seen.leaders)} - {SCHEMA_LEASE}
    if domain not in known:
        alike = get_close_matches(domain, known)
        hint = f"; there is {', '.join(map(repr, alike))}" if alike else ""
        raise NotFoundError(
            f"no client, queue or lease is of domain {domain!r}{hint}: `riverpy domain list` shows "
            "all"
        )


async def _request_resign(found: Connected, domain: str) -> None:
    if domain == DEFAULT_DOMAIN:
        await leader_request_resign(found.connection, found.schema)
    else:
        name = domain_lease(domain)
        await lease_request_resign(found.connection, found.schema, name=name)


async def _read_leader(
    found: Connected, database: DatabaseSettings, domain: str
) -> LeaderOutput | None:
    purpose = "reading who leads"
    if domain == DEFAULT_DOMAIN:
        row = await bounded(purpose, leader_get(found.connection, found.schema))
        return None if row is None else LeaderOutput.of(row)
    rows = await bounded(purpose, domain_leaders(found.connection, found.schema))
    lead = next((one for one in rows if one.domain == domain), None)
    return None if lead is None else LeaderOutput.of_domain(lead)


def _tell(result: ResignOutput, wait: timedelta) -> str:
    before, after = result.before, result.after
    if before is None:
        return "nobody leads"
    if before.expired:
        return f"nobody leads: the lease of {before.leader_id} has expired"
    if not result.resigned:
        return (
            f"{before.leader_id} leads and did not resign within {format_duration(wait)}: one that "
            "only polls does not hear the request"
        )
    if after is None:
        return f"{before.leader_id} led and resigned; nobody leads yet"
    if after.leader_id == before.leader_id:
        return f"{before.leader_id} led, resigned, and leads again: no other client took over"
    return f"{before.leader_id} led; now {after.leader_id} leads"


def _left(row: LeaderOutput) -> str:
    return f"for {row.expires_in:.0f} s, unless renewed"
