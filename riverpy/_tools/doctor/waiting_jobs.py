"""Waiting: jobs that are due and not worked, and why."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN
from riverpy._tools.doctor.finding import Finding, Level, count, names, shown, span
from riverpy._tools.doctor.snapshot import TOUCHED_LIMIT
from riverpy._tools.doctor.statements import doctor_queues

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import ClientRow, PeriodicRow, PlaceRow, QueueRow

SCHEDULED_LIMIT = 30.0
"""Seconds by which a scheduled job or retry may be late: a leader moves them on each 5."""
PERIODIC_LIMIT = 60.0
"""Seconds by which a periodic job may be late."""
LAG_FAIL = 10
"""How many times `max_lag` is no mere backlog any more, if nobody works the queue."""


async def check_queues(patient: DatabaseSnapshot) -> list[Finding]:
    """How long jobs of each queue have been due, and whether anybody works it. Empty queues are
    told of too.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    places = {row.queue: row for row in await patient.places() if row.state == "available"}
    async with patient.session.reading() as connection:
        rows = {row.name: row for row in await doctor_queues(connection, patient.schema)}
    living = [one for one in clients or () if one.is_alive]
    workers = {
        queue: sum(queue in one.queues for one in living) for queue in sorted({*places, *rows})
    }
    facts = {queue: _queue_facts(places.get(queue), rows.get(queue)) for queue in workers}
    for queue, number in workers.items():
        facts[queue]["clients"] = None if clients is None else number
    unworked = [place for queue, place in places.items() if not workers[queue]]
    kinds = await patient.kinds(unworked)
    problems = [
        finding
        for queue, number in workers.items()
        if queue in places
        and (
            finding := _queue(
                patient,
                places[queue],
                rows.get(queue),
                number,
                clients,
                [row.kind for row in kinds if queue in row.queues],
            )
        )
    ]
    jobs = sum(place.jobs for place in places.values())
    oldest = max((place.due_for or 0 for place in places.values()), default=0)
    least = jobs if any(place.is_cut for place in places.values()) else None
    text = f"{count(len(workers), 'queue')}, {count(jobs, 'job', limit=least)} available"
    if jobs:
        text += f", the oldest due for {span(oldest)}"
    return [Finding(Level.OK, "queues", text, data={"queues": facts}), *shown(problems)]


def _queue_facts(place: PlaceRow | None, row: QueueRow | None) -> dict[str, object]:
    due = None if place is None or place.due_for is None else round(max(place.due_for, 0), 3)
    paused = None if row is None or row.paused_for is None else round(row.paused_for, 3)
    return {"available": place.jobs if place else 0, "oldest_due": due, "paused_for": paused}


def _queue(
    patient: DatabaseSnapshot,
    place: PlaceRow,
    row: QueueRow | None,
    workers: int,
    clients: Sequence[ClientRow] | None,
    kinds: Sequence[str],
) -> Finding | None:
    lag = place.due_for or 0
    if lag < 0:
        return None
    most = patient.max_lag.total_seconds()
    jobs = count(place.jobs, "job", limit=place.jobs if place.is_cut else None)
    waiting = f'{jobs} of queue "{place.queue}" wait{"s" if place.jobs == 1 else ""}'
    data: dict[str, object] = {
        "queue": place.queue,
        "available": place.jobs,
        "oldest_due": round(lag, 3),
        "clients": None if clients is None else workers,
    }
    if row is not None and row.paused_for is not None:
        data["paused_for"] = round(row.paused_for, 3)
        return Finding(
            Level.WARN,
            "queues",
            f"{waiting}: it is paused for {span(row.paused_for)}",
            f"if that was forgotten: riverpy queue resume {quote(place.queue)}",
            data,
        )
    if clients is not None and not workers:
        touched = row is not None and row.touched < TOUCHED_LIMIT
        other = ", though one of another language may" if touched else ""
        return Finding(
            Level.FAIL if lag >= most * LAG_FAIL and not touched else Level.WARN,
            "queues",
            f"{waiting}, the oldest for {span(lag)}, and no client of riverpy's works it{other}",
            f"start a worker that has {f'kind {names(kinds)}' if kinds else 'its kinds'}: "
            f"riverpy worker MODULE:ATTR -q {quote(place.queue)}:50",
            data,
        )
    if lag < most:
        return None
    return Finding(
        Level.WARN,
        "queues",
        f"{waiting}, the oldest for {span(lag)}",
        "its workers have too few slots, are busy with long jobs, or do not get on: see `stuck`, "
        "`running`, `snapshots` and `locks`; add slots or processes",
        data,
    )


