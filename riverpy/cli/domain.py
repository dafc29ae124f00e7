"""`riverpy domain`: list leader domains, and move queues between them.

A leader domain is a group of clients and queues with its own leader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from riverpy._names import (
    DEFAULT_DOMAIN,
    SCHEMA_LEASE_NAME,
    domain_lease_name,
)
from riverpy._postgres.domains import (
    domain_assign_queue,
    domain_lock_maintenance,
    domain_preview_queue_move,
)
from riverpy._postgres.schema import DOMAINS_MIGRATION, LEASE_REPORTS_MIGRATION
from riverpy._tools.doctor.domains import PendingWork, find_domain_problems
from riverpy._tools.doctor.finding import LEVEL_NAMES, add_check_name
from riverpy._tools.domain_map import DomainMap, read_domains
from riverpy._tools.lease_map import leader_lease_name, read_lease_reports
from riverpy._tools.text import format_count, format_seconds
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, make_printable, print_json, print_table, print_text
from riverpy.cli._run import CommandError, run_async
from riverpy.cli._types import DOMAIN_NAME_TYPE, QUEUE_NAME_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._postgres.domains import DomainLeader, QueueMovePreview
    from riverpy._tools.lease_map import LeaseReportMap
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings

SHOWN_STANDBYS_MAX = 2
"""The maximum number of standbys for each domain that the table shows by name."""


@click.group
def domain() -> None:
    """List leader domains, and move queues between them.

    A leader domain is a group of clients and queues with its own leader. The leader maintains the
    queues of its domain.
    """


@domain.command("list")
@json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List domains with their leaders, clients, queues and problems. Times are UTC.

    STANDBYS are the clients that would become leader now if there was none, as they reported with
    their last heartbeat. At most two of them are named; --json names all. `?` means that a
    candidate does not report whether it is a standby.

    LAST SEEN is the last heartbeat of a client of the domain. The row @schema shows the leader that
    does the tasks of the whole schema, such as rebuilding indexes. If this row shows `as default`,
    the leader of the domain default does these tasks.
    """
    seen, lease_map = run_async(_read_domains_and_lease_reports, database)
    names = (DEFAULT_DOMAIN, *seen.non_default_domains)
    problems = add_check_name("domains", find_domain_problems(seen, PendingWork()))
    if as_json:
        print_json(
            {
                "domains": [_domain_to_json_object(seen, lease_map, name) for name in names],
                "schema": _leader_to_json_object(seen.last_leader(SCHEMA_LEASE_NAME)),
                "schema_standbys": _find_standbys(seen, lease_map, SCHEMA_LEASE_NAME),
                "problems": problems,
            }
        )
        return
    print_table(
        (
            *("DOMAIN", "LEADER", "EPOCH", "SINCE", "LEASE"),
            *("CLIENTS", "CANDIDATES", "STANDBYS", "QUEUES"),
        ),
        [_domain_to_table_row(seen, lease_map, name) for name in names]
        + [_schema_leader_to_table_row(seen, lease_map)] * bool(seen.non_default_domains),
    )
    owners = [owner for name in seen.non_default_domains for owner in seen.owned_queues(name)]
    if owners:
        print_text("")
        print_table(
            ("QUEUE", "DOMAIN", "CLAIMED BY", "CLAIMED", "LAST SEEN"),
            [
                (
                    owner.queue,
                    owner.domain,
                    owner.claimed_by,
                    format_time(owner.claimed_at.replace(microsecond=0)),
                    format_time(owner.last_seen_at.replace(microsecond=0))
                    if seen.has_had_client(owner.domain)
                    else "never",
                )
                for owner in owners
            ],
        )
    for finding in problems:
        print_text("")
        print_text(make_printable(f"{LEVEL_NAMES[finding.level]}  {finding.text}"))
        print_text(make_printable(f"      fix: {finding.fix}"))


@domain.command
@click.argument("queue", type=QUEUE_NAME_TYPE)
@click.option(
    "--to", metavar="DOMAIN", required=True, type=DOMAIN_NAME_TYPE, help="Name of the new domain."
)
@json_option
@database_options
def move(database: DatabaseSettings, *, queue: str, to: str, as_json: bool) -> None:
    """Move a queue to another domain, or back to default.

    The command waits until neither the old nor the new leader has an open maintenance transaction.
    Then the new leader maintains the queue instead of the old one. Change the domain and its queues
    in the settings of the clients too: each client claims its queues for its domain when it starts.
    If no client of the new domain runs, the command warns. After 10 minutes without a heartbeat
    from a client of the new domain, the leader of the domain default maintains the queue. The exit
    code is 1 if the queue or the domain is unknown, or if the domain has the queue already.
    """

    def check_owner(owner: QueueMovePreview) -> None:
        if not owner.is_queue_known:
            raise CommandError(
                f"there is no queue {queue!r}: a queue exists after a client has worked it. "
                f"To prepare one: riverpy domain claim {queue} --domain {to}"
            )
        if not owner.is_domain_known:
            raise CommandError(
                f"no client or queue has the domain {to!r}: start a worker of it "
                f"(--leader-domain {to}), or: riverpy domain claim {queue} --domain {to}"
            )

    _assign_queue_and_print(database, queue, to, check_owner, as_json=as_json)


