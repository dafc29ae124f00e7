"""StopReport: the attempts, results and services that had not ended when a run stopped."""

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
    """The attempts, results and services that had not ended when a run stopped. The report is empty
    after a clean stop."""

    abandoned: tuple[ClaimKey, ...] = ()
    """The attempts whose code did not end in time. The rows of their jobs stay `running`."""
    unstored: int = 0
    """The number of results that could not be stored in time. The rows of their jobs stay
    `running`."""

    claims_in_doubt: bool = False
    """Whether the answer to a claim was lost and the claim could not be checked. Jobs that this
    client claimed but did not run may stay `running`."""
    maintenance_left: bool = False
    """Whether maintenance still runs, because a hook does not end. The database refuses writes
    through riverpy after the end of the term, but not writes over the user's own connection."""
    singletons_left: tuple[str, ...] = ()
    """The names of the singletons whose function still runs, because it ignores the cancellation or
    runs in a thread. The database refuses writes through the fence of the lease."""

    @property
    def is_clean(self) -> bool:
        """Whether all attempts, maintenance and singletons ended, all results were stored, and no
        claim is in doubt."""
        return self == StopReport()


def log_left(report: StopReport) -> None:
    """Log one event for each kind of thing that had not ended."""
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
