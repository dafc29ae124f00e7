"""StopReport: what a run left behind, for the caller and the log."""

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
    """What a run left behind. It is empty after a clean stop."""

    abandoned: tuple[ClaimKey, ...] = ()
    """Attempts whose code did not end in time. Their rows stay `running`."""
    unstored: int = 0
    """The number of results that could not be stored in time. Their rows stay `running`."""

    claims_in_doubt: bool = False
    """Whether the answer to a claim was lost and could not be checked. Rows of this client that
    never ran may stay `running`."""
    maintenance_left: bool = False
    """Whether maintenance of an earlier term still runs, because a hook does not end. Its writes
    through riverpy are refused. Writes over a connection of its own are not."""
    singletons_left: tuple[str, ...] = ()
    """The singletons whose function still runs, because it ignores its cancellation or is a thread.
    Its writes through the fence of its lease are refused."""

    @property
    def is_clean(self) -> bool:
        """Whether all attempts, maintenance and singletons ended, all results were stored, and no
        claim is in doubt."""
        return self == StopReport()


def log_left(report: StopReport) -> None:
    """Log each kind of thing that was left behind."""
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
