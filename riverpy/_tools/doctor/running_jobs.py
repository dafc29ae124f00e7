"""Running: jobs that have been running for long, and those of clients that nobody knows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, count, names, shown, span
from riverpy._tools.doctor.snapshot import RUNNING_LIMIT
from riverpy.config import RESCUE_AFTER_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import ClientRow, RunningRow


async def check_running(patient: DatabaseSnapshot) -> list[Finding]:
    """Which jobs run for longer than a job should. How long its code may take, its client alone
    knows; the row says since when it runs, and who claimed it.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    rows = await patient.running(clients or [])
    jobs = sum(row.jobs for row in rows)
    text = count(jobs, "job", limit=RUNNING_LIMIT)
    if rows:
        first = rows[0]
        text += (
            f', the longest for {span(first.longest)}: job {first.id}, kind "{first.kind}", of '
            f"{first.client_id or 'nobody'}"
        )
    data: dict[str, object] = {
        "running": jobs,
        "longest": round(rows[0].longest, 3) if rows else None,
        "job_id": rows[0].id if rows else None,
    }
    known = {one.client_id: one for one in clients or ()}
    strangers = [row for row in rows if clients is not None and row.client_id not in known]
    return [
        Finding(Level.OK, "running", text, data=data),
        *shown(_long(rows, known, clients is None)),
        *_unregistered(strangers, clients or []),
    ]


def _long(
    rows: Sequence[RunningRow], known: dict[str, ClientRow], is_unknown: bool
) -> list[Finding]:
    """Those of clients that live, or of which nothing is known: for dead ones see `clients`, for
    those that were cancelled `stuck`."""
    found: list[Finding] = []
    for row in rows:
        client = known.get(row.client_id or "")
        if not row.long or row.is_stuck or not (is_unknown or (client and client.is_alive)):
            continue
        more = f" (and {row.long - 1:,} more like it)" if row.long > 1 else ""
        found.append(
            Finding(
                Level.WARN,
                "running",
                f'job {row.id} of kind "{row.kind}" in queue "{row.queue}"{more} runs for '
                f"{span(row.longest)}, in {row.client_id}, and was not cancelled yet, as far as is "
                "known. It hangs, unless its code may take that long, or it has ended and its "
                "result cannot be stored",
                "see the log of that worker for `job results`: a trigger of yours, or a damaged "
                "row, may keep a result from being stored. If it hangs: riverpy job cancel "
                f"{row.id}. If it does not end then, restart that worker: code that blocks or "
                "ignores its cancellation ends with its process only. Give the kind a timeout",
                {
                    "job_id": row.id,
                    "jobs": row.long,
                    "kind": row.kind,
                    "queue": row.queue,
                    "client_id": row.client_id,
                    "seconds": round(row.longest, 3),
                },
            )
        )
    return found


def _unregistered(strangers: Sequence[RunningRow], clients: Sequence[ClientRow]) -> list[Finding]:
    """Running jobs of clients that give no signs of life, which a client in another language never
    does."""
    if not strangers:
        return []
    jobs = sum(row.jobs for row in strangers)
    had = {kind for one in clients if one.is_alive for kind in one.kinds}
    left = [row for row in strangers if row.kind not in had]
    age = RESCUE_AFTER_DEFAULT.total_seconds()
    old = [row for row in left if row.longest >= age]
    unknown: Counter[str] = Counter()
    for row in left:
        unknown[row.kind] += row.jobs
    who = names(sorted({row.client_id or "nobody" for row in strangers}))
    text = f"{count(jobs, 'job', limit=RUNNING_LIMIT)} of clients that are not registered: {who}"
    data: dict[str, object] = {
        "running": jobs,
        "clients": sorted({row.client_id or "" for row in strangers}),
        "unknown_kinds": dict(unknown),
    }
    if not old:
        text += " (clients in another language, or of a time before their table)"
        return [Finding(Level.OK, "unregistered", text, data=data)]
    kinds = sorted({row.kind for row in old})
    longest = max(row.longest for row in old)
    return [
        Finding(
            Level.WARN,
            "unregistered",
            f"{text}. Those of kind {names(kinds)} run for up to {span(longest)}, and are left as "
            "they are: a leader in Python gives back only kinds that it has",
            "if their client is gone, register a worker for these kinds in Python, if only a stub "
            "(docs/go.md), or let a client in Go lead that has them",
            data,
        )
    ]
