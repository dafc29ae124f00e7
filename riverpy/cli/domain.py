"""`riverpy domain`: list domains, and change which of them has a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from riverpy._names import (
    DEFAULT_DOMAIN,
    SCHEMA_LEASE,
    domain_lease,
    validate_queue,
)
from riverpy._postgres.domains import domain_assign_queue, domain_lock, domain_queue
from riverpy._tools.doctor.domains import NO_PENDING_WORK, domain_problems
from riverpy._tools.doctor.finding import LEVEL_NAMES, Finding
from riverpy._tools.domain_map import DomainMap, read_domains
from riverpy._tools.text import count, span
from riverpy.cli._connected import bounded, connected
from riverpy.cli._domain import domain_name, expect_domains
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_table, print_text, printable
from riverpy.cli._run import CommandError, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from riverpy._postgres.domains import DomainLeader, QueueOwnership
    from riverpy.cli._connected import Connected
    from riverpy.cli._options import DatabaseSettings


def _queue_name(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    validate_queue(value)
    return value


class HolderOutput(msgspec.Struct, frozen=True):
    """Who leads a domain, or holds `@schema`, as `--json` prints it."""

    holder: str
    epoch: int | None
    """None: the lease is River's own row, of `default`."""
    elected_at: datetime
    held_for: float
    """Seconds since."""
    expires_at: datetime | None
    expires_in: float | None
    """Seconds, by the server's clock."""
    foreign: bool
    """Whether it is no client of riverpy's."""


class QueueOutput(msgspec.Struct, frozen=True):
    """A queue that a domain has, as `--json` prints it."""

    queue: str
    claimed_by: str
    claimed_at: datetime
    last_seen_at: datetime
    orphaned: bool
    """Whether no client of the domain has given a sign of life for 10 minutes, so that the leader
    of `default` keeps it."""


class DomainOutput(msgspec.Struct, frozen=True):
    """A domain, as `--json` prints it."""

    domain: str
    lease: str
    """The lease of whoever leads it."""
    leader: HolderOutput | None
    """None: nobody leads it."""
    clients: list[str]
    """Those that give signs of life."""
    candidates: list[str]
    queues: list[QueueOutput] | None
    """None: all that no other domain has."""


class ListOutput(msgspec.Struct, frozen=True):
    """All domains, as `--json` prints them."""

    domains: list[DomainOutput]
    schema: HolderOutput | None
    """Who does what a schema has one of while nobody leads `default`. None: nobody."""
    problems: list[Finding]


class ChangeOutput(msgspec.Struct, frozen=True):
    """What was changed, as `--json` prints it."""

    queue: str
    before: str
    after: str
    leader: str | None
    """Who leads the domain that it went to. None: nobody does."""


@click.group
def domain() -> None:
    """List domains, and change which of them has a queue."""