@domain.command
@click.argument("queue", type=QUEUE_NAME_TYPE)
@click.option(
    "--domain",
    "to",
    metavar="DOMAIN",
    required=True,
    type=DOMAIN_NAME_TYPE,
    help="Name of the new domain.",
)
@click.option(
    "--force", is_flag=True, help="Take the queue from a domain that has running clients."
)
@json_option
@database_options
def claim(database: DatabaseSettings, *, queue: str, to: str, force: bool, as_json: bool) -> None:
    """Claim a queue for a domain, as its clients do when they start.

    The exit code is 1 if the domain has the queue already, or if another domain with running
    clients has it. In the latter case you can use --force.
    """

    def check_owner(owner: QueueMovePreview) -> None:
        if owner.live_client_count and not force:
            raise CommandError(
                f"queue {queue!r} belongs to domain {owner.owner_domain!r}, which has "
                f"{format_count(owner.live_client_count, 'running client')}: stop them, or take it "
                "with --force"
            )

    if to == DEFAULT_DOMAIN:
        raise click.BadParameter(
            f"default has all unclaimed queues: use riverpy domain move {queue} --to default",
            param_hint="'--domain'",
        )
    _assign_queue_and_print(database, queue, to, check_owner, as_json=as_json)


async def _read_domains_and_lease_reports(
    database: DatabaseSettings,
) -> tuple[DomainMap, LeaseReportMap | None]:
    """Return the domains, and the reports of the clients about leases. If the database has no
    column for these reports, the second value is None."""
    async with open_command_connection(database) as found:
        found.require_riverpy_migration(DOMAINS_MIGRATION, "tables of domains")
        lease_map = None
        if found.has_riverpy_migration(LEASE_REPORTS_MIGRATION):
            lease_map = await found.run_read_statement(read_lease_reports)
        return await found.run_read_statement(read_domains), lease_map


def _find_standbys(
    domain_map: DomainMap, lease_map: LeaseReportMap | None, domain_name: str
) -> list[str] | None:
    """Return the ids of the clients that would become leader of a domain now if it had no leader.
    Return None if the database has no column for the reports of the clients."""
    if lease_map is None:
        return None
    leader = domain_map.current_leader(domain_name)
    holder = None if leader is None else leader.holder
    return lease_map.standby_client_ids(leader_lease_name(domain_name), holder=holder)


def _format_standbys(
    domain_map: DomainMap, lease_map: LeaseReportMap | None, domain_name: str
) -> str:
    """Return the ids of the standbys of a domain as text. The text has at most `SHOWN_STANDBYS_MAX`
    ids, and the number of further standbys. It has a `?` if a candidate does not report whether it
    is a standby."""
    standbys = _find_standbys(domain_map, lease_map, domain_name)
    if standbys is None or lease_map is None:
        return "?"
    more = len(standbys) - SHOWN_STANDBYS_MAX
    shown = [*standbys[:SHOWN_STANDBYS_MAX], *([f"{more:,} more"] if more > 0 else [])]
    unknown = lease_map.client_ids_without_report - set(standbys)
    members = domain_map.live_clients(domain_name)
    if any(member.client_id in unknown and member.is_candidate for member in members):
        shown.append("?")
    return ", ".join(shown) or "none"


def _assign_queue_and_print(
    database: DatabaseSettings,
    queue: str,
    to: str,
    check_owner: Callable[[QueueMovePreview], None],
    *,
    as_json: bool,
) -> None:
    before, new_leader = run_async(assign_queue_to_domain, database, queue, to, check_owner)
    if as_json:
        print_json({"queue": queue, "before": before, "after": to, "leader": new_leader})
        return
    leader = f"its leader is {new_leader}"
    if new_leader is None:
        leader = f"domain {to} has no leader now"
        if to != DEFAULT_DOMAIN:
            leader += f": start a worker of it (riverpy worker --leader-domain {to})"
    print_text(make_printable(f"queue {queue} moved from domain {before} to {to}; {leader}"))


async def assign_queue_to_domain(
    database: DatabaseSettings, queue: str, to: str, check_owner: Callable[[QueueMovePreview], None]
) -> tuple[str, str | None]:
    """Assign a queue to a domain. Return the previous domain of the queue, and the leader of the
    new domain (None: it has no leader). `check_owner` raises if the queue must not be moved."""
    async with open_command_connection(database) as found:
        found.require_riverpy_migration(DOMAINS_MIGRATION, "tables of domains")
        before: str | None = None
        purpose = "waiting for the leaders' transactions"
        while before is None:
            assignment = _try_to_assign_queue(found, queue, to, check_owner)
            before = await wait_for_statement(purpose, assignment)
        seen = await found.run_read_statement(read_domains)
    leader = seen.last_leader(to)
    return before, None if leader is None or leader.has_lease_ended else leader.holder


