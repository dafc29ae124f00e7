"""Check of the kinds of waiting jobs for which no worker is registered."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, fail, limited, ok, warn
from riverpy._tools.doctor.snapshot import TOUCHED_LIMIT, kinds_limit
from riverpy._tools.doctor.statements import doctor_queues
from riverpy._tools.text import count, names, one_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import BacklogRow, ClientRow, KindRow

UNKNOWN_KIND = "job kind is not registered"
"""The first words of the error of a job whose client has no worker for the kind. River writes the
same words."""


async def check_kinds(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the kinds of waiting jobs for which no live client has a worker."""
    clients = await snapshot.clients()
    live = [client for client in clients or () if client.is_alive]
    if not live:
        return [ok("kinds", "not known: no riverpy client runs", {"kinds": None})]
    backlogs = await snapshot.backlogs()
    rows = await snapshot.kinds(backlogs)
    worked = {kind for client in live for kind in client.kinds}
    unknown = [row for row in rows if row.kind not in worked]
    foreign = await _foreign_queues(snapshot, live) if unknown else set[str]()
    problems = [_unknown(row, backlogs, live, foreign) for row in unknown]
    return [
        ok(
            "kinds",
            f"{count(len(rows), 'kind')} of waiting jobs",
            {"kinds": {row.kind: row.kind in worked for row in rows}},
        ),
        *limited(problems),
    ]


async def _foreign_queues(snapshot: DatabaseSnapshot, live: Sequence[ClientRow]) -> set[str]:
    """Return the queues that a client in another language may work. If such a client is the leader,
    these are all queues. Otherwise they are the recently updated queues that no riverpy client
    works."""
    leader = await snapshot.leader()
    async with snapshot.session.reading() as connection:
        rows = await doctor_queues(connection, snapshot.schema)
    if leader is not None and not leader.has_expired and leader.is_registered is False:
        return {row.name for row in rows}
    worked = {queue for client in live for queue in client.queues}
    return {row.name for row in rows if row.touched < TOUCHED_LIMIT and row.name not in worked}


def _unknown(
    row: KindRow, backlogs: Sequence[BacklogRow], live: Sequence[ClientRow], foreign: set[str]
) -> Finding:
    worked = [queue for queue in row.queues if any(queue in client.queues for client in live)]
    limit = kinds_limit(backlogs)
    is_partial = any(one.jobs > limit for one in backlogs if one.queue in row.queues)
    jobs = f"{'at least ' if is_partial else ''}{count(row.jobs, 'job')}"
    text = (
        f'no riverpy worker has kind "{row.kind}". {jobs} of this kind '
        f"wait{'s' if row.jobs == 1 else ''} in queue {names(row.queues)}, for example job "
        f"{row.id}"
    )
    if foreign & set(row.queues):
        text += " (a client in another language may have the kind)"
    data: dict[str, object] = {
        "kind": row.kind,
        "jobs": row.jobs,
        "job_id": row.id,
        "queues": row.queues,
        "failed": row.failed,
        "attempts_left": row.attempts_left,
    }
    if row.failed and worked and UNKNOWN_KIND in (row.error or ""):
        return _failed(row, text, worked, data)
    where = "" if worked else ", for this queue"
    fix = f"start or deploy a worker that has the kind{where}. Until then the jobs wait unchanged"
    return warn("kinds", text, fix, data)


def _failed(row: KindRow, text: str, worked: Sequence[str], data: dict[str, object]) -> Finding:
    """Report a kind whose jobs are claimed by clients that have no worker for it."""
    left = ""
    if row.attempts_left is not None:
        left = f", and one has only {count(row.attempts_left, 'attempt')} left"
    number = "All" if row.failed == row.jobs else f"{row.failed:,}"
    pause = f"riverpy queue pause {' '.join(quote(queue) for queue in worked)}"
    return fail(
        "kinds",
        f"{text}. Clients without this kind claim the jobs and fail them. {number} of them failed "
        f"already{left}. After the last attempt a job is discarded. The newest error: "
        f"{one_error(row.error or '')}",
        f"stop the failures now with {pause}, which also stops all other jobs of the queue. "
        "Deploy a worker that has the kind, and set known_kinds_only (River in Go: "
        "FetchOnlyKnownKinds) in the other workers. riverpy job retry ID runs a discarded job "
        "again",
        data,
    )