@domain.command("list")
@json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List domains: leader, clients, queues, and what is wrong. Times are UTC.

    LAST SEEN: when a client of the domain last gave a sign of life. @schema: who does what a schema
    has one of, as rebuilding indexes; `as default`: who leads that does it.
    """
    seen = run(_read, database)
    found = ListOutput(
        domains=[_domain(seen, name) for name in (DEFAULT_DOMAIN, *seen.others)],
        schema=_holder(seen.lead(SCHEMA_LEASE)),
        problems=domain_problems(seen, NO_PENDING_WORK),
    )
    if as_json:
        print_json(found)
        return
    print_table(
        ("DOMAIN", "LEADER", "EPOCH", "SINCE", "LEASE", "CLIENTS", "CANDIDATES", "QUEUES"),
        [_row(one) for one in found.domains] + [_schema_row(seen)] * bool(seen.others),
    )
    queues = [(one.domain, queue) for one in found.domains for queue in one.queues or ()]
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
    for finding in found.problems:
        print_text("")
        print_text(printable(f"{LEVEL_NAMES[finding.level]}  {finding.text}"))
        print_text(printable(f"      fix: {finding.fix}"))


@domain.command
@click.argument("queue", callback=_queue_name)
@click.option(
    "--to", metavar="DOMAIN", required=True, callback=domain_name, help="Which is to have it."
)
@json_option
@database_options
def move(database: DatabaseSettings, *, queue: str, to: str, as_json: bool) -> None:
    """Give a queue to another domain, or back to default.

    Waits until neither leader is writing. Then the one stops and the other begins to keep the queue
    at its next pass. Change the clients' settings too: what they claim at a start is
    what they are told to. To move it is no sign of life of the domain: if no client of it runs, the
    output warns, and the queue is kept once the domain was silent for 10 minutes, by the leader of
    default. Exit code 1 if nobody knows the queue or the domain, or if it has the queue already.
    """

    def allow(holder: QueueOwnership) -> None:
        if not holder.is_known:
            raise CommandError(
                f"there is no queue {queue!r}: a queue exists after a client has worked it. "
                f"To prepare one: riverpy domain claim {queue} --domain {to}"
            )
        if not holder.is_domain_known:
            raise CommandError(
                f"no client and no queue is of domain {to!r}: start a worker of it "
                f"(--leader-domain {to}), or: riverpy domain claim {queue} --domain {to}"
            )

    _change(database, queue, to, allow, as_json=as_json)


@domain.command
@click.argument("queue", callback=_queue_name)
@click.option(
    "--domain",
    "to",
    metavar="DOMAIN",
    required=True,
    callback=domain_name,
    help="Which is to have it.",
)
@click.option("--force", is_flag=True, help="Take it from a domain that has living clients.")
@json_option
@database_options
def claim(database: DatabaseSettings, *, queue: str, to: str, force: bool, as_json: bool) -> None:
    """Claim a queue for a domain, as its clients do when they start.

    Exit code 1 if the domain has the queue already, or if it is another's that has living clients;
    then use --force.
    """

    def allow(holder: QueueOwnership) -> None:
        if holder.living and not force:
            raise CommandError(
                f"queue {queue!r} belongs to domain {holder.domain!r}, which has "
                f"{count(holder.living, 'living client')}: stop them, or take it with --force"
            )

    if to == DEFAULT_DOMAIN:
        raise click.BadParameter(
            f"default has what nobody claims: riverpy domain move {queue} --to default",
            param_hint="'--domain'",
        )
    _change(database, queue, to, allow, as_json=as_json)


async def _read(database: DatabaseSettings) -> DomainMap:
    async with connected(database) as found:
        expect_domains(found, database)
        return await bounded("reading the domains", read_domains(found.connection, found.schema))


def _change(
    database: DatabaseSettings,
    queue: str,
    to: str,
    allow: Callable[[QueueOwnership], None],
    *,
    as_json: bool,
) -> None:
    done = run(give_queue, database, queue, to, allow)
    if as_json:
        print_json(done)
        return
    led = f"{done.leader} leads it"
    if done.leader is None:
        led = "nobody leads it now"
        if to != DEFAULT_DOMAIN:
            led += f": start a worker of it (riverpy worker --leader-domain {to})"
    print_text(printable(f"queue {queue} was {done.before}'s and is {to}'s; {led}"))


async def give_queue(
    database: DatabaseSettings, queue: str, to: str, allow: Callable[[QueueOwnership], None]
) -> ChangeOutput:
    """Let a domain have a queue, if `allow` does not raise.

    Raises:
        CommandError: it has the queue already, or as `allow`. Nothing was changed.
    """
    async with connected(database) as found:
        expect_domains(found, database)
        before: str | None = None
        purpose = "waiting for what the leaders write"
        while before is None:
            before = await bounded(purpose, _try_to_give(found, queue, to, allow))
        seen = await bounded("reading the domains", read_domains(found.connection, found.schema))
    leader = _holder(seen.lead(to))
    return ChangeOutput(queue, before, to, None if leader is None else leader.holder)


async def _try_to_give(
    found: Connected, queue: str, to: str, allow: Callable[[QueueOwnership], None]
) -> str | None:
    """Give the queue to a domain; returns which had it. None: it changed hands meanwhile, and
    nothing was done."""
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
        return "nobody", None, None, None
    since = format_time(leader.elected_at.replace(microsecond=0))
    who = f"{leader.holder} (not riverpy's)" if leader.foreign else leader.holder
    return who, leader.epoch, since, f"{span(leader.expires_in or 0)} more"


def _row(one: DomainOutput) -> tuple[object, ...]:
    queues = "all others" if one.queues is None else ", ".join(row.queue for row in one.queues)
    numbers = len(one.clients), len(one.candidates)
    return one.domain, *_lead_cells(one.leader), *numbers, queues or "none"


def _schema_row(seen: DomainMap) -> tuple[object, ...]:
    holder = _holder(seen.lead(SCHEMA_LEASE))
    if holder is None and seen.maintains_orphans():
        return SCHEMA_LEASE, "as default", None, None, None, None, None, None
    return SCHEMA_LEASE, *_lead_cells(holder), None, None, None
