"""Checks of running jobs: jobs that run for a long time, jobs of clients that are not registered,
and jobs that the server cannot read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._log_events import JOB_RESULTS_REJECTED
from riverpy._postgres.damaged_jobs import DAMAGED_JOB_REMEDY
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.snapshot import RUNNING_JOBS_MAX
from riverpy._tools.text import (
    format_count,
    format_error,
    format_job_ids,
    format_names,
    format_seconds,
)
from riverpy.config import RESCUE_AFTER_DEFAULT

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import RunningJobGroup


async def check_long_running_jobs(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report jobs of live clients that run for longer than `stuck_after`. doctor cannot use the
    timeouts of jobs, because the database does not have them. The check `clients` reports the jobs
    of dead clients, and the check `stuck` reports jobs that run after their cancellation."""
    rows = await snapshot.running_job_groups()
    total = sum(row.job_count for row in rows)
    text = format_count(total, "job", limit=RUNNING_JOBS_MAX)
    if rows:
        first = rows[0]
        text += (
            f", the longest for {format_seconds(first.longest_run_seconds)}: job "
            f'{first.oldest_job_id}, kind "{first.kind}", client {first.client_id or "unknown"}'
        )
    summary = ok_finding(
        text,
        running=total,
        longest=round(rows[0].longest_run_seconds, 3) if rows else None,
        job_id=rows[0].oldest_job_id if rows else None,
    )
    live: set[str | None] = {client.client_id for client in await snapshot.live_clients()}
    if await snapshot.clients() is None:  # not known, so all clients count as alive
        live = {row.client_id for row in rows}
    long = [
        one for one in rows if one.long_job_count and not one.is_stuck and one.client_id in live
    ]
    return [summary, *map(_long_running_jobs_finding, long)]


def _long_running_jobs_finding(row: RunningJobGroup) -> Finding:
    more = f" (and {row.long_job_count - 1:,} more like it)" if row.long_job_count > 1 else ""
    return warn_finding(
        f'job {row.oldest_job_id} of kind "{row.kind}" in queue "{row.queue}"{more} runs for '
        f"{format_seconds(row.longest_run_seconds)} in {row.client_id}, and no cancellation is "
        "known. Either its code needs that long, or it hangs, or it has ended and its result "
        "cannot be stored",
        f"search the log of that worker for `{JOB_RESULTS_REJECTED}`: a trigger of yours or a "
        "damaged row can prevent that a result is stored. If the job hangs: riverpy job cancel "
        f"{row.oldest_job_id}. If it still runs after that, restart the worker, because code that "
        "blocks or ignores its cancellation ends only with its process. Give the kind a timeout",
        job_id=row.oldest_job_id,
        jobs=row.long_job_count,
        kind=row.kind,
        queue=row.queue,
        client_id=row.client_id,
        seconds=round(row.longest_run_seconds, 3),
    )


async def check_unregistered_clients(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report running jobs of clients without heartbeats, such as clients in another language."""
    clients = await snapshot.clients()
    if clients is None:
        return []
    known = {client.client_id for client in clients}
    rows = [row for row in await snapshot.running_job_groups() if row.client_id not in known]
    if not rows:
        return []
    worked = {kind for client in await snapshot.live_clients() for kind in client.kinds}
    foreign = [row for row in rows if row.kind not in worked]
    unknown: Counter[str] = Counter()
    for row in foreign:
        unknown[row.kind] += row.job_count
    total = sum(row.job_count for row in rows)
    ids = format_names(sorted({row.client_id or "unknown" for row in rows}))
    jobs = format_count(total, "job", limit=RUNNING_JOBS_MAX)
    text = f"{jobs} of clients that are not registered: {ids}"
    data: dict[str, object] = {
        "running": total,
        "clients": sorted({row.client_id or "" for row in rows}),
        "unknown_kinds": dict(unknown),
    }
    limit = RESCUE_AFTER_DEFAULT.total_seconds()
    old = [row for row in foreign if row.longest_run_seconds >= limit]
    if not old:
        text += " (clients in another language, or older than the table of clients)"
        return [ok_finding(text, **data)]
    kinds = format_names(sorted({row.kind for row in old}))
    longest = format_seconds(max(row.longest_run_seconds for row in old))
    return [
        warn_finding(
            f"{text}. Those of kind {kinds} run for up to {longest}. No leader rescues them: a "
            "riverpy leader rescues only kinds that it has",
            "if their client is gone, register a worker for these kinds in Python, if only a stub "
            "(docs/go.md), or let a Go client that has these kinds become leader",
            **data,
        )
    ]


async def check_damaged_jobs(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the jobs that the server could not read in the earlier checks of this run of doctor.
    This check does not search for others: it would have to read all jobs, and a table may have many
    large jobs."""
    ids = sorted(snapshot.damaged_job_errors)
    if not ids:
        return [ok_finding("no damaged job found (args and metadata are not read)", job_ids=ids)]
    error = format_error(snapshot.damaged_job_errors[ids[0]])
    text = f"the server cannot read {format_job_ids(ids)} ({error}). It read all others"
    return [fail_finding(text, DAMAGED_JOB_REMEDY, job_ids=ids)]
