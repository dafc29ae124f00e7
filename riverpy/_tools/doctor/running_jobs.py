"""Check of jobs that run for long, and of running jobs of clients that are not registered."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._log_events import JOB_RESULTS_REJECTED
from riverpy._tools.doctor.finding import Finding, limited, ok, warn
from riverpy._tools.doctor.snapshot import RUNNING_LIMIT
from riverpy._tools.text import count, names, span
from riverpy.config import RESCUE_AFTER_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import ClientRow, RunningRow


async def check_running(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report jobs that run for longer than `stuck_after`. doctor does not use the timeouts of jobs,
    because the database does not have them."""
    clients = await snapshot.clients()
    rows = await snapshot.running(clients or [])
    jobs = sum(row.jobs for row in rows)
    text = count(jobs, "job", limit=RUNNING_LIMIT)
    if rows:
        first = rows[0]
        text += (
            f', the longest for {span(first.longest)}: job {first.id}, kind "{first.kind}", client '
            f"{first.client_id or 'unknown'}"
        )
    data: dict[str, object] = {
        "running": jobs,
        "longest": round(rows[0].longest, 3) if rows else None,
        "job_id": rows[0].id if rows else None,
    }
    known = {client.client_id: client for client in clients or ()}
    unregistered = [row for row in rows if clients is not None and row.client_id not in known]
    long = [
        _long(row)
        for row in rows
        if row.long and not row.is_stuck and (clients is None or _is_live(row, known))
    ]
    return [
        ok("running", text, data),
        *limited(long),
        *_unregistered(unregistered, clients or []),
    ]


def _is_live(row: RunningRow, known: dict[str, ClientRow]) -> bool:
    """Return whether the client of these jobs is live. The check `clients` reports the jobs of dead
    clients."""
    client = known.get(row.client_id or "")
    return client is not None and client.is_alive


def _long(row: RunningRow) -> Finding:
    more = f" (and {row.long - 1:,} more like it)" if row.long > 1 else ""
    return warn(
        "running",
        f'job {row.id} of kind "{row.kind}" in queue "{row.queue}"{more} runs for '
        f"{span(row.longest)} in {row.client_id}, and no cancellation is known. Either its code "
        "needs that long, or it hangs, or it has ended and its result cannot be stored",
        f"search the log of that worker for `{JOB_RESULTS_REJECTED}`: a trigger of yours or a "
        "damaged row can prevent that a result is stored. If the job hangs: riverpy job cancel "
        f"{row.id}. If it still runs after that, restart the worker, because code that blocks or "
        "ignores its cancellation ends only with its process. Give the kind a timeout",
        {
            "job_id": row.id,
            "jobs": row.long,
            "kind": row.kind,
            "queue": row.queue,
            "client_id": row.client_id,
            "seconds": round(row.longest, 3),
        },
    )


def _unregistered(rows: Sequence[RunningRow], clients: Sequence[ClientRow]) -> list[Finding]:
    """Report running jobs of clients that write no heartbeat, such as clients in another
    language."""
    if not rows:
        return []
    worked = {kind for client in clients if client.is_alive for kind in client.kinds}
    foreign = [row for row in rows if row.kind not in worked]
    unknown: Counter[str] = Counter()
    for row in foreign:
        unknown[row.kind] += row.jobs
    jobs = sum(row.jobs for row in rows)
    ids = names(sorted({row.client_id or "unknown" for row in rows}))
    text = f"{count(jobs, 'job', limit=RUNNING_LIMIT)} of clients that are not registered: {ids}"
    data: dict[str, object] = {
        "running": jobs,
        "clients": sorted({row.client_id or "" for row in rows}),
        "unknown_kinds": dict(unknown),
    }
    old = [row for row in foreign if row.longest >= RESCUE_AFTER_DEFAULT.total_seconds()]
    if not old:
        text += " (clients in another language, or older than the table of clients)"
        return [ok("unregistered", text, data)]
    longest = max(row.longest for row in old)
    return [
        warn(
            "unregistered",
            f"{text}. Those of kind {names(sorted({row.kind for row in old}))} run for up to "
            f"{span(longest)}. No leader releases them: a riverpy leader releases only kinds that "
            "it has",
            "if their client is gone, register a worker for these kinds in Python, if only a stub "
            "(docs/go.md), or let a Go client that has these kinds become leader",
            data,
        )
    ]
