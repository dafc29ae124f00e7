"""Domains: whether each is led, by clients that agree, and whose queues are kept by nobody."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE
from riverpy._postgres.domains import ORPHANED_AFTER
from riverpy._tools.doctor.finding import Finding, Level, count, names, shown, span
from riverpy._tools.doctor.fleet import ELECTION_LIMIT
from riverpy._tools.doctor.waiting_jobs import late_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.domain_map import DomainMap


@dataclass(frozen=True)
class Undone:
    """What waits for a leader, or for a worker."""

    due: frozenset[str]
    """Queues in which jobs are due."""
    running: Mapping[str, int]
    """How many running jobs of dead clients each queue has."""
    periodic: Mapping[str, list[str]]
    """The periodic jobs of each domain that are late."""


NOTHING_KNOWN = Undone(frozenset(), {}, {})


async def check_domains(patient: DatabaseSnapshot) -> list[Finding]:
    """How the domains stand.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    seen = await patient.domains()
    if seen is None:
        text = "not known: their tables are not there, or not to be read (see `schema`, `grants`)"
        return [Finding(Level.OK, "domains", text, data={"domains": None})]
    data: dict[str, object] = {
        "domains": {
            domain: {
                "led": seen.is_led(domain),
                "clients": [one.client_id for one in seen.living(domain)],
                "queues": [one.queue for one in seen.owned(domain)],
            }
            for domain in seen.others
        }
    }
    text = "none but default, whose leader keeps all queues"
    if seen.others:
        text = f"{count(len(seen.others), 'domain')} beside default: {names(seen.others)}"
    found = problems(seen, await _undone(patient) if seen.others else NOTHING_KNOWN)
    return [Finding(Level.OK, "domains", text, data=data), *shown(found)]


async def _undone(patient: DatabaseSnapshot) -> Undone:
    clients = await patient.clients() or []
    dead = {one.client_id for one in clients if not one.is_alive}
    running: Counter[str] = Counter()
    for row in await patient.running(clients):
        if row.client_id in dead:
            running[row.queue] += row.jobs
    periodic: dict[str, list[str]] = {}
    for row in late_of(await patient.periodic()):
        if row.domain != DEFAULT_DOMAIN:
            periodic.setdefault(row.domain, []).append(row.id)
    due = frozenset(row.queue for row in await patient.places() if (row.due_for or 0) >= 0)
    return Undone(due, running, periodic)


def problems(seen: DomainMap, undone: Undone) -> list[Finding]:
    """What is not as it should be.

    Args:
        seen: the domains.
        undone: what waits.
    """
    found: list[Finding] = []
    for domain in seen.others:
        found += _lead(seen, domain) if seen.living(domain) else _deserted(seen, domain, undone)
        found += _settings(seen, domain)
    if seen.others:
        found += [*_shared(seen), *_unowned(seen), *_foreign(seen), *_old(seen), *_schema(seen)]
    return found


def _lead(seen: DomainMap, domain: str) -> list[Finding]:
    """A domain that has living clients, and no leader."""
    if seen.is_led(domain):
        return []
    candidates = [one for one in seen.living(domain) if one.candidate]
    data: dict[str, object] = {
        "domain": domain,
        "candidates": [one.client_id for one in candidates],
        "queues": [one.queue for one in seen.owned(domain)],
    }
    undone = "scheduled jobs and retries of its queues are not moved on"
    if all(one.is_stopping for one in seen.living(domain)):
        text = f'nobody leads domain "{domain}", whose clients are stopping: {undone}'
        return [Finding(Level.WARN, "domains", text, "start a client of that domain", data)]
    if not candidates:
        return [
            Finding(
                Level.FAIL,
                "domains",
                f'nobody leads domain "{domain}", and no client of it stands for election: '
                f"{undone}",
                "let one of its workers stand, and restart it: without --no-candidate, "
                "RIVERPY_CANDIDATE=0 or Config(candidate=False)",
                data,
            )
        ]
    recent = max(one.running for one in candidates) < ELECTION_LIMIT
    who = names(one.client_id for one in candidates)
    return [
        Finding(
            Level.WARN if recent else Level.FAIL,
            "domains",
            f'nobody leads domain "{domain}", though {count(len(candidates), "client")} could: '
            f"{who}",
            "it takes a new client some seconds"
            if recent
            else "see their logs, which say why they do not, and `grants` and `locks` here; an "
            "idle transaction that holds riverpy_lease keeps everybody from it",
            data,
        )
    ]


