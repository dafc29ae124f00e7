"""StopReport: what a run left behind, for its caller and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._log import get_logger
from riverpy._log_events import (
    CLAIM_LEFT_UNANSWERED,
    JOB_RESULTS_LEFT_UNSTORED,
    JOBS_ABANDONED,
    MAINTENANCE_ABANDONED,
    SINGLETONS_ABANDONED,
)

if TYPE_CHECKING:
    from riverpy._postgres.jobs import ClaimKey


class StopReport(msgspec.Struct, frozen=True):
    """What a run left behind: nothing, after a good stop."""

    abandoned: tuple[ClaimKey, ...] = ()
    """Attempts whose code did not end in time: their rows stay `running`."""
    unstored: int = 0
    """Results that the database did not take in time: their rows stay `running`."""

    claims_in_doubt: bool = False
    """Whether the answer to a claim was lost and the database did not say what it took: rows of
    this client may stay `running` that never ran."""
    maintenance_left: bool = False
    """Whether maintenance of a term that this client led goes on, for a hook that does not end. It
    can write nothing through riverpy's fence; over a connection of its own it can."""
    singletons_left: tuple[str, ...] = ()
    """Singletons whose function goes on: it ignores its cancellation, or is a thread. It can write
    nothing through the fence of its lease."""

    @property
    def is_clean(self) -> bool:
        """Whether every attempt, all maintenance and every singleton ended, every result was
        stored, and no claim is in doubt."""
        return self == StopReport()


def log_left(report: StopReport) -> None:
    """Log what was left behind, each kind of it by itself."""
    log = get_logger()
    if report.abandoned:
        log.error(
            JOBS_ABANDONED,
            count=len(report.abandoned),
            job_ids=[claim_key.id for claim_key in report.abandoned[:20]],
        )
    if report.unstored:
        log.error(JOB_RESULTS_LEFT_UNSTORED, count=report.unstored)
    if report.claims_in_doubt:
        log.error(
            CLAIM_LEFT_UNANSWERED,
            effect="jobs may be claimed that never ran; they are rescued later",
        )
    if report.maintenance_left:
        log.error(MAINTENANCE_ABANDONED)
    if report.singletons_left:
        log.error(SINGLETONS_ABANDONED, singletons=report.singletons_left)
