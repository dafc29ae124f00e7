"""Check of the leader domains. A domain is a group of queues with its own leader and its own
clients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME
from riverpy._postgres.domains import DOMAIN_ORPHANED_AFTER_SECONDS
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.leader import ELECTION_TIMEOUT, NO_CANDIDATE_FIX, failed_election_finding
from riverpy._tools.doctor.waiting_jobs import find_late_periodic_jobs
from riverpy._tools.text import format_count, format_names, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.domain_map import DomainMap


@dataclass(frozen=True)
class PendingWork:
    """What waits for a leader or a worker: due jobs, running jobs of dead clients, and late
    periodic jobs."""

    queues_with_due_jobs: Sequence[str] = ()
    """The names of the queues with due jobs."""
    dead_client_job_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of running jobs of dead clients in each queue. The key is the name of the
    queue."""
    late_periodic_job_ids: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The ids of the late periodic jobs of each domain. The key is the name of the domain."""


async def check_domains(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the domains other than `default`, and the problems of all domains."""
    domains = await snapshot.domains()
    if domains is None:
        text = "not known: their tables are missing or cannot be read (see `schema`, `grants`)"
        return [ok_finding(text, domains=None)]
    if not domains.non_default_domains:
        return [ok_finding("only default. Its leader maintains all queues", domains={})]
    facts = {
        domain: {
            "led": domains.has_leader(domain),
            "clients": [client.client_id for client in domains.live_clients(domain)],
            "queues": [row.queue for row in domains.owned_queues(domain)],
        }
        for domain in domains.non_default_domains
    }
    others = domains.non_default_domains
    text = f"{format_count(len(others), 'domain')} beside default: {format_names(others)}"
    pending = await _read_pending_work(snapshot)
    return [ok_finding(text, domains=facts), *find_domain_problems(domains, pending)]


async def _read_pending_work(snapshot: DatabaseSnapshot) -> PendingWork:
    dead = {client.client_id for client in await snapshot.clients() or () if not client.is_alive}
    running: Counter[str] = Counter()
    for row in await snapshot.running_job_groups():
        if row.client_id in dead:
            running[row.queue] += row.job_count
    periodic: dict[str, list[str]] = {}
    for row in find_late_periodic_jobs(await snapshot.periodic_jobs()):
        periodic.setdefault(row.domain, []).append(row.id)
    due = [row.queue for row in await snapshot.backlogs() if (row.seconds_since_due or 0) >= 0]
    return PendingWork(due, running, periodic)


def find_domain_problems(domains: DomainMap, pending: PendingWork) -> list[Finding]:
    """Return the findings about problems of the domains."""
    if not domains.non_default_domains:
        return []
    found: list[Finding] = []
    for domain in domains.non_default_domains:
        if domains.live_clients(domain):
            found += _check_missing_leader(domains, domain)
        else:
            found += _check_missing_clients(domains, domain, pending)
        found += _check_different_settings(domains, domain)
    return [
        *found,
        *_check_shared_queues(domains),
        *_check_unowned_queues(domains),
        *_check_non_riverpy_leader(domains),
        *_check_outdated_clients(domains),
        *_check_missing_schema_maintainer(domains),
    ]


def _check_missing_leader(domains: DomainMap, domain: str) -> list[Finding]:
    """Return a finding if this domain has no leader. Call this only for a domain with live
    clients."""
    if domains.has_leader(domain):
        return []
    clients = domains.live_clients(domain)
    candidates = [client for client in clients if client.is_candidate]
    data: dict[str, object] = {
        "domain": domain,
        "candidates": [client.client_id for client in candidates],
        "queues": [row.queue for row in domains.owned_queues(domain)],
    }
    text = f'domain "{domain}" has no leader'
    effect = "scheduled jobs and retries of its queues do not become available"
    if all(client.is_stopping for client in clients):
        text += f", and all its clients are stopping: {effect}"
        return [warn_finding(text, "start a client of that domain", **data)]
    if not candidates:
        text += f", and no client of it takes part in leader election: {effect}"
        return [fail_finding(text, NO_CANDIDATE_FIX, **data)]
    return [failed_election_finding(text, candidates, "riverpy_lease", **data)]


