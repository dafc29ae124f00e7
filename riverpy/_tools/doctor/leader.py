"""The check of the leader of the domain `default`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.text import format_count, format_names, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.domains import DomainMember
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.reads import ClientRow, DefaultDomainLeader

ELECTION_TIMEOUT = 20.0
"""Seconds within which clients elect a leader, counted from the start of the oldest client that
takes part in leader election. If there is no leader by then, doctor reports that the election
failed."""
NO_CANDIDATE_FIX = (
    "let one of its workers take part in leader election, and restart it: without --no-candidate, "
    "RIVERPY_CANDIDATE=0, `candidate` = false in its file or Config(candidate=False)"
)
_START_WORKER_FIX = "start a worker: riverpy worker MODULE:ATTR"
_NO_LEADER_EFFECT = (
    "scheduled jobs and retries do not become available, and jobs of dead workers are not rescued"
)


async def check_leader(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the leader. If there is no leader, report why."""
    clients = await snapshot.clients()
    leader = await snapshot.last_leader()
    if leader is None or leader.has_lease_expired:
        return [await _missing_leader_finding(snapshot, leader, clients)]
    row = leader.leader_row
    text = f"{row.leader_id} is leader since {row.elected_at:%Y-%m-%d %H:%M:%S} UTC"
    data: dict[str, object] = {
        "leader_id": row.leader_id,
        "elected_at": row.elected_at,
        "expires_at": row.expires_at,
        "expires_in": round(row.seconds_until_expiry, 3),
        "is_registered": leader.is_registered,
    }
    if leader.is_registered is False:
        return [_non_riverpy_leader_finding(text, clients or [], data)]
    for client in clients or ():
        if client.client_id == row.leader_id and not client.is_alive:
            return [
                warn_finding(
                    f"{text}, but it {describe_heartbeat_age(client)}",
                    "if its process has ended, its lease expires in "
                    f"{format_seconds(row.seconds_until_expiry)}. Otherwise read its log",
                    **data,
                )
            ]
    return [ok_finding(f"{text}, lease for {format_seconds(row.seconds_until_expiry)}", **data)]


async def _missing_leader_finding(
    snapshot: DatabaseSnapshot,
    leader: DefaultDomainLeader | None,
    clients: Sequence[ClientRow] | None,
) -> Finding:
    domains = await snapshot.domains()
    others = set[str]() if domains is None else domains.non_default_client_ids
    if domains is not None and others:
        clients = [client for client in clients or () if client.client_id not in others]
        if not any(client.is_alive for client in clients):
            waiting = sorted({row.queue for row in await snapshot.backlogs()})
            return _default_domain_without_clients_finding(
                domains.unmaintained_queues_by_domain(waiting).get(DEFAULT_DOMAIN, [])
            )
    text = "there is no leader"
    if leader is not None:
        age = format_seconds(-leader.leader_row.seconds_until_expiry)
        text += f": the lease of {leader.leader_row.leader_id} expired {age} ago"
    live = [client for client in clients or () if client.is_alive]
    candidates = [client for client in live if client.is_candidate]
    data: dict[str, object] = {
        "leader_id": None,
        "candidates": [client.client_id for client in candidates],
    }
    if candidates:
        return failed_election_finding(text, candidates, "river_leader", **data)
    if live and all(client.is_stopping for client in live):
        ids = format_names(client.client_id for client in live)
        text += f", and all running clients are stopping ({ids}): {_NO_LEADER_EFFECT}"
        return warn_finding(text, _START_WORKER_FIX, **data)
    if live:
        whose = "no client of default" if others else "no client"
        text += f", and {whose} takes part in leader election: {_NO_LEADER_EFFECT}"
        return fail_finding(text, NO_CANDIDATE_FIX, **data)
    reason = "it is not known which clients run" if clients is None else "no client runs"
    return warn_finding(f"{text}, and {reason}: {_NO_LEADER_EFFECT}", _START_WORKER_FIX, **data)


def failed_election_finding(
    text: str, candidates: Sequence[ClientRow | DomainMember], lease_table: str, /, **data: object
) -> Finding:
    """Return the finding that there is no leader, although the clients `candidates` could become
    leader. `text` is the start of the finding's text. `lease_table` is the table that has the
    leader's lease."""
    ids = format_names(client.client_id for client in candidates)
    text = f"{text}, although {format_count(len(candidates), 'client')} could become leader: {ids}"
    if max(client.uptime for client in candidates) < ELECTION_TIMEOUT:
        return warn_finding(text, "wait some seconds: the clients have just started", **data)
    return fail_finding(
        text,
        "read their logs for the reason, and see `grants` and `locks` here. An idle transaction "
        f"that locks {lease_table} prevents an election",
        **data,
    )


def _default_domain_without_clients_finding(unmaintained_queues: Sequence[str]) -> Finding:
    text = "default has no leader and no running client. Other domains have running clients"
    data: dict[str, object] = {"leader_id": None, "candidates": [], "queues": unmaintained_queues}
    if not unmaintained_queues:
        return ok_finding(text, **data)
    return warn_finding(
        f"{text}. Jobs wait in queue {format_names(unmaintained_queues)}, which belongs to no "
        "domain: scheduled jobs and retries do not become available",
        "start a worker without a domain, or give the queue to a domain: riverpy domain claim "
        "QUEUE --domain D",
        **data,
    )


def _non_riverpy_leader_finding(
    text: str, clients: Sequence[ClientRow], data: dict[str, object]
) -> Finding:
    kinds = sorted({kind for client in clients for kind in client.kinds})
    data["kinds_at_risk"] = kinds
    if not kinds:
        return ok_finding(f"{text}. It is not a riverpy client. No client has kinds here", **data)
    return warn_finding(
        f"{text}. It is not a riverpy client: it does not insert Python's periodic jobs, and it "
        f"discards jobs that run for long if it has no worker for them. At risk: "
        f"{format_names(kinds)}",
        "register stubs for these kinds in Go (docs/go.md), or let only riverpy clients take part "
        "in leader election",
        **data,
    )


def describe_heartbeat_age(client: ClientRow) -> str:
    """Return the age of a client's heartbeat, as the end of a sentence that begins with the
    client's id."""
    if client.heartbeat_age < 0:
        return (
            f"wrote a heartbeat that is {format_seconds(-client.heartbeat_age)} in the future: the "
            "server's clock was set back"
        )
    return f"wrote no heartbeat for {format_seconds(client.heartbeat_age)} by the server's clock"
