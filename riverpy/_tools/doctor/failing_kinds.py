"""Failing: kinds whose attempts fail, and how close their jobs are to being discarded."""

from __future__ import annotations

from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, count, one_error, shown
from riverpy._tools.doctor.snapshot import KINDS_LIMIT
from riverpy._tools.doctor.statements import doctor_discarded

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import KindRow

WINDOW = timedelta(hours=1)
"""For how long a discarded job is told of."""
CLOSE = 1
"""Attempts left, at which a job is close to being discarded."""
MANY = 10
"""Jobs of a kind that wait after a failure, from which on it is no odd one."""


async def check_failing(patient: DatabaseSnapshot) -> list[Finding]:
    """Which kinds fail, of the jobs that wait for their next attempt or were discarded of late.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    rows = {row.kind: row for row in await patient.kinds(await patient.places()) if row.failed}
    living = [one for one in await patient.clients() or () if one.is_alive]
    had = {kind for one in living for kind in one.kinds}
    async with patient.session.reading() as connection:
        discarded = await doctor_discarded(
            connection, patient.schema, window=WINDOW, limit=KINDS_LIMIT
        )
    failed = sum(row.failed for row in rows.values())
    data: dict[str, object] = {
        "failed": {kind: row.failed for kind, row in rows.items()},
        "discarded": discarded,
    }
    text = "no job waits for a next attempt after a failure"
    if rows:
        text = (
            f"{count(failed, 'job')} of {count(len(rows), 'kind')} "
            f"wait{'s' if failed == 1 else ''} for the next attempt after a failure"
        )
    found = [
        _kind(kind, rows.get(kind), discarded.get(kind, 0))
        for kind in sorted({*rows, *discarded})
        if not living or kind in had or kind not in rows  # of others `kinds` tells
    ]
    problems = [finding for finding in found if finding is not None]
    return [Finding(Level.OK, "failing", text, data=data), *shown(problems)]


def _kind(kind: str, row: KindRow | None, discarded: int) -> Finding | None:
    failed, left_over = (row.failed, row.left_over) if row else (0, None)
    is_close = left_over is not None and left_over <= CLOSE
    if not (discarded or is_close or failed >= MANY):
        return None
    facts: list[str] = []
    if discarded:
        what = count(discarded, "job was", plural="jobs were", limit=KINDS_LIMIT)
        facts.append(f"{what} discarded in the last hour")
    if failed:
        least = "" if left_over is None else f", with {count(left_over, 'attempt')} left at least"
        facts.append(
            f"{count(failed, 'job')} failed and wait{'s' * (failed == 1)} for the next{least}"
        )
    text = f'kind "{kind}" fails: {"; ".join(facts)}'
    if row is not None and row.error:
        text += f". The newest error: {one_error(row.error)}"
    return Finding(
        Level.WARN,
        "failing",
        text,
        "the errors are in the workers' logs (`jobs failed`) and in riverpy job show ID; once the "
        "code is mended, riverpy job retry ID runs a job again, also a discarded one: riverpy job "
        f"list --state discarded --kind {quote(kind)}",
        {
            "kind": kind,
            "failed": failed,
            "attempts_left": left_over,
            "discarded": discarded,
        },
    )