def _check_missing_clients(domains: DomainMap, domain: str, pending: PendingWork) -> list[Finding]:
    """Return a finding if this domain owns queues. Call this only for a domain without live
    clients: the queues have no leader of their own."""
    owned = domains.owned_queues(domain)
    if not owned:
        return []
    silent = min(row.seconds_since_heartbeat for row in owned)
    queues = [row.queue for row in owned]
    early = [row.queue for row in owned if not row.is_orphaned]
    orphans = [row.queue for row in owned if row.is_orphaned]
    facts: list[str] = []
    if early:
        facts.append(
            f"no leader maintains queue {format_names(early)} until "
            f"{format_seconds(DOMAIN_ORPHANED_AFTER_SECONDS)} have passed"
        )
    if orphans and domains.has_leader_for_orphaned_queues():
        holder = SCHEMA_LEASE_NAME if domains.has_leader(SCHEMA_LEASE_NAME) else DEFAULT_DOMAIN
        facts.append(
            f"the leader of {holder} maintains queue {format_names(orphans)} until it is back"
        )
    elif orphans:
        facts.append(
            f"no leader maintains queue {format_names(orphans)}, because default has no riverpy "
            "leader"
        )
    unmaintained = early if domains.has_leader_for_orphaned_queues() else queues
    due = [queue for queue in unmaintained if queue in pending.queues_with_due_jobs]
    jobs = pending.dead_client_job_counts
    running = {queue: jobs[queue] for queue in unmaintained if queue in jobs}
    late = pending.late_periodic_job_ids.get(domain, [])
    text = f'no client of domain "{domain}" wrote a heartbeat for {format_seconds(silent)}'
    if not domains.has_had_client(domain):
        text = f'domain "{domain}" never had a client'
    if due:
        facts.append(f"jobs are due in {format_names(due)}")
    if running:
        number = format_count(sum(running.values()), "running job")
        facts.append(f"{number} of dead clients in {format_names(running)} are not rescued")
    if late:
        facts.append(
            f"no other leader inserts its periodic jobs, which are late: {format_names(late)}"
        )
    return [
        (fail_finding if due or running or late else warn_finding)(
            f"{text}: {'; '.join(facts)}",
            f"start a worker of it (riverpy worker --leader-domain {quote(domain)}), or give its "
            f"queues away: riverpy domain move {quote(queues[0])} --to {DEFAULT_DOMAIN}",
            domain=domain,
            silent=round(silent, 3),
            queues=queues,
            unmaintained=unmaintained,
            due=due,
            running=running,
            late=late,
        )
    ]


def _check_different_settings(domains: DomainMap, domain: str) -> list[Finding]:
    """Return a finding if the clients of this domain have different settings for maintenance. Only
    the leader's settings apply, so they change when another client becomes leader."""
    by_settings: dict[str, list[str]] = {}
    for client in domains.live_clients(domain):
        if client.is_candidate and client.settings_digest is not None:
            by_settings.setdefault(client.settings_digest, []).append(client.client_id)
    if len(by_settings) < 2:
        return []
    first, second, *_ = by_settings.values()
    return [
        warn_finding(
            f'clients of domain "{domain}" have {len(by_settings)} different sets of periodic jobs '
            f"or retention, and only the leader's set is used: {format_names(first)} against "
            f"{format_names(second)}",
            "while a new version is rolled out, nothing. Otherwise give all of them the same set, "
            "or domains of their own",
            domain=domain,
            sets=list(by_settings.values()),
        )
    ]


def _check_shared_queues(domains: DomainMap) -> list[Finding]:
    """Return a finding for each queue that belongs to one domain, but is also worked by clients of
    another domain."""
    found: list[Finding] = []
    for row in domains.queue_owners:
        others = [
            client
            for client in domains.live_members
            if client.domain != row.domain and row.queue in client.queues
        ]
        if not others:
            continue
        names_of_others = sorted({client.domain for client in others})
        ids = [client.client_id for client in others]
        found.append(
            warn_finding(
                f'queue "{row.queue}" belongs to domain "{row.domain}", whose leader maintains it. '
                f"Clients of {format_names(names_of_others)} also work it: {format_names(ids)}",
                "if that is intended (on_domain_conflict), nothing. Otherwise remove the queue "
                f"from these clients, or move it: riverpy domain move {quote(row.queue)} --to "
                f"{quote(names_of_others[0])}",
                queue=row.queue,
                domain=row.domain,
                domains=names_of_others,
                clients=ids,
            )
        )
    return found


