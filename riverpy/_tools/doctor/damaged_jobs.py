"""Check of the jobs that the server cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.damaged_jobs import REMEDY
from riverpy._tools.doctor.finding import Finding, fail, ok
from riverpy._tools.text import jobs, one_error

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot


async def check_damaged(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the damaged jobs that earlier checks found. This check reads no further job, because a
    table may have many large jobs."""
    ids = sorted(snapshot.damaged)
    data: dict[str, object] = {"job_ids": ids}
    if not ids:
        return [ok("damaged", "no damaged job found (args and metadata are not read)", data)]
    error = one_error(snapshot.damaged[ids[0]])
    text = f"the server cannot read {jobs(ids)} ({error}). It read all others"
    return [fail("damaged", text, REMEDY, data)]
