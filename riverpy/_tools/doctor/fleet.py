"""Fleet: who leads, and which clients live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.domains import ORPHANED_AFTER
from riverpy._tools.doctor.finding import Finding, Level, count, names, shown, span
from riverpy._tools.doctor.snapshot import RUNNING_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot, Lead
    from riverpy._tools.doctor.statements import ClientRow
    from riverpy._tools.domain_map import DomainMap

ELECTION_LIMIT = 20.0
"""Seconds within which a client that stands for election leads, if nobody else does."""
RESCUE_LIMIT = 60.0
"""Seconds after a client's death within which a leader gives its jobs back."""


async def check_leader(patient: DatabaseSnapshot) -> list[Finding]:
    """Who leads, and whether that is as it should be.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    lead = await patient.lead()
    if lead is None or lead.is_over:
        seen = await patient.domains()
        if clients is not None and seen is not None and seen.others:
            clients = [one for one in clients if one.client_id not in seen.strangers]
            if seen.strangers and not any(one.is_alive for one in clients):
                waiting = sorted({row.queue for row in await patient.places()})
                return [_left_to_domains(seen.unkept(waiting).get(DEFAULT_DOMAIN, []))]
        has_domains = seen is not None and bool(seen.strangers)
        return [_no_leader(lead, clients, has_domains=has_domains)]
    row = lead.row
    text = f"{row.leader_id} leads since {row.elected_at:%Y-%m-%d %H:%M:%S} UTC"
    data: dict[str, object] = {
        "leader_id": row.leader_id,
        "elected_at": row.elected_at,
        "expires_at": row.expires_at,
        "expires_in": round(row.remaining, 3),
        "is_registered": lead.is_registered,
    }
    if lead.is_registered is False:
        return [_foreign_leader(text, clients or [], data)]
    silent = next(
        (one for one in clients or () if one.client_id == row.leader_id and not one.is_alive), None
    )
    if silent is not None:
        return [
            Finding(
                Level.WARN,
                "leader",
                f"{text}, but it {_silence(silent)}",
                f"if it is gone its lease lapses in {span(row.remaining)}; else see its log",
                data,
            )
        ]
    return [Finding(Level.OK, "leader", f"{text}, lease for {span(row.remaining)}", data=data)]


def _no_leader(
    lead: Lead | None, clients: Sequence[ClientRow] | None, *, has_domains: bool
) -> Finding:
    if lead is None:
        text = "nobody leads"
    else:
        ago = span(-lead.row.remaining)
        text = f"nobody leads: the lease of {lead.row.leader_id} has expired {ago} ago"
    living = [one for one in clients or () if one.is_alive]
    candidates = [one for one in living if one.candidate]
    data: dict[str, object] = {
        "leader_id": None,
        "candidates": [one.client_id for one in candidates],
    }
    undone = "scheduled jobs and retries are not moved on, dead workers' jobs not given back"
    if candidates:
        who = names(one.client_id for one in candidates)
        recent = max(one.running for one in candidates) < ELECTION_LIMIT
        return Finding(
            Level.WARN if recent else Level.FAIL,
            "leader",
            f"{text}, though {count(len(candidates), 'client')} could: {who}",
            "it takes a new client some seconds"
            if recent
            else "see their logs, which say why they do not, and `grants` and `locks` here; an "
            "idle transaction that holds river_leader keeps everybody from it",
            data,
        )
    if living and all(one.is_stopping for one in living):
        who = names(one.client_id for one in living)
        text = f"{text}, and the clients that run are stopping ({who}): {undone}"
        return Finding(Level.WARN, "leader", text, "start a worker: riverpy worker", data)
    if living:
        fix = (
            "let a worker stand, and restart it: `candidate` is false in its file, "
            "RIVERPY_CANDIDATE, its options (--no-candidate) or its Config(candidate=…)"
        )
        whose = "no client"
        if has_domains:
            whose = "no client of default, whose queues the domains' leaders do not keep,"
        text = f"{text}, and {whose} stands for election: {undone}"
        return Finding(Level.FAIL, "leader", text, fix, data)
    who = "it is not known who could" if clients is None else "no client runs that could"
    return Finding(
        Level.WARN, "leader", f"{text}, and {who}: {undone}", "start a worker: riverpy worker", data
    )


def _left_to_domains(unkept: Sequence[str]) -> Finding:
    """Nobody leads `default`, which has no client, and there are domains."""
    text = "nobody leads default, and no client of it runs; its domains are led apart"
    data: dict[str, object] = {"leader_id": None, "candidates": [], "queues": unkept}
    if not unkept:
        return Finding(Level.OK, "leader", text, data=data)
    return Finding(
        Level.WARN,
        "leader",
        f"{text}. Jobs wait in queue {names(unkept)}, which no domain has: scheduled ones and "
        "retries are not moved on",
        "start a worker without a domain, or give the queue to one: riverpy domain claim QUEUE "
        "--domain D",
        data,
    )


def _foreign_leader(text: str, clients: Sequence[ClientRow], data: dict[str, object]) -> Finding:
    kinds = sorted({kind for one in clients for kind in one.kinds})
    data["kinds_at_risk"] = kinds
    if not kinds:
        text += ". It is no client of riverpy's, and there is no kind of Python's"
        return Finding(Level.OK, "leader", text, data=data)
    return Finding(
        Level.WARN,
        "leader",
        f"{text}. It is no client of riverpy's: it inserts none of Python's periodic jobs, and "
        f"discards jobs that run for long, if it has no worker for them. At risk: {names(kinds)}",
        "register stubs for these kinds in Go (docs/go.md), or let only clients of riverpy's stand",
        data,
    )


async def check_clients(patient: DatabaseSnapshot) -> list[Finding]:
    """Which clients live, and what the dead left.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    lead = await patient.lead()
    if clients is None:
        text = "not known: the table of clients is not there (see `schema`)"
        return [Finding(Level.OK, "clients", text, data={"clients": None})]
    running = await patient.running(clients)
    seen = await patient.domains()
    left = {
        one.client_id: sum(row.jobs for row in running if row.client_id == one.client_id)
        for one in clients
    }
    living = [one for one in clients if one.is_alive]
    findings = [_silent(one) for one in living if not one.is_lively]
    for one in clients:
        if not one.is_alive:
            queues = {row.queue for row in running if row.client_id == one.client_id}
            unkept = _unkept(one, seen, queues)
            findings.append(_dead(one, left[one.client_id], unkept))
    data: dict[str, object] = {
        "clients": [
            {
                "client_id": one.client_id,
                "version": one.version,
                "alive": one.is_alive,
                "silent": round(one.silent, 3),
                "candidate": one.candidate,
                "stopping": one.is_stopping,
                "poll_only": one.poll_only,
                "queues": one.queues,
                "kinds": one.kinds,
                "running_jobs": left[one.client_id],
            }
            for one in clients
        ]
    }
    if not living:
        text = "no client of riverpy's runs on this schema"
        if lead is not None and not lead.is_over and not lead.is_registered:
            finding = Finding(
                Level.OK, "clients", f"{text}; one of another language leads", data=data
            )
        else:
            fix = "start a worker: riverpy worker MODULE:ATTR"
            finding = Finding(Level.WARN, "clients", text, fix, data)
    else:
        jobs = count(sum(left[one.client_id] for one in living), "running job", limit=RUNNING_LIMIT)
        who = names(one.client_id for one in living)
        text = f"{count(len(living), 'client')} with {jobs}: {who}"
        finding = Finding(Level.OK, "clients", text, data=data)
    return [finding, *shown(findings)]


