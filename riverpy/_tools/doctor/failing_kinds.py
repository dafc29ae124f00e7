"""Check of the kinds whose attempts fail."""

from __future__ import annotations

from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING

from riverpy._log_events import JOBS_FAILED
from riverpy._tools.doctor.finding import Finding, limited, ok, warn
from riverpy._tools.doctor.snapshot import KINDS_LIMIT
from riverpy._tools.doctor.statements import doctor_discarded
from riverpy._tools.text import count, one_error

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import KindRow

WINDOW = timedelta(hours=1)
"""Jobs that were discarded within this time are reported."""
ATTEMPTS_LEFT_WARN = 1
"""A kind is reported if one of its jobs has this number of attempts left, or fewer."""
FAILED_JOBS_WARN = 10
"""A kind is reported if this number of its failed jobs wait for their next attempt, or more."""


async def check_failing(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the kinds with failed jobs that wait for their next attempt, or with jobs that were
    discarded."""
    rows = {row.kind: row for row in await snapshot.kinds(await snapshot.backlogs()) if row.failed}
    live = [client for client in await snapshot.clients() or () if client.is_alive]
    worked = {kind for client in live for kind in client.kinds}
    async with snapshot.session.reading() as connection:
        discarded = await doctor_discarded(
            connection, snapshot.schema, window=WINDOW, limit=KINDS_LIMIT
        )
    failed = sum(row.failed for row in rows.values())
    data: dict[str, object] = {
        "failed": {kind: row.failed for kind, row in rows.items()},
        "discarded": discarded,
    }
    text = "no failed job waits for its next attempt"
    if rows:
        text = (
            f"{count(failed, 'failed job')} of {count(len(rows), 'kind')} "
            f"wait{'s' if failed == 1 else ''} for the next attempt"
        )
    found = [
        _kind_finding(kind, rows.get(kind), discarded.get(kind, 0))
        for kind in sorted({*rows, *discarded})
        if not live or kind in worked or kind not in rows  # the check `kinds` reports the others
    ]
    problems = [finding for finding in found if finding is not None]
    return [ok("failing", text, data), *limited(problems)]


def _kind_finding(kind: str, row: KindRow | None, discarded: int) -> Finding | None:
    failed, attempts_left = (row.failed, row.attempts_left) if row else (0, None)
    is_close = attempts_left is not None and attempts_left <= ATTEMPTS_LEFT_WARN
    if not (discarded or is_close or failed >= FAILED_JOBS_WARN):
        return None
    facts: list[str] = []
    if discarded:
        what = count(discarded, "job was", plural="jobs were", limit=KINDS_LIMIT)
        facts.append(f"{what} discarded in the last hour")
    if failed:
        left = ""
        if attempts_left is not None:
            left = f", and one has only {count(attempts_left, 'attempt')} left"
        facts.append(
            f"{count(failed, 'job')} failed and wait{'s' * (failed == 1)} for the next attempt"
            f"{left}"
        )
    text = f'kind "{kind}" fails: {"; ".join(facts)}'
    if row is not None and row.error:
        text += f". The newest error: {one_error(row.error)}"
    return warn(
        "failing",
        text,
        f"read the errors in the workers' logs (`{JOBS_FAILED}`) or with riverpy job show ID. "
        "After you have corrected the code, riverpy job retry ID runs a job again, also a "
        f"discarded one. To list them: riverpy job list --state discarded --kind {quote(kind)}",
        {
            "kind": kind,
            "failed": failed,
            "attempts_left": attempts_left,
            "discarded": discarded,
        },
    )