def _deserted(seen: DomainMap, domain: str, undone: Undone) -> list[Finding]:
    """A domain without a living client, whose queues are still its own."""
    owned = seen.owned(domain)
    if not owned:
        return []
    silent = min(one.silent for one in owned)
    queues = [one.queue for one in owned]
    early = [one.queue for one in owned if not one.is_orphaned]
    orphans = [one.queue for one in owned if one.is_orphaned]
    unkept = early if seen.keeps_orphans() else queues
    said: list[str] = []
    if early:
        said.append(f"until {span(ORPHANED_AFTER)} have passed nobody keeps queue {names(early)}")
    if orphans and seen.keeps_orphans():
        who = SCHEMA_LEASE if seen.is_led(SCHEMA_LEASE) else DEFAULT_DOMAIN
        said.append(f"the leader of {who} keeps queue {names(orphans)} until it is back")
    elif orphans:
        said.append(
            f"nobody keeps queue {names(orphans)}, for no client of riverpy's leads default"
        )
    due = [queue for queue in unkept if queue in undone.due]
    running = {queue: undone.running[queue] for queue in unkept if queue in undone.running}
    late = undone.periodic.get(domain, [])
    failures: list[str] = []
    if due:
        failures.append(f"jobs are due in {names(due)}")
    if running:
        jobs = count(sum(running.values()), "running job")
        failures.append(f"{jobs} of dead clients in {names(running)} wait to be given back")
    if late:
        failures.append(f"its periodic jobs are late, which nobody else inserts: {names(late)}")
    text = f'no client of domain "{domain}" has given a sign of life for {span(silent)}: '
    return [
        Finding(
            Level.FAIL if failures else Level.WARN,
            "domains",
            text + "; ".join([*said, *failures]),
            f"start a worker of it (riverpy worker --leader-domain {quote(domain)}), or give its "
            f"queues away: riverpy domain move {quote(queues[0])} --to {DEFAULT_DOMAIN}",
            {
                "domain": domain,
                "silent": round(silent, 3),
                "queues": queues,
                "unkept": unkept,
                "due": due,
                "running": running,
                "late": late,
            },
        )
    ]


def _settings(seen: DomainMap, domain: str) -> list[Finding]:
    """Clients of one domain of whom it matters which leads."""
    by_settings: dict[str, list[str]] = {}
    for one in seen.living(domain):
        if one.candidate and one.settings is not None:
            by_settings.setdefault(one.settings, []).append(one.client_id)
    if len(by_settings) < 2:
        return []
    first, second, *_ = by_settings.values()
    return [
        Finding(
            Level.WARN,
            "domains",
            f'clients of domain "{domain}" have {len(by_settings)} different sets of periodic jobs '
            f"or retention, and those of whoever leads count: {names(first)} against "
            f"{names(second)}",
            "nothing while a new version is rolled out; else give all of them the same, or domains "
            "of their own",
            {"domain": domain, "sets": list(by_settings.values())},
        )
    ]


def _shared(seen: DomainMap) -> list[Finding]:
    """Queues that clients of another domain work too."""
    found: list[Finding] = []
    for one in seen.owners:
        strangers = [
            member
            for member in seen.members
            if member.domain != one.domain and one.queue in member.queues
        ]
        if not strangers:
            continue
        domains = sorted({member.domain for member in strangers})
        who = names(member.client_id for member in strangers)
        found.append(
            Finding(
                Level.WARN,
                "domains",
                f'queue "{one.queue}" belongs to domain "{one.domain}", whose leader keeps it, and '
                f"clients of {names(domains)} work it: {who}",
                "nothing if that is meant (on_domain_conflict); else take the queue from them, or "
                f"give it to them: riverpy domain move {quote(one.queue)} --to "
                f"{quote(domains[0])}",
                {
                    "queue": one.queue,
                    "domain": one.domain,
                    "domains": domains,
                    "clients": [member.client_id for member in strangers],
                },
            )
        )
    return found


