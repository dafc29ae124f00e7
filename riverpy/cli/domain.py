"""`riverpy domain`: list leader domains, and move queues between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._names import (
    DEFAULT_DOMAIN,
    SCHEMA_LEASE,
    domain_lease,
)
from riverpy._postgres.domains import domain_assign_queue, domain_lock, domain_queue
from riverpy._postgres.schema import DOMAINS_VERSION
from riverpy._tools.doctor.domains import PendingWork, domain_problems
from riverpy._tools.doctor.finding import LEVEL_NAMES, Finding, named
from riverpy._tools.domain_map import DomainMap, read_domains
from riverpy._tools.text import count, span
from riverpy.cli._connected import connected, with_timeout
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_table, print_text, printable
from riverpy.cli._run import CommandError, run
from riverpy.cli._types import DOMAIN, QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from riverpy._postgres.domains import DomainLeader, QueueOwnership
    from riverpy.cli._connected import CommandConnection
    from riverpy.cli._options import DatabaseSettings


class HolderOutput(msgspec.Struct, frozen=True):
    """The leader of a domain, or of `@schema`, in `--json` output."""

    holder: str
    epoch: int | None
    """The epoch of the term. None for domain `default`, whose lease is River's row without
    epochs."""
    elected_at: datetime
    held_for: float
    """The time since the start of the term, in seconds."""
    expires_at: datetime | None
    expires_in: float | None
    """The time until the lease expires, in seconds by the server's clock."""
    foreign: bool
    """Whether the leader is not a client of riverpy."""


class QueueOutput(msgspec.Struct, frozen=True):
    """A queue of a domain, in `--json` output."""

    queue: str
    claimed_by: str
    claimed_at: datetime
    last_seen_at: datetime
    orphaned: bool
    """Whether no client of the domain has sent a heartbeat for 10 minutes. Then the leader of
    `default` maintains the queue."""


class DomainOutput(msgspec.Struct, frozen=True):
    """A domain in `--json` output."""

    domain: str
    lease: str
    """The name of the leader's lease."""
    leader: HolderOutput | None
    """The leader of the domain. None: there is no leader."""
    clients: list[str]
    """The clients with heartbeats."""
    candidates: list[str]
    queues: list[QueueOutput] | None
    """The queues of the domain. None for `default`, which has all queues of no other domain."""


class ListOutput(msgspec.Struct, frozen=True):
    """The `--json` output of `domain list`."""

    domains: list[DomainOutput]
    schema: HolderOutput | None
    """The leader of `@schema`, which does the tasks of the whole schema while `default` has no
    leader."""
    problems: list[Finding]


class ChangeOutput(msgspec.Struct, frozen=True):
    """The `--json` output of `move` and `claim`."""

    queue: str
    before: str
    after: str
    leader: str | None
    """The leader of the new domain. None: there is no leader."""


@click.group
def domain() -> None:
    """List leader domains, and move queues between them."""