async def _try_to_assign_queue(
    database: CommandConnection,
    queue: str,
    to: str,
    check_owner: Callable[[QueueMovePreview], None],
) -> str | None:
    """Assign a queue to a domain, and return the previous domain. If another session has moved the
    queue in the meantime, change nothing and return None."""
    connection, schema = database.connection, database.schema
    owner = await domain_preview_queue_move(connection, schema, queue=queue, new_domain=to)
    before = owner.owner_domain or DEFAULT_DOMAIN
    if before == to:
        raise CommandError(f"queue {queue!r} belongs to domain {to!r} already")
    check_owner(owner)
    async with connection.transaction(isolation="read_committed"):
        await domain_lock_maintenance(connection, schema, domains=(before, to))
        owner = await domain_preview_queue_move(connection, schema, queue=queue, new_domain=to)
        if (owner.owner_domain or DEFAULT_DOMAIN) != before:
            return None
        check_owner(owner)
        await domain_assign_queue(
            connection, schema, queue=queue, domain=to, assigned_by="riverpy domain"
        )
    return before


def _domain_to_json_object(
    domain_map: DomainMap, lease_map: LeaseReportMap | None, domain_name: str
) -> dict[str, object]:
    """Return the object for a domain in the `--json` output.

    `queues` has an object for each queue of the domain. It is None for the domain `default`,
    because `default` has all queues that no other domain has. `orphaned` of a queue is True if no
    client of the domain has sent a heartbeat for 10 minutes: then the leader of `default` maintains
    this queue. `last_seen_at` is None if the domain never had a client.
    """
    members = domain_map.live_clients(domain_name)
    is_default = domain_name == DEFAULT_DOMAIN
    owners = domain_map.owned_queues(domain_name)
    has_had_client = bool(owners) and domain_map.has_had_client(domain_name)
    queues = [
        {
            "queue": owner.queue,
            "claimed_by": owner.claimed_by,
            "claimed_at": owner.claimed_at,
            "last_seen_at": owner.last_seen_at if has_had_client else None,
            "orphaned": owner.is_orphaned,
        }
        for owner in owners
    ]
    return {
        "domain": domain_name,
        "lease": "river_leader" if is_default else domain_lease_name(domain_name),
        "leader": _leader_to_json_object(domain_map.last_leader(domain_name)),
        "clients": [member.client_id for member in members],
        "candidates": [member.client_id for member in members if member.is_candidate],
        "standbys": _find_standbys(domain_map, lease_map, domain_name),
        "queues": None if is_default else queues,
    }


def _leader_to_json_object(leader: DomainLeader | None) -> dict[str, object] | None:
    """Return the object for a leader in the `--json` output. Return None if the domain has no
    leader now. `held_for` and `expires_in` are in seconds."""
    if (
        leader is None
        or leader.has_lease_ended
        or leader.expires_at is None
        or leader.seconds_until_expiry is None
    ):
        return None
    held_for = (leader.expires_at - leader.elected_at).total_seconds() - leader.seconds_until_expiry
    return {
        "holder": leader.holder,
        "epoch": leader.epoch,
        "elected_at": leader.elected_at,
        "held_for": round(held_for, 3),
        "expires_at": leader.expires_at,
        "expires_in": round(leader.seconds_until_expiry, 3),
        "foreign": not leader.is_riverpy_client,
    }


def _leader_to_cells(leader: DomainLeader | None) -> tuple[str, int | None, str | None, str | None]:
    if leader is None or leader.has_lease_ended:
        return "none", None, None, None
    owner = leader.holder if leader.is_riverpy_client else f"{leader.holder} (not riverpy)"
    since = format_time(leader.elected_at.replace(microsecond=0))
    return owner, leader.epoch, since, f"{format_seconds(leader.seconds_until_expiry or 0)} left"


def _domain_to_table_row(
    domain_map: DomainMap, lease_map: LeaseReportMap | None, domain_name: str
) -> tuple[object, ...]:
    members = domain_map.live_clients(domain_name)
    numbers = len(members), sum(member.is_candidate for member in members)
    queues = ", ".join(owner.queue for owner in domain_map.owned_queues(domain_name)) or "none"
    if domain_name == DEFAULT_DOMAIN:
        queues = "all others"
    standbys = _format_standbys(domain_map, lease_map, domain_name)
    leader = _leader_to_cells(domain_map.last_leader(domain_name))
    return (domain_name, *leader, *numbers, standbys, queues)


def _schema_leader_to_table_row(
    domain_map: DomainMap, lease_map: LeaseReportMap | None
) -> tuple[object, ...]:
    """Return the table row of the leader that holds the lease `@schema`."""
    standbys = _format_standbys(domain_map, lease_map, SCHEMA_LEASE_NAME)
    if not domain_map.has_leader(SCHEMA_LEASE_NAME) and domain_map.has_leader_for_orphaned_queues():
        return SCHEMA_LEASE_NAME, "as default", None, None, None, None, None, standbys, None
    cells = _leader_to_cells(domain_map.last_leader(SCHEMA_LEASE_NAME))
    return SCHEMA_LEASE_NAME, *cells, None, None, standbys, None
