"""Checks of `riverpy doctor` for due jobs that no client works: available jobs, scheduled jobs and
periodic jobs."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.schema import PERIODIC_JOBS_MIGRATION
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.snapshot import QUEUE_ROW_AGE_MAX_SECONDS
from riverpy._tools.text import format_count, format_names, format_seconds, format_waiting_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import BacklogRow, PeriodicJobRow, QueueRow
    from riverpy._tools.reads import ClientRow

LATE_SCHEDULED_WARN_SECONDS = 30.0
"""`riverpy doctor` reports a scheduled job or a retry that is late by at least this many seconds.
The leader makes due jobs available every 5 s."""
LATE_PERIODIC_WARN_SECONDS = 60.0
"""`riverpy doctor` reports a periodic job that is late by at least this many seconds."""
UNWORKED_QUEUE_FAIL_LAG_FACTOR = 10
"""If no riverpy client works a queue, `riverpy doctor` reports a failure when the oldest job has
been due for at least `max_lag` times this factor, and a warning before. If a client in another
language (for example Go) may work the queue, `riverpy doctor` reports only a warning."""


async def check_queues(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report how long the available jobs of each queue have been due and how many clients work the
    queue. The first finding is a summary. Its `data` also has the queues without jobs."""
    backlogs = {row.queue: row for row in await snapshot.backlogs() if row.state == "available"}
    rows = {row.name: row for row in await snapshot.queues()}
    queues = sorted({*backlogs, *rows})
    live = None if await snapshot.clients() is None else await snapshot.live_clients()
    facts = {
        queue: _queue_finding_data(queue, backlogs.get(queue), rows.get(queue), live)
        for queue in queues
    }
    unworked = [row for queue, row in backlogs.items() if not facts[queue]["clients"]]
    kinds = await snapshot.waiting_kinds(unworked)
    problems = [
        _queue_finding(
            backlog,
            rows.get(queue),
            facts[queue],
            snapshot.options.max_lag.total_seconds(),
            [row.kind for row in kinds if queue in row.queues],
        )
        for queue, backlog in sorted(backlogs.items())
    ]
    jobs = sum(backlog.job_count for backlog in backlogs.values())
    limit = jobs if any(backlog.is_partial for backlog in backlogs.values()) else None
    text = (
        f"{format_count(len(queues), 'queue')}, {format_count(jobs, 'job', limit=limit)} available"
    )
    if jobs:
        oldest = max((backlog.seconds_since_due or 0 for backlog in backlogs.values()), default=0)
        text += f", the oldest due for {format_seconds(oldest)}"
    return [
        ok_finding(text, queues=facts),
        *(finding for finding in problems if finding is not None),
    ]


def _queue_finding_data(
    queue: str, backlog: BacklogRow | None, row: QueueRow | None, clients: list[ClientRow] | None
) -> dict[str, object]:
    """Return the facts about one queue for the `data` of a finding."""
    due_for = None if backlog is None else backlog.seconds_since_due
    paused_for = None if row is None else row.seconds_since_pause
    return {
        "available": backlog.job_count if backlog else 0,
        "oldest_due": None if due_for is None else round(max(due_for, 0), 3),
        "paused_for": None if paused_for is None else round(paused_for, 3),
        "clients": None if clients is None else sum(queue in client.queues for client in clients),
    }


def _queue_finding(
    backlog: BacklogRow,
    row: QueueRow | None,
    queue_data: dict[str, object],
    max_lag_seconds: float,
    kinds: Sequence[str],
) -> Finding | None:
    """Return a finding if due jobs of this queue wait because the queue is paused, because no
    riverpy client works it, or for at least `max_lag_seconds`. Otherwise return None.

    `kinds` are the kinds of the jobs that a client would claim next from the queue. If no riverpy
    client works the queue, the remedy names these kinds.
    """
    lag = backlog.seconds_since_due or 0
    if lag < 0:
        return None
    of = f' of queue "{backlog.queue}"'
    text = format_waiting_count(backlog.job_count, "job", suffix=of, is_partial=backlog.is_partial)
    data = {"queue": backlog.queue, **queue_data}
    if row is not None and row.seconds_since_pause is not None:
        text += f". The queue is paused for {format_seconds(row.seconds_since_pause)}"
        fix = f"if it should run again: riverpy queue resume {quote(backlog.queue)}"
        return warn_finding(text, fix, **data)
    text += f", the oldest for {format_seconds(lag)}"
    if queue_data["clients"] == 0:
        is_touched = row is not None and row.seconds_since_update < QUEUE_ROW_AGE_MAX_SECONDS
        is_failure = lag >= max_lag_seconds * UNWORKED_QUEUE_FAIL_LAG_FACTOR and not is_touched
        other = ". A client in another language may work it" if is_touched else ""
        return (fail_finding if is_failure else warn_finding)(
            f"{text}, and no riverpy client works the queue{other}",
            f"start a worker that has {f'kind {format_names(kinds)}' if kinds else 'its kinds'}: "
            f"riverpy worker MODULE:ATTR -q {quote(backlog.queue)}:50",
            **data,
        )
    if lag < max_lag_seconds:
        return None
    return warn_finding(
        text,
        "its workers have too few slots, run long jobs, are blocked, or do not have the kind of "
        "these jobs: see `stuck`, `running`, `snapshots`, `locks` and `kinds`. Add slots or "
        "processes",
        **data,
    )


