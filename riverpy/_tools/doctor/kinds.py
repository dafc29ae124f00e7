"""Kinds: those of waiting jobs that no worker has, and what becomes of their jobs."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, count, names, one_error, shown
from riverpy._tools.doctor.snapshot import TOUCHED_LIMIT, kinds_limit
from riverpy._tools.doctor.statements import doctor_queues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import ClientRow, KindRow, PlaceRow

UNKNOWN_KIND = "job kind is not registered"
"""The begin of the error of an attempt at a kind that the client does not have, River's too."""


async def check_kinds(patient: DatabaseSnapshot) -> list[Finding]:
    """Kinds of waiting jobs that no living client has.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    living = [one for one in clients or () if one.is_alive]
    if not living:
        text = "not known: no client of riverpy's says which kinds it has"
        return [Finding(Level.OK, "kinds", text, data={"kinds": None})]
    places = await patient.places()
    rows = await patient.kinds(places)
    had = {kind for one in living for kind in one.kinds}
    text = f"{count(len(rows), 'kind')} among the waiting jobs"
    data: dict[str, object] = {"kinds": {row.kind: row.kind in had for row in rows}}
    unknown = [row for row in rows if row.kind not in had]
    elsewhere = await _worked_elsewhere(patient, living) if unknown else set[str]()
    problems = [_unknown(row, places, living, elsewhere) for row in unknown]
    return [Finding(Level.OK, "kinds", text, data=data), *shown(problems)]


async def _worked_elsewhere(patient: DatabaseSnapshot, living: Sequence[ClientRow]) -> set[str]:
    """Queues that a client in another language may work: all, where one leads; and those that
    somebody works who is no client of riverpy's."""
    lead = await patient.lead()
    async with patient.session.reading() as connection:
        rows = await doctor_queues(connection, patient.schema)
    if lead is not None and not lead.is_over and lead.is_registered is False:
        return {row.name for row in rows}
    worked = {queue for one in living for queue in one.queues}
    return {row.name for row in rows if row.touched < TOUCHED_LIMIT and row.name not in worked}


def _unknown(
    row: KindRow, places: Sequence[PlaceRow], living: Sequence[ClientRow], elsewhere: set[str]
) -> Finding:
    worked = [queue for queue in row.queues if any(queue in one.queues for one in living)]
    most = kinds_limit(places)
    is_cut = any(place.jobs > most for place in places if place.queue in row.queues)
    jobs = f"{'at least ' if is_cut else ''}{count(row.jobs, 'job')}"
    text = (
        f'no worker of riverpy\'s has kind "{row.kind}", of which {jobs} '
        f"wait{'s' if row.jobs == 1 else ''} in queue {names(row.queues)}, as job {row.id}"
    )
    if elsewhere & set(row.queues):
        text += " (a client in another language may have it)"
    data: dict[str, object] = {
        "kind": row.kind,
        "jobs": row.jobs,
        "job_id": row.id,
        "queues": row.queues,
        "failed": row.failed,
        "attempts_left": row.left_over,
    }
    if row.failed and worked and UNKNOWN_KIND in (row.error or ""):
        left = (
            ""
            if row.left_over is None
            else f", with {count(row.left_over, 'attempt')} left at least"
        )
        number = "All" if row.failed == row.jobs else f"{row.failed:,}"
        pause = f"riverpy queue pause {' '.join(quote(queue) for queue in worked)}"
        return Finding(
            Level.FAIL,
            "kinds",
            f"{text}. {number} of them failed already{left}; then they are discarded: "
            "clients claim them without having their kind. The newest error: "
            f"{one_error(row.error or '')}",
            "deploy a worker that has it, and set known_kinds_only (River in Go: "
            f"FetchOnlyKnownKinds) in the others; until then {pause} saves their attempts, and "
            "holds the other jobs of the queue too. riverpy job retry ID runs a discarded job "
            "again",
            data,
        )
    where = "" if worked else ", for this queue"
    fix = f"start or deploy a worker that has it{where}; until then its jobs wait unchanged"
    return Finding(Level.WARN, "kinds", text, fix, data)