def _silent(one: ClientRow) -> Finding:
    return Finding(
        Level.WARN,
        "clients",
        f"{one.client_id} {_silence(one)}; a leader takes it for dead when it has itself seen none "
        f"for {span(one.dead_after)}",
        "its event loop is blocked, its process or machine is stopped, or it has lost the "
        "database: see its log",
        {"client_id": one.client_id, "silent": round(one.silent, 3)},
    )


def _silence(one: ClientRow) -> str:
    """For how long it has been silent, and how that is known."""
    if one.silent < 0:
        return (
            f"wrote a heartbeat that is {span(-one.silent)} in the future: the server's clock was "
            "set back"
        )
    return f"wrote no heartbeat for {span(one.silent)} by the server's clock"


def _unkept(one: ClientRow, seen: DomainMap | None, queues: Iterable[str]) -> list[str]:
    """Who does not rescue the jobs of a dead client in these queues, and who will: of each domain
    that does not keep its own."""
    if seen is None or not seen.others:
        return []
    died = one.silent - one.dead_after
    found: list[str] = []
    for domain, unkept in seen.unkept(sorted(queues)).items():
        living = seen.living(domain)
        if domain == DEFAULT_DOMAIN or (died < RESCUE_LIMIT and any(it.candidate for it in living)):
            continue
        text = f'of queue {names(unkept)}, for nobody leads domain "{domain}"'
        if not living and seen.keeps_orphans():
            silent = min(row.silent for row in seen.owned(domain) if row.queue in unkept)
            text += f", until default's leader does in {span(ORPHANED_AFTER - silent)}"
        found.append(text)
    return found


def _dead(one: ClientRow, jobs: int, unkept: Sequence[str]) -> Finding:
    """A dead client.

    Args:
        one: it.
        jobs: how many of its jobs still run.
        unkept: what is said of those that the leader of a domain should give back, and none does.
    """
    died = one.silent - one.dead_after
    text = f"{one.client_id} is silent: it {_silence(one)}"
    data: dict[str, object] = {
        "client_id": one.client_id,
        "silent": round(one.silent, 3),
        "running_jobs": jobs,
    }
    if not jobs:
        fix = "nothing: it left no running job, and a leader forgets it 10 minutes after its death"
        return Finding(Level.WARN, "clients", text, fix, data)
    text = f"{text}, and {count(jobs, 'job')} of its still run{'s' if jobs == 1 else ''}"
    if unkept:
        return Finding(
            Level.FAIL,
            "clients",
            f"{text}. Nobody gives back those {'; '.join(unkept)}",
            "start a client of that domain, which gives them back: see `domains`",
            data,
        )
    if died < RESCUE_LIMIT:
        fix = (
            "a leader of riverpy's gives them back once it has itself seen no heartbeat for "
            f"{span(one.dead_after)}"
        )
        return Finding(Level.WARN, "clients", text, fix, data)
    return Finding(
        Level.FAIL,
        "clients",
        f"{text}: nobody gives them back",
        "only a leader that is a client of riverpy's does: see `leader`, and `domains`; or start a "
        "client with the same id",
        data,
    )
