"""Code: which kinds of waiting jobs the program lacks that is to work them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, count, names, shown
from riverpy._tools.doctor.snapshot import kinds_limit

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import KindRow


@dataclass(frozen=True)
class Code:
    """A program, as it is before it runs."""

    name: str
    """Where it is, as MODULE:ATTR."""
    kinds: frozenset[str]
    queues: frozenset[str]
    """Those that it would work; none: it would be told which."""


async def check_code(code: Code, patient: DatabaseSnapshot) -> list[Finding]:
    """Which jobs it would take and fail, for want of their kind.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    places = [
        place for place in await patient.places() if not code.queues or place.queue in code.queues
    ]
    rows = await patient.kinds(places)
    lacking = [row for row in rows if row.kind not in code.kinds]
    where = f"queue {names(sorted(code.queues))}" if code.queues else "any queue"
    text = (
        f"{code.name} has {count(len(code.kinds), 'kind')}; {count(len(rows), 'kind')} among the "
        f"jobs that wait in {where}"
    )
    data: dict[str, object] = {
        "kinds": sorted(code.kinds),
        "queues": sorted(code.queues),
        "lacking": [row.kind for row in lacking],
    }
    most = kinds_limit(places)
    cut = {place.queue for place in places if place.jobs > most}
    problems = [_lacking(code, row, is_cut=not cut.isdisjoint(row.queues)) for row in lacking]
    return [Finding(Level.OK, "code", text, data=data), *shown(problems)]


def _lacking(code: Code, row: KindRow, *, is_cut: bool) -> Finding:
    jobs = f"{'at least ' if is_cut else ''}{count(row.jobs, 'job')}"
    return Finding(
        Level.WARN,
        "code",
        f'{code.name} lacks kind "{row.kind}", of which {jobs} wait{"s" if row.jobs == 1 else ""} '
        f"in queue {names(row.queues)}, as job {row.id}",
        "register a worker for it before this code works that queue: it would take such a job and "
        "fail it, which costs an attempt each time",
        {"kind": row.kind, "jobs": row.jobs, "job_id": row.id, "queues": row.queues},
    )
