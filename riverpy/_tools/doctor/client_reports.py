"""Checks of what live clients report: jobs that still run long after their cancellation (stuck
jobs), and rows that a client skips for a while because statements on these rows fail."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._postgres.schema import CLIENT_SLOTS_MIGRATION, CLIENT_STATE_MIGRATION
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.text import (
    SHOWN_NAMES_MAX,
    format_count,
    format_error,
    format_job_ids,
    format_names,
    format_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import RunningJobGroup
    from riverpy._tools.reads import ClientRow, SkippedRow

_STUCK_JOBS_FIX = (
    "restart that worker. Its jobs were already cancelled, by their timeout or by a user: a second "
    "cancel changes nothing. Then correct the code of the kind: it ignores its cancellation, or "
    "blocks in a thread (docs/misbehaving.md)"
)
_SKIPPED_ROWS_FIX = (
    "remove the cause that the error names: a trigger, a foreign key, a lock, a damaged value "
    "(docs/faults.md#damaged-rows). No other row is delayed. The client tries these rows again, at "
    "least every 5 minutes (docs/doctor.md)"
)


async def check_stuck_jobs(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report jobs that still run after their cancellation, and how many slots they use."""
    if not snapshot.has_migration(CLIENT_SLOTS_MIGRATION):
        return [ok_finding("not known: the columns for it are missing (see `schema`)", stuck=None)]
    reporting = [client for client in await snapshot.live_clients() if client.stuck_job_ids]
    if not reporting:
        return [ok_finding("no cancelled job still runs", stuck=0)]
    rows = [row for row in await snapshot.running_job_groups() if row.is_stuck]
    return [
        _stuck_jobs_finding(client, [row for row in rows if row.client_id == client.client_id])
        for client in reporting
    ]


def _stuck_jobs_finding(client: ClientRow, groups: Sequence[RunningJobGroup]) -> Finding:
    number = len(client.stuck_job_ids)
    slots = None if client.queue_slots is None else sum(client.queue_slots)
    full_queues = _find_queues_filled_by_stuck_jobs(client, groups)
    is_full = slots is not None and number >= slots
    used = (
        format_count(number, "slot")
        if slots is None
        else f"{number:,} of {format_count(slots, 'slot')}"
    )
    jobs = format_job_ids(client.stuck_job_ids)
    text = f"{client.client_id}: cancelled jobs that still run use {used}: {jobs}"
    if groups:
        text += f" ({'; '.join(map(_describe_job_group, groups[:SHOWN_NAMES_MAX]))})"
    if is_full:
        text += ". This client can work no other job"
    elif full_queues:
        text += f". This client can work no other job of queue {format_names(full_queues)}"
    kinds: Counter[str] = Counter()
    for row in groups:
        kinds[row.kind] += row.job_count
    return (fail_finding if is_full or full_queues else warn_finding)(
        text,
        _STUCK_JOBS_FIX,
        client_id=client.client_id,
        stuck=number,
        slots=slots,
        job_ids=client.stuck_job_ids,
        kinds=dict(kinds),
        longest=max((round(row.longest_run_seconds, 3) for row in groups), default=None),
        full_queues=full_queues,
    )


def _describe_job_group(group: RunningJobGroup) -> str:
    limit = "" if group.job_count == 1 else "up to "
    place = f'kind "{group.kind}" in queue "{group.queue}"'
    return f"{group.job_count:,} of {place} for {limit}{format_seconds(group.longest_run_seconds)}"


def _find_queues_filled_by_stuck_jobs(
    client: ClientRow, groups: Sequence[RunningJobGroup]
) -> list[str]:
    """Return the queues in which stuck jobs use all slots of the client."""
    used: Counter[str] = Counter()
    for row in groups:
        used[row.queue] += row.job_count
    slots = zip(client.queues, client.queue_slots or (), strict=False)
    return [queue for queue, number in slots if used[queue] >= number]


async def check_skipped_rows(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report rows that clients skip for a while. There is one finding for each client, operation
    and error."""
    if not snapshot.has_migration(CLIENT_STATE_MIGRATION):
        return [ok_finding("not known: the column for it is missing (see `schema`)", rows=None)]
    groups: dict[tuple[str, str, str], list[SkippedRow]] = {}
    unnamed: dict[str, int] = {}
    for client in await snapshot.live_clients():
        if (skipped := client.skipped_rows) is not None:
            for row in skipped.first_rows:
                groups.setdefault((client.client_id, row.operation, row.error), []).append(row)
            unnamed[client.client_id] = skipped.row_count - len(skipped.first_rows)
    findings = [
        _skipped_rows_finding(client_id, rows, unnamed[client_id])
        for (client_id, _, _), rows in groups.items()
    ]
    return findings or [ok_finding("no client has set a row aside", rows=0)]


def _skipped_rows_finding(
    client_id: str, rows: Sequence[SkippedRow], unnamed_row_count: int
) -> Finding:
    first, tries = min(rows, key=lambda row: row.failing_since), max(row.tries for row in rows)
    text = (
        f"{client_id}: {format_count(len(rows), 'row')} set aside ({first.operation}): "
        f"{format_names(row.row_key for row in rows)}, since {first.failing_since}, "
        f"{'up to ' if len(rows) > 1 else ''}{format_count(tries, 'try', plural='tries')}: "
        f"{format_error(first.error)}"
    )
    if unnamed_row_count:
        text += f". This client has set {format_count(unnamed_row_count, 'more row')} aside"
    return warn_finding(
        text,
        _SKIPPED_ROWS_FIX,
        client_id=client_id,
        what=first.operation,
        rows=[row.row_key for row in rows],
        since=first.failing_since,
        tries=tries,
        error=first.error,
        unnamed=unnamed_row_count,
    )
