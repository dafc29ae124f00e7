"""Damaged: jobs that the server cannot read, among those that the looks before this one read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.damaged_jobs import REMEDY
from riverpy._tools.doctor.finding import Finding, Level, jobs, one_error

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot


async def check_damaged(patient: DatabaseSnapshot) -> list[Finding]:
    """Which jobs these were. No other one is read for this: values may be large, and many."""
    ids = sorted(patient.damaged)
    data: dict[str, object] = {"job_ids": ids}
    if not ids:
        text = "no damaged job was met (args and metadata are not read here)"
        return [Finding(Level.OK, "damaged", text, data=data)]
    error = one_error(patient.damaged[ids[0]])
    text = f"the server cannot read {jobs(ids)} ({error}). All others were read"
    return [Finding(Level.FAIL, "damaged", text, REMEDY, data)]