def _unowned(seen: DomainMap) -> list[Finding]:
    """Queues that clients of a domain work and that are no domain's."""
    owned = {one.queue for one in seen.owners}
    found: list[Finding] = []
    for domain in seen.others:
        worked = {queue for one in seen.living(domain) for queue in one.queues}
        queues = sorted(worked - owned)
        if queues:
            found.append(
                Finding(
                    Level.WARN,
                    "domains",
                    f'clients of domain "{domain}" work queue {names(queues)}, which no domain '
                    "has: the leader of default keeps "
                    f"{'it' if len(queues) == 1 else 'them'}"
                    + ("" if seen.is_led(DEFAULT_DOMAIN) else ", and nobody leads default"),
                    "nothing if that is meant; else: riverpy domain claim "
                    f"{quote(queues[0])} --domain {quote(domain)}",
                    {"domain": domain, "queues": queues},
                )
            )
    return found


def _foreign(seen: DomainMap) -> list[Finding]:
    """A leader of `default` that knows of no domain."""
    lead = seen.lead(DEFAULT_DOMAIN)
    if lead is None or not seen.has_foreign_default():
        return []
    kinds = sorted(
        {kind for domain in seen.others for one in seen.living(domain) for kind in one.kinds}
    )
    queues = [one.queue for one in seen.owners]
    return [
        Finding(
            Level.WARN,
            "domains",
            f"{lead.holder} leads default, is no client of riverpy's and knows of no domain: it "
            f"keeps queue {names(queues)} too, by its own retention, and discards jobs that run "
            f"for long, if it has no worker for them. At risk: {names(kinds) or 'no kind'}",
            "register stubs for these kinds in Go (docs/go.md), let only clients of riverpy's "
            "stand, or give these queues a schema of their own (docs/domains.md)",
            {"leader_id": lead.holder, "kinds_at_risk": kinds, "queues": queues},
        )
    ]


def _old(seen: DomainMap) -> list[Finding]:
    """Clients of `default` that lead it, or may, and know of no domain."""
    lead = seen.lead(DEFAULT_DOMAIN) if seen.is_default_old() else None
    leader = None if lead is None else lead.holder
    candidates = [
        one.client_id
        for one in seen.living(DEFAULT_DOMAIN)
        if one.candidate and one.settings is None and one.client_id != leader
    ]
    if leader is None and not candidates:
        return []
    queues = [one.queue for one in seen.owners]
    if leader is not None:
        text = f"{leader} leads default and does not say that it knows of domains"
        if candidates:
            text += f", nor does {names(candidates)}, which could"
    else:
        text = f"who could lead default does not say that it knows of domains: {names(candidates)}"
    verb = "would keep" if leader is None else "keeps"
    return [
        Finding(
            Level.WARN,
            "domains",
            f"{text}. One of an older version {verb} queue {names(queues) or 'of domains'} too, "
            "and deletes jobs that ended by its own retention",
            "restart it with this version of riverpy, also if it has it: a client says so at its "
            "start, after `riverpy migrate up`",
            {"leader_id": leader, "candidates": candidates, "queues": queues},
        )
    ]


def _schema(seen: DomainMap) -> list[Finding]:
    """Work that a schema has one of, and that nobody does."""
    candidates = [one for one in seen.members if one.candidate]
    is_early = not candidates or max(one.running for one in candidates) < ELECTION_LIMIT
    if seen.keeps_orphans() or is_early:
        return []
    undone = "dead clients are not forgotten, and queues of gone domains not kept"
    if not seen.is_led(DEFAULT_DOMAIN):
        undone = f"indexes are not rebuilt, {undone}"
    return [
        Finding(
            Level.WARN,
            "domains",
            f"no client of riverpy's leads default, and nobody holds {SCHEMA_LEASE}: {undone}",
            f"see the log of {names(one.client_id for one in candidates)}, and `grants` and "
            "`locks` here",
            {"candidates": [one.client_id for one in candidates]},
        )
    ]