@domain.command("list")
@json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List domains with their leaders, clients, queues and problems. Times are UTC.

    LAST SEEN is the last heartbeat of a client of the domain. The row @schema shows the leader that
    does the tasks of the whole schema, such as rebuilding indexes. `as default` means the leader of
    default.
    """
    seen = run(_read, database)
    output = ListOutput(
        domains=[_domain(seen, name) for name in (DEFAULT_DOMAIN, *seen.others)],
        schema=_holder(seen.lead(SCHEMA_LEASE)),
        problems=named("domains", domain_problems(seen, PendingWork())),
    )
    if as_json:
        print_json(output)
        return
    print_table(
        ("DOMAIN", "LEADER", "EPOCH", "SINCE", "LEASE", "CLIENTS", "CANDIDATES", "QUEUES"),
        [_row(one) for one in output.domains] + [_schema_row(seen)] * bool(seen.others),
    )
    queues = [(one.domain, queue) for one in output.domains for queue in one.queues or ()]
    if queues:
        print_text("")
        print_table(
            ("QUEUE", "DOMAIN", "CLAIMED BY", "CLAIMED", "LAST SEEN"),
            [
                (
                    queue.queue,
                    name,
                    queue.claimed_by,
                    format_time(queue.claimed_at.replace(microsecond=0)),
                    format_time(queue.last_seen_at.replace(microsecond=0)),
                )
                for name, queue in queues
            ],
        )
    for finding in output.problems:
        print_text("")
        print_text(printable(f"{LEVEL_NAMES[finding.level]}  {finding.text}"))
        print_text(printable(f"      fix: {finding.fix}"))


@domain.command
@click.argument("queue", type=QUEUE)
@click.option("--to", metavar="DOMAIN", required=True, type=DOMAIN, help="Name of the new domain.")
@json_option
@database_options
def move(database: DatabaseSettings, *, queue: str, to: str, as_json: bool) -> None:
    """Move a queue to another domain, or back to default.

    The command waits until neither leader is writing. Then the new leader maintains the queue
    instead of the old one. Change the clients' settings too, because clients claim their queues
    when they start. If no client of the new domain runs, the command warns. After 10 minutes
    without a heartbeat of the domain, the leader of default maintains the queue. The exit code is 1
    if the queue or the domain is unknown, or if the domain has the queue already.
    """

    def allow(holder: QueueOwnership) -> None:
        if not holder.is_known:
            raise CommandError(
                f"there is no queue {queue!r}: a queue exists after a client has worked it. "
                f"To prepare one: riverpy domain claim {queue} --domain {to}"
            )
        if not holder.is_domain_known:
            raise CommandError(
                f"no client or queue has the domain {to!r}: start a worker of it "
                f"(--leader-domain {to}), or: riverpy domain claim {queue} --domain {to}"
            )

    _change(database, queue, to, allow, as_json=as_json)


@domain.command
@click.argument("queue", type=QUEUE)
@click.option(
    "--domain",
    "to",
    metavar="DOMAIN",
    required=True,
    type=DOMAIN,
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

    def allow(holder: QueueOwnership) -> None:
        if holder.living and not force:
            raise CommandError(
                f"queue {queue!r} belongs to domain {holder.domain!r}, which has "
                f"{count(holder.living, 'running client')}: stop them, or take it with --force"
            )

    if to == DEFAULT_DOMAIN:
        raise click.BadParameter(
            f"default has all unclaimed queues: use riverpy domain move {queue} --to default",
            param_hint="'--domain'",
        )
    _change(database, queue, to, allow, as_json=as_json)


async def _read(database: DatabaseSettings) -> DomainMap:
    async with connected(database) as found:
        found.expect_version(DOMAINS_VERSION, "tables of domains")
        return await found.read(read_domains)


def _change(
    database: DatabaseSettings,
    queue: str,
    to: str,
    allow: Callable[[QueueOwnership], None],
    *,
    as_json: bool,
) -> None:
    done = run(assign_queue, database, queue, to, allow)
    if as_json:
        print_json(done)
        return
    leader = f"its leader is {done.leader}"
    if done.leader is None:
        leader = "it has no leader now"
        if to != DEFAULT_DOMAIN:
            leader += f": start a worker of it (riverpy worker --leader-domain {to})"
    print_text(printable(f"queue {queue} moved from domain {done.before} to {to}; {leader}"))


async def assign_queue(
    database: DatabaseSettings, queue: str, to: str, allow: Callable[[QueueOwnership], None]
) -> ChangeOutput:
    """Assign a queue to a domain, unless `allow` raises.

    Raises:
        CommandError: the domain has the queue already, or as `allow`. Nothing was changed.
    """
    async with connected(database) as found:
        found.expect_version(DOMAINS_VERSION, "tables of domains")
        before: str | None = None
        purpose = "waiting for the leaders' transactions"
        while before is None:
            before = await with_timeout(purpose, _try_to_assign(found, queue, to, allow))
        seen = await found.read(read_domains)
    leader = _holder(seen.lead(to))
    return ChangeOutput(queue, before, to, None if leader is None else leader.holder)


async def _try_to_assign(
    found: CommandConnection, queue: str, to: str, allow: Callable[[QueueOwnership], None]
) -> str | None:
    """Assign the queue, and return its old domain. None: another session has moved the queue, and
    nothing was changed."""
    connection, schema = found.connection, found.schema
    holder = await domain_queue(connection, schema, queue=queue, domain=to)
    before = holder.domain or DEFAULT_DOMAIN
    if before == to:
        raise CommandError(f"queue {queue!r} belongs to domain {to!r} already")
    allow(holder)
    async with connection.transaction(isolation="read_committed"):
        await domain_lock(connection, schema, domains=(before, to))
        holder = await domain_queue(connection, schema, queue=queue, domain=to)
        if (holder.domain or DEFAULT_DOMAIN) != before:
            return None
        allow(holder)
        await domain_assign_queue(connection, schema, queue=queue, domain=to, by="riverpy domain")
    return before


def _domain(seen: DomainMap, name: str) -> DomainOutput:
    living = seen.live_clients(name)
    queues = [
        QueueOutput(one.queue, one.claimed_by, one.claimed_at, one.last_seen_at, one.is_orphaned)
        for one in seen.owned(name)
    ]
    is_default = name == DEFAULT_DOMAIN
    return DomainOutput(
        domain=name,
        lease="river_leader" if is_default else domain_lease(name),
        leader=_holder(seen.lead(name)),
        clients=[one.client_id for one in living],
        candidates=[one.client_id for one in living if one.candidate],
        queues=None if is_default else queues,
    )


def _holder(lead: DomainLeader | None) -> HolderOutput | None:
    if lead is None or lead.is_over or lead.expires_at is None or lead.remaining is None:
        return None
    held_for = (lead.expires_at - lead.elected_at).total_seconds() - lead.remaining
    return HolderOutput(
        holder=lead.holder,
        epoch=lead.epoch,
        elected_at=lead.elected_at,
        held_for=round(held_for, 3),
        expires_at=lead.expires_at,
        expires_in=round(lead.remaining, 3),
        foreign=not lead.is_registered,
    )


def _lead_cells(leader: HolderOutput | None) -> tuple[str, int | None, str | None, str | None]:
    if leader is None:
        return "none", None, None, None
    since = format_time(leader.elected_at.replace(microsecond=0))
    who = f"{leader.holder} (not riverpy)" if leader.foreign else leader.holder
    return who, leader.epoch, since, f"{span(leader.expires_in or 0)} left"


def _row(one: DomainOutput) -> tuple[object, ...]:
    queues = "all others" if one.queues is None else ", ".join(row.queue for row in one.queues)
    numbers = len(one.clients), len(one.candidates)
    return one.domain, *_lead_cells(one.leader), *numbers, queues or "none"


def _schema_row(seen: DomainMap) -> tuple[object, ...]:
    holder = _holder(seen.lead(SCHEMA_LEASE))
    if holder is None and seen.maintains_orphans():
        return SCHEMA_LEASE, "as default", None, None, None, None, None, None
    return SCHEMA_LEASE, *_lead_cells(holder), None, None, None