async def check_scheduled(patient: DatabaseSnapshot) -> list[Finding]:
    """Scheduled jobs and retries that are due and not moved on.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    places = [row for row in await patient.places() if row.state in {"scheduled", "retryable"}]
    late = [row for row in places if row.due_for is not None and row.due_for >= SCHEDULED_LIMIT]
    jobs = sum(row.jobs for row in places)
    data: dict[str, object] = {
        "waiting": jobs,
        "late": max((round(row.due_for or 0, 3) for row in late), default=0),
        "queues": sorted({row.queue for row in late}),
    }
    if not late:
        text = count(jobs, "scheduled job or retry", plural="scheduled jobs and retries")
        return [Finding(Level.OK, "scheduled", f"{text}, none late", data=data)]
    oldest = max(row.due_for or 0 for row in late)
    queues = sorted({row.queue for row in late})
    missing = await _missing_leader(patient, queues)
    why = "though there is a leader" if missing is None else f"and {missing}"
    return [
        Finding(
            Level.WARN if missing is None else Level.FAIL,
            "scheduled",
            f"scheduled jobs or retries of queue {names(queues)} are due for up to {span(oldest)} "
            f"and not moved on, {why}",
            "see the leader's log for what its job scheduler fails at, and `locks`"
            if missing is None
            else "see `leader` and `domains`: whoever leads moves them on",
            data,
        )
    ]


async def _missing_leader(patient: DatabaseSnapshot, queues: Sequence[str]) -> str | None:
    """Who does not lead that should keep these queues. None: all of them are kept."""
    seen = await patient.domains()
    if seen is not None and seen.others:
        unkept = seen.unkept(queues)
        return f"nobody leads domain {names(unkept)}" if unkept else None
    lead = await patient.lead()
    return "nobody leads" if lead is None or lead.is_over else None


async def check_periodic(patient: DatabaseSnapshot) -> list[Finding]:
    """Periodic jobs that are paused or late.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    if not patient.has_periodic:
        text = "off: their table is not there (see `schema`)"
        return [Finding(Level.OK, "periodic", text, data={"periodic_jobs": None})]
    rows = await patient.periodic()
    paused = [row for row in rows if row.paused_for is not None]
    late = late_of(rows)
    data: dict[str, object] = {
        "periodic_jobs": len(rows),
        "paused": [row.id for row in paused],
        "late": [row.id for row in late],
    }
    findings = [Finding(Level.OK, "periodic", count(len(rows), "periodic job"), data=data)]
    if paused:
        longest = max(row.paused_for or 0 for row in paused)
        findings.append(
            Finding(
                Level.WARN,
                "periodic",
                f"paused, for up to {span(longest)}: {names(row.id for row in paused)}",
                "if that was forgotten: riverpy periodic resume ID",
                {"paused": [row.id for row in paused]},
            )
        )
    if late:
        findings += await _late(patient, late)
    return findings


def late_of(rows: Iterable[PeriodicRow]) -> list[PeriodicRow]:
    """Those that are late."""
    return [row for row in rows if row.is_used and (row.late or 0) >= PERIODIC_LIMIT]


async def _late(patient: DatabaseSnapshot, late: Sequence[PeriodicRow]) -> list[Finding]:
    """Late periodic jobs, by the domain whose leader inserts them."""
    seen = await patient.domains()
    by_domain: dict[str, list[PeriodicRow]] = {}
    for row in late:
        by_domain.setdefault(row.domain, []).append(row)
    findings: list[Finding] = []
    for domain, rows in sorted(by_domain.items()):
        text = f"late, by up to {span(max(row.late or 0 for row in rows))}"
        if domain == DEFAULT_DOMAIN:
            fix = (
                "the leader inserts them, if it has them: see `leader` (one in Go has none of "
                "Python's), and its log"
            )
        elif seen is None or seen.is_led(domain):
            fix = f"the leader of domain {domain} inserts them, if it has them: see its log"
        else:
            text += f', for nobody leads domain "{domain}", and no other leader inserts them'
            command = f"riverpy worker --leader-domain {quote(domain)}"
            fix = f"start a client of domain {domain} that can lead ({command}), and see `domains`"
        ids = [row.id for row in rows]
        findings.append(
            Finding(Level.WARN, "periodic", f"{text}: {names(ids)}", fix, {"late": ids})
        )
    return shown(findings)