def _check_unowned_queues(domains: DomainMap) -> list[Finding]:
    """Return a finding for each domain whose clients work queues that belong to no domain."""
    owned = {row.queue for row in domains.queue_owners}
    effect = "the leader of default maintains it"
    if not domains.has_leader(DEFAULT_DOMAIN):
        effect = "no leader maintains it, because default has none"
    found: list[Finding] = []
    for domain in domains.non_default_domains:
        worked = {queue for client in domains.live_clients(domain) for queue in client.queues}
        queues = sorted(worked - owned)
        if queues:
            text = (
                f'clients of domain "{domain}" work queue {format_names(queues)}, which belongs to '
                f"no domain: {effect}"
            )
            command = f"riverpy domain claim {quote(queues[0])} --domain {quote(domain)}"
            fix = f"if that is intended, nothing. Otherwise: {command}"
            found.append(warn_finding(text, fix, domain=domain, queues=queues))
    return found


def _check_non_riverpy_leader(domains: DomainMap) -> list[Finding]:
    """Return a finding if the leader of `default` is not a riverpy client."""
    leader = domains.current_leader(DEFAULT_DOMAIN)
    if leader is None or leader.is_riverpy_client:
        return []
    clients = [client for client in domains.live_members if client.domain != DEFAULT_DOMAIN]
    kinds = sorted({kind for client in clients for kind in client.kinds})
    queues = [row.queue for row in domains.queue_owners]
    return [
        warn_finding(
            f"{leader.holder} is the leader of default. It is not a riverpy client and does not "
            f"support domains: it also maintains queue {format_names(queues)}, with its own "
            "retention, and it discards jobs that run for long if it has no worker for them. At "
            f"risk: {format_names(kinds) or 'no kind'}",
            "register stubs for these kinds in Go (docs/go.md), let only riverpy clients take part "
            "in leader election, or give these queues a schema of their own (docs/domains.md)",
            leader_id=leader.holder,
            kinds_at_risk=kinds,
            queues=queues,
        )
    ]


def _check_outdated_clients(domains: DomainMap) -> list[Finding]:
    """Return a finding if the leader of `default`, or a client that could become its leader, does
    not support domains."""
    lead = domains.current_leader(DEFAULT_DOMAIN)
    is_old = lead is not None and lead.is_riverpy_client and not lead.supports_domains
    leader = lead.holder if lead is not None and is_old else None
    candidates = [
        client.client_id
        for client in domains.live_clients(DEFAULT_DOMAIN)
        if client.is_candidate and client.settings_digest is None and client.client_id != leader
    ]
    if leader is None and not candidates:
        return []
    queues = [row.queue for row in domains.queue_owners]
    affected = f"queue {format_names(queues)}" if queues else "the queues of domains"
    if leader is None:
        text = (
            "clients that could become leader of default do not report support for domains: "
            f"{format_names(candidates)}"
        )
        effect = f"An older version would also maintain {affected}"
    else:
        text = f"{leader} is the leader of default and does not report support for domains"
        if candidates:
            text += f". The same holds for {format_names(candidates)}, which could become leader"
        effect = f"An older version also maintains {affected}"
    return [
        warn_finding(
            f"{text}. {effect} and deletes finished jobs by its own retention",
            "run `riverpy migrate up`, then restart the client with this version of riverpy. A "
            "client reports its support at its start",
            leader_id=leader,
            candidates=candidates,
            queues=queues,
        )
    ]


def _check_missing_schema_maintainer(domains: DomainMap) -> list[Finding]:
    """Return a finding if no client maintains the whole schema. This is the task of the leader of
    `default` if this leader is a riverpy client, and otherwise of the client that holds the lease
    `@schema`."""
    candidates = [client for client in domains.live_members if client.is_candidate]
    if not candidates or domains.has_leader_for_orphaned_queues():
        return []
    if max(client.uptime for client in candidates) < ELECTION_TIMEOUT:
        return []
    effect = "rows of dead clients are not deleted, and queues of gone domains are not maintained"
    if not domains.has_leader(DEFAULT_DOMAIN):
        effect = f"indexes are not rebuilt, {effect}"
    ids = [client.client_id for client in candidates]
    return [
        warn_finding(
            f"default has no riverpy leader, and no client holds {SCHEMA_LEASE_NAME}: {effect}",
            f"read the log of {format_names(ids)}, and see `grants` and `locks` here",
            candidates=ids,
        )
    ]
