"""Checks of the kinds of waiting jobs: kinds without a worker, and kinds whose attempts fail."""

from __future__ import annotations

from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING

from riverpy._log_events import JOBS_FAILED
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.snapshot import (
    QUEUE_ROW_AGE_MAX_SECONDS,
    SAMPLED_JOBS_OF_QUEUE_MAX,
    compute_backlog_sample_size,
)
from riverpy._tools.doctor.statements import count_discarded_jobs
from riverpy._tools.text import format_count, format_error, format_names, format_waiting_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot, WorkerProgram
    from riverpy._tools.doctor.statements import BacklogRow, WaitingKindRow
    from riverpy._tools.reads import ClientRow

UNKNOWN_KIND_ERROR = "job kind is not registered"
"""A job's error starts with these words if the client that claimed the job has no worker for its
kind. River writes the same words."""
DISCARDED_JOBS_WINDOW = timedelta(hours=1)
"""Jobs that were discarded within this time are reported."""
ATTEMPTS_LEFT_WARN_COUNT = 1
"""A kind is reported if one of its failed jobs has at most this number of attempts left."""
FAILED_JOBS_WARN_COUNT = 10
"""A kind is reported if at least this number of its failed jobs wait for their next attempt."""


async def check_kinds_missing_in_program(
    program: WorkerProgram, snapshot: DatabaseSnapshot
) -> list[Finding]:
    """Report the kinds of waiting jobs for which the user's program has no worker. The user names
    the program (MODULE:ATTR) in the command `riverpy doctor`."""
    backlogs = [
        row
        for row in await snapshot.backlogs()
        if not program.queues or row.queue in program.queues
    ]
    rows = await snapshot.waiting_kinds(backlogs)
    missing = [row for row in rows if row.kind not in program.kinds]
    where = f"queue {format_names(sorted(program.queues))}" if program.queues else "any queue"
    summary = ok_finding(
        f"{program.name} has {format_count(len(program.kinds), 'kind')}. Jobs of "
        f"{format_count(len(rows), 'kind')} wait in {where}",
        kinds=sorted(program.kinds),
        queues=sorted(program.queues),
        missing_kinds=[row.kind for row in missing],
    )
    fix = (
        "register a worker for the kind before this program works the queue. Otherwise it can "
        "claim such jobs and fail them, and each failure uses an attempt"
    )
    return [
        summary,
        *(
            warn_finding(
                f'{program.name} lacks kind "{row.kind}". {_describe_waiting_jobs(row, backlogs)}',
                fix,
                kind=row.kind,
                jobs=row.job_count,
                job_id=row.example_job_id,
                queues=row.queues,
            )
            for row in missing
        ),
    ]


