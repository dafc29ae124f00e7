"""Check of the kinds of waiting jobs for which a given program has no worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, limited, ok, warn
from riverpy._tools.doctor.snapshot import kinds_limit
from riverpy._tools.text import count, names

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import KindRow


@dataclass(frozen=True)
class Program:
    """A program whose worker does not run yet."""

    name: str
    """The name of the client or the workers, in the form MODULE:ATTR."""
    kinds: frozenset[str]
    queues: frozenset[str]
    """The queues that the program works; empty: the program names no queue."""


async def check_program(program: Program, snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the kinds of waiting jobs that the program would claim and fail."""
    backlogs = [
        row
        for row in await snapshot.backlogs()
        if not program.queues or row.queue in program.queues
    ]
    rows = await snapshot.kinds(backlogs)
    missing = [row for row in rows if row.kind not in program.kinds]
    where = f"queue {names(sorted(program.queues))}" if program.queues else "any queue"
    text = (
        f"{program.name} has {count(len(program.kinds), 'kind')}. Jobs of "
        f"{count(len(rows), 'kind')} wait in {where}"
    )
    data: dict[str, object] = {
        "kinds": sorted(program.kinds),
        "queues": sorted(program.queues),
        "lacking": [row.kind for row in missing],
    }
    limit = kinds_limit(backlogs)
    partial = {row.queue for row in backlogs if row.jobs > limit}
    problems = [
        _missing(program, row, is_partial=not partial.isdisjoint(row.queues)) for row in missing
    ]
    return [ok("code", text, data), *limited(problems)]


def _missing(program: Program, row: KindRow, *, is_partial: bool) -> Finding:
    jobs = f"{'at least ' if is_partial else ''}{count(row.jobs, 'job')}"
    return warn(
        "code",
        f'{program.name} lacks kind "{row.kind}". {jobs} of this kind '
        f"wait{'s' if row.jobs == 1 else ''} in queue {names(row.queues)}, for example job "
        f"{row.id}",
        "register a worker for the kind before this program works the queue. Otherwise it can "
        "claim such jobs and fail them, and each failure uses an attempt",
        {"kind": row.kind, "jobs": row.jobs, "job_id": row.id, "queues": row.queues},
    )