async def check_late_scheduled_jobs(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report scheduled jobs and retries that are due but did not become available in time."""
    backlogs = [row for row in await snapshot.backlogs() if row.state in {"scheduled", "retryable"}]
    late = [row for row in backlogs if (row.seconds_since_due or 0) >= LATE_SCHEDULED_WARN_SECONDS]
    jobs = sum(row.job_count for row in backlogs)
    queues = sorted({row.queue for row in late})
    oldest = max((row.seconds_since_due or 0 for row in late), default=0)
    data: dict[str, object] = {"waiting": jobs, "late": round(oldest, 3), "queues": queues}
    if not late:
        text = format_count(jobs, "scheduled job or retry", plural="scheduled jobs and retries")
        return [ok_finding(f"{text}, none late", **data)]
    text = (
        f"scheduled jobs or retries of queue {format_names(queues)} are late by up to "
        f"{format_seconds(oldest)}. They do not become available"
    )
    missing = await _describe_missing_leaders(snapshot, queues)
    if missing is None:
        fix = "read the errors of the job scheduler in the leader's log, and see `locks`"
        return [warn_finding(f"{text}, although there is a leader", fix, **data)]
    fix = "see `leader` and `domains`: the leader makes these jobs available"
    return [fail_finding(f"{text}, because {missing}", fix, **data)]


async def _describe_missing_leaders(
    snapshot: DatabaseSnapshot, queues: Sequence[str]
) -> str | None:
    """Return a text about the missing leaders of these queues, such as `there is no leader`.
    Return None if a leader maintains each queue."""
    domains = await snapshot.domains()
    if domains is not None and domains.non_default_domains:
        unmaintained = domains.unmaintained_queues_by_domain(queues)
        return f"domain {format_names(unmaintained)} has no leader" if unmaintained else None
    leader = await snapshot.last_leader()
    return "there is no leader" if leader is None or leader.has_lease_expired else None


async def check_periodic_jobs(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report periodic jobs that are paused or late."""
    if not snapshot.has_migration(PERIODIC_JOBS_MIGRATION):
        return [ok_finding("off: their table is missing (see `schema`)", periodic_jobs=None)]
    rows = await snapshot.periodic_jobs()
    paused = [row.id for row in rows if row.seconds_since_pause is not None]
    late = find_late_periodic_jobs(rows)
    findings = [
        ok_finding(
            format_count(len(rows), "periodic job"),
            periodic_jobs=len(rows),
            paused=paused,
            late=[row.id for row in late],
        )
    ]
    if paused:
        longest = max(row.seconds_since_pause or 0 for row in rows)
        text = f"paused, for up to {format_seconds(longest)}: {format_names(paused)}"
        fix = "if they should run again: riverpy periodic resume ID"
        findings.append(warn_finding(text, fix, paused=paused))
    return findings + await _late_periodic_job_findings(snapshot, late)


def find_late_periodic_jobs(rows: Iterable[PeriodicJobRow]) -> list[PeriodicJobRow]:
    """Return the periodic jobs that are late. A leader regularly updates the rows of its periodic
    jobs. If a row was not updated recently, no leader has this periodic job now, and the job is
    ignored."""
    used = [row for row in rows if row.is_recently_updated]
    return [row for row in used if (row.seconds_since_due or 0) >= LATE_PERIODIC_WARN_SECONDS]


async def _late_periodic_job_findings(
    snapshot: DatabaseSnapshot, late_jobs: Sequence[PeriodicJobRow]
) -> list[Finding]:
    """Return one finding for each domain that has late periodic jobs. Only the leader of a domain
    inserts the domain's periodic jobs."""
    if not late_jobs:
        return []
    domains = await snapshot.domains()
    findings: list[Finding] = []
    for domain in sorted({row.domain for row in late_jobs}):
        rows = [row for row in late_jobs if row.domain == domain]
        text = f"late by up to {format_seconds(max(row.seconds_since_due or 0 for row in rows))}"
        if domain == DEFAULT_DOMAIN:
            fix = (
                "see `leader` and its log. The leader inserts only the periodic jobs that it has. "
                "A leader in Go has none of Python's"
            )
        elif domains is None or domains.has_leader(domain):
            fix = (
                f"read the log of the leader of domain {domain}. It inserts only the periodic jobs "
                "that it has"
            )
        else:
            text += f', because domain "{domain}" has no leader'
            command = f"riverpy worker --leader-domain {quote(domain)}"
            fix = f"start a client of domain {domain} that can lead ({command}), and see `domains`"
        ids = [row.id for row in rows]
        findings.append(warn_finding(f"{text}: {format_names(ids)}", fix, late=ids))
    return findings