async def check_kinds_without_worker(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the kinds of waiting jobs for which no live client has a worker."""
    live = await snapshot.live_clients()
    if not live:
        return [ok_finding("not known: no riverpy client runs", kinds=None)]
    backlogs = await snapshot.backlogs()
    rows = await snapshot.waiting_kinds(backlogs)
    worked = {kind for client in live for kind in client.kinds}
    unknown = [row for row in rows if row.kind not in worked]
    non_riverpy_queues = (
        await _find_non_riverpy_client_queues(snapshot, live) if unknown else set[str]()
    )
    known = {row.kind: row.kind in worked for row in rows}
    return [
        ok_finding(f"{format_count(len(rows), 'kind')} of waiting jobs", kinds=known),
        *(_kind_without_worker_finding(row, backlogs, live, non_riverpy_queues) for row in unknown),
    ]


async def _find_non_riverpy_client_queues(
    snapshot: DatabaseSnapshot, clients: Sequence[ClientRow]
) -> set[str]:
    """Return the queues that a client in another language may work. If the leader is a client in
    another language, return all queues. Otherwise return the queues that no riverpy client works,
    but whose rows were updated recently."""
    leader = await snapshot.last_leader()
    rows = await snapshot.queues()
    if leader is not None and not leader.has_lease_expired and leader.is_registered is False:
        return {row.name for row in rows}
    worked = {queue for client in clients for queue in client.queues}
    return {
        row.name
        for row in rows
        if row.seconds_since_update < QUEUE_ROW_AGE_MAX_SECONDS and row.name not in worked
    }


def _kind_without_worker_finding(
    row: WaitingKindRow,
    backlogs: Sequence[BacklogRow],
    clients: Sequence[ClientRow],
    non_riverpy_queues: set[str],
) -> Finding:
    worked = [queue for queue in row.queues if any(queue in client.queues for client in clients)]
    text = f'no riverpy worker has kind "{row.kind}". {_describe_waiting_jobs(row, backlogs)}'
    if non_riverpy_queues & set(row.queues):
        text += " (a client in another language may have the kind)"
    where = "" if worked else ", for this queue"
    fix = f"start or deploy a worker that has the kind{where}. Until then the jobs wait unchanged"
    is_claimed = row.failed_job_count and worked and UNKNOWN_KIND_ERROR in (row.newest_error or "")
    if is_claimed:
        number = "All" if row.failed_job_count == row.job_count else f"{row.failed_job_count:,}"
        pause = f"riverpy queue pause {' '.join(quote(queue) for queue in worked)}"
        text += (
            f". Clients without this kind claim the jobs and fail them. {number} of them failed "
            f"already{_describe_attempts_left(row)}. After the last attempt a job is discarded. "
            f"The newest error: {format_error(row.newest_error or '')}"
        )
        fix = (
            f"stop the failures now with {pause}, which also stops all other jobs of the queue. "
            "Deploy a worker that has the kind, and set known_kinds_only (River in Go: "
            "FetchOnlyKnownKinds) in the other workers. riverpy job retry ID runs a discarded job "
            "again"
        )
    return (fail_finding if is_claimed else warn_finding)(
        text,
        fix,
        kind=row.kind,
        jobs=row.job_count,
        job_id=row.example_job_id,
        queues=row.queues,
        failed=row.failed_job_count,
        attempts_left=row.min_attempts_left,
    )


def _describe_waiting_jobs(row: WaitingKindRow, backlogs: Sequence[BacklogRow]) -> str:
    """Return a sentence about the waiting jobs of a kind."""
    limit = compute_backlog_sample_size(backlogs)
    is_partial = any(one.job_count > limit for one in backlogs if one.queue in row.queues)
    jobs = format_waiting_count(row.job_count, "job", suffix=" of this kind", is_partial=is_partial)
    return f"{jobs} in queue {format_names(row.queues)}, for example job {row.example_job_id}"


def _describe_attempts_left(row: WaitingKindRow) -> str:
    if row.min_attempts_left is None:
        return ""
    return f", and one has only {format_count(row.min_attempts_left, 'attempt')} left"


async def check_failing_kinds(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the kinds with failed jobs that wait for their next attempt, or with jobs that were
    discarded."""
    kinds = await snapshot.waiting_kinds(await snapshot.backlogs())
    rows = {row.kind: row for row in kinds if row.failed_job_count}
    live = await snapshot.live_clients()
    worked = {kind for client in live for kind in client.kinds}
    discarded = await snapshot.session.read(
        count_discarded_jobs,
        snapshot.schema,
        window=DISCARDED_JOBS_WINDOW,
        limit=SAMPLED_JOBS_OF_QUEUE_MAX,
    )
    failed = sum(row.failed_job_count for row in rows.values())
    text = "no failed job waits for its next attempt"
    if rows:
        of = f" of {format_count(len(rows), 'kind')}"
        text = f"{format_waiting_count(failed, 'failed job', suffix=of)} for the next attempt"
    failures = {kind: row.failed_job_count for kind, row in rows.items()}
    found = [
        _failing_kind_finding(kind, rows.get(kind), discarded.get(kind, 0))
        for kind in sorted({*rows, *discarded})
        if not live
        or kind in worked
        or kind not in rows  # the check `kinds` reports kinds without a worker
    ]
    problems = [finding for finding in found if finding is not None]
    return [ok_finding(text, failed=failures, discarded=discarded), *problems]


def _failing_kind_finding(
    kind: str, row: WaitingKindRow | None, discarded_jobs: int
) -> Finding | None:
    failed, attempts_left = (row.failed_job_count, row.min_attempts_left) if row else (0, None)
    is_close = attempts_left is not None and attempts_left <= ATTEMPTS_LEFT_WARN_COUNT
    if not (discarded_jobs or is_close or failed >= FAILED_JOBS_WARN_COUNT):
        return None
    facts: list[str] = []
    if discarded_jobs:
        jobs = format_count(
            discarded_jobs, "job was", plural="jobs were", limit=SAMPLED_JOBS_OF_QUEUE_MAX
        )
        facts.append(f"{jobs} discarded in the last hour")
    if row is not None:
        jobs = format_waiting_count(failed, "job", suffix=" failed and")
        facts.append(f"{jobs} for the next attempt{_describe_attempts_left(row)}")
    chosen = f"--state discarded --kind {quote(kind)}"
    text = f'kind "{kind}" fails: {"; ".join(facts)}'
    if row is not None and row.newest_error:
        text += f". The newest error: {format_error(row.newest_error)}"
    return warn_finding(
        text,
        f"read the errors in the workers' logs (`{JOBS_FAILED}`) or with riverpy job show ID. "
        f"After you have corrected the code: riverpy job retry {chosen} runs all discarded jobs "
        f"again, riverpy job retry ID one job. To list them: riverpy job list {chosen}",
        kind=kind,
        failed=failed,
        attempts_left=attempts_left,
        discarded=discarded_jobs,
    )
