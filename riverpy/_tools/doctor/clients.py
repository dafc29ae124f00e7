"""Checks of the registered clients, and of the running jobs of dead clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.domains import DOMAIN_ORPHANED_AFTER_SECONDS
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.leader import describe_heartbeat_age
from riverpy._tools.doctor.snapshot import RUNNING_JOBS_MAX
from riverpy._tools.text import format_count, format_names, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.domain_map import DomainMap
    from riverpy._tools.reads import ClientRow, DefaultDomainLeader

JOB_RELEASE_TIMEOUT = 60.0
"""Seconds within which a leader rescues the running jobs of a dead client. The time starts when the
client is dead, i.e. when it has written no heartbeat for its `dead_after`."""
_START_WORKER_FIX = "start a worker: riverpy worker MODULE:ATTR"


async def check_clients(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report live clients, clients with a late heartbeat, and dead clients with running jobs."""
    clients = await snapshot.clients()
    leader = await snapshot.last_leader()
    if clients is None:
        return [
            ok_finding("not known: the table of clients is missing (see `schema`)", clients=None)
        ]
    running = await snapshot.running_job_groups()
    domains = await snapshot.domains()
    jobs = {
        client.client_id: sum(row.job_count for row in running if row.client_id == client.client_id)
        for client in clients
    }
    live = await snapshot.live_clients()
    can_rescue = _can_jobs_be_rescued(clients, leader, domains)
    problems = [_late_heartbeat_finding(one) for one in live if not has_recent_heartbeat(one)]
    for client in clients:
        if not client.is_alive:
            queues = {row.queue for row in running if row.client_id == client.client_id}
            unrescued = _describe_unrescued_jobs(client, domains, queues)
            dead = _dead_client_finding(client, jobs[client.client_id], unrescued)
            if dead.data["running_jobs"] and not unrescued and not can_rescue:
                dead = msgspec.structs.replace(dead, fix=_START_WORKER_FIX)
            problems.append(dead)
    facts = [_client_finding_data(client, jobs[client.client_id]) for client in clients]
    if live:
        total = sum(jobs[client.client_id] for client in live)
        text = (
            f"{format_count(len(live), 'client')} with "
            f"{format_count(total, 'running job', limit=RUNNING_JOBS_MAX)}: "
            f"{format_names(client.client_id for client in live)}"
        )
        summary = ok_finding(text, clients=facts)
    elif leader is not None and not leader.has_lease_expired and not leader.is_registered:
        text = "no riverpy client runs. The leader is a client in another language"
        summary = ok_finding(text, clients=facts)
    else:
        text = "no riverpy client runs on this schema"
        summary = warn_finding(text, _START_WORKER_FIX, clients=facts)
    return [summary, *problems]


def _client_finding_data(client: ClientRow, running_job_count: int) -> dict[str, object]:
    """Return the values of a client for the field `data` of a finding."""
    return {
        "client_id": client.client_id,
        "version": client.version,
        "alive": client.is_alive,
        "silent": round(client.heartbeat_age, 3),
        "candidate": client.is_candidate,
        "stopping": client.is_stopping,
        "poll_only": client.poll_only,
        "queues": client.queues,
        "kinds": client.kinds,
        "running_jobs": running_job_count,
    }


def has_recent_heartbeat(client: ClientRow) -> bool:
    """Return whether the last heartbeat is younger than half of `dead_after`. A client writes six
    heartbeats in `dead_after`."""
    return client.heartbeat_age <= client.dead_after / 2


def _late_heartbeat_finding(client: ClientRow) -> Finding:
    return warn_finding(
        f"{client.client_id} {describe_heartbeat_age(client)}. A leader treats it as dead when the "
        f"leader itself has seen no heartbeat for {format_seconds(client.dead_after)}",
        "its event loop is blocked, its process or machine is stopped, or it has no connection to "
        "the database: read its log",
        client_id=client.client_id,
        silent=round(client.heartbeat_age, 3),
    )


def _can_jobs_be_rescued(
    clients: Sequence[ClientRow], leader: DefaultDomainLeader | None, domains: DomainMap | None
) -> bool:
    """Return whether a leader can rescue the jobs of dead clients, i.e. whether there is a leader
    that is not dead, or a live client that can become leader.

    If there are other domains than `default`, the function always returns True, because
    `_describe_unrescued_jobs` checks each domain.
    """
    if domains is not None and domains.non_default_domains:
        return True
    if any(client.is_alive and client.is_candidate for client in clients):
        return True
    dead_ids = {client.client_id for client in clients if not client.is_alive}
    return (
        leader is not None
        and not leader.has_lease_expired
        and leader.leader_row.leader_id not in dead_ids
    )


def _describe_unrescued_jobs(
    client: ClientRow, domains: DomainMap | None, queues: Iterable[str]
) -> list[str]:
    """Return a text for each domain in which no leader rescues the jobs of a dead client."""
    if domains is None or not domains.non_default_domains:
        return []
    is_recent = client.heartbeat_age - client.dead_after < JOB_RELEASE_TIMEOUT
    found: list[str] = []
    for domain, unmaintained in domains.unmaintained_queues_by_domain(sorted(queues)).items():
        live = domains.live_clients(domain)
        if domain == DEFAULT_DOMAIN or (is_recent and any(one.is_candidate for one in live)):
            continue
        text = (
            f'those of queue {format_names(unmaintained)}, because domain "{domain}" has no leader'
        )
        if not live and domains.has_leader_for_orphaned_queues():
            silent = min(
                row.seconds_since_heartbeat
                for row in domains.owned_queues(domain)
                if row.queue in unmaintained
            )
            wait = format_seconds(DOMAIN_ORPHANED_AFTER_SECONDS - silent)
            text += f" (the leader of default rescues them in {wait})"
        found.append(text)
    return found


def _dead_client_finding(client: ClientRow, job_count: int, unrescued: Sequence[str]) -> Finding:
    text = f"{client.client_id} is dead: it {describe_heartbeat_age(client)}"
    data: dict[str, object] = {
        "client_id": client.client_id,
        "silent": round(client.heartbeat_age, 3),
        "running_jobs": job_count,
    }
    if not job_count:
        fix = "nothing: it left no running job, and a leader deletes its row 10 minutes after this"
        return warn_finding(text, fix, **data)
    verb = "is" if job_count == 1 else "are"
    text += f". {format_count(job_count, 'job')} that it claimed {verb} still running"
    if unrescued:
        text += f". No leader rescues {'; '.join(unrescued)}"
        fix = "start a client of that domain. It rescues the jobs: see `domains`"
        return fail_finding(text, fix, **data)
    if client.heartbeat_age - client.dead_after < JOB_RELEASE_TIMEOUT:
        fix = (
            "wait: a riverpy leader rescues the jobs after it has seen no heartbeat for "
            f"{format_seconds(client.dead_after)}"
        )
        return warn_finding(text, fix, **data)
    return fail_finding(
        f"{text}, and no leader rescues them",
        "only a leader that is a riverpy client rescues them: see `leader` and `domains`. Or "
        "start a client with the same id",
        **data,
    )
