"""Stuck: jobs that go on although they were cancelled, and the slots that they hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import (
    NAMES_SHOWN,
    Finding,
    Level,
    count,
    jobs,
    names,
    shown,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import ClientRow, RunningRow

_FIX = (
    "restart that worker. These jobs were told to end, by their timeout or by somebody: to cancel "
    "them again changes nothing. Then mend the code of the kind: it swallows its cancellation, or "
    "blocks in a thread (docs/misbehaving.md)"
)


async def check_stuck(patient: DatabaseSnapshot) -> list[Finding]:
    """Which living clients say that jobs of theirs are stuck.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    if clients is None or not patient.has_slots:
        text = "not known: clients have no place to tell of them (see `schema`)"
        return [Finding(Level.OK, "stuck", text, data={"stuck": None})]
    stuck = [one for one in clients if one.is_alive and one.stuck]
    if not stuck:
        text = "no job goes on although it was cancelled"
        return [Finding(Level.OK, "stuck", text, data={"stuck": 0})]
    rows = [row for row in await patient.running(clients) if row.is_stuck]
    return shown(
        [_client(one, [row for row in rows if row.client_id == one.client_id]) for one in stuck]
    )


def _client(one: ClientRow, rows: Sequence[RunningRow]) -> Finding:
    number, slots = len(one.stuck), None if one.slots is None else sum(one.slots)
    full = _full_queues(one, rows)
    is_full = slots is not None and number >= slots
    share = count(number, "slot") if slots is None else f"{number:,} of {count(slots, 'slot')}"
    go_on = "a job that goes" if number == 1 else "jobs that go"
    text = f"{one.client_id}: {share} held by {go_on} on although cancelled: {jobs(one.stuck)}"
    if rows:
        text += f" ({'; '.join(_words(row) for row in rows[:NAMES_SHOWN])})"
    if is_full:
        text += ". It works nothing any more"
    elif full:
        text += f". It works nothing of queue {names(full)} any more"
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds[row.kind] += row.jobs
    return Finding(
        Level.FAIL if is_full or full else Level.WARN,
        "stuck",
        text,
        _FIX,
        {
            "client_id": one.client_id,
            "stuck": number,
            "slots": slots,
            "job_ids": one.stuck,
            "kinds": dict(kinds),
            "longest": max((round(row.longest, 3) for row in rows), default=None),
            "full_queues": full,
        },
    )


def _words(row: RunningRow) -> str:
    most = "" if row.jobs == 1 else "up to "
    return f'{row.jobs:,} of kind "{row.kind}" in queue "{row.queue}" for {most}{span(row.longest)}'


def _full_queues(one: ClientRow, rows: Sequence[RunningRow]) -> list[str]:
    """The queues all of whose slots in this client are held."""
    held: Counter[str] = Counter()
    for row in rows:
        held[row.queue] += row.jobs
    slots = zip(one.queues, one.slots or (), strict=False)
    return [queue for queue, number in slots if held[queue] >= number]
