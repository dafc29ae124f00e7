"""The timeouts of the stop of a run, and the report of what did not end in time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._log import get_logger
from riverpy._log_events import (
    CLAIM_LEFT_UNANSWERED,
    JOB_RESULTS_LEFT_UNSTORED,
    JOBS_ABANDONED,
    MAINTENANCE_ABANDONED,
    SINGLETONS_ABANDONED,
)
from riverpy._postgres.jobs import ClaimKey

if TYPE_CHECKING:
    import asyncio
    from datetime import timedelta


RESULT_STORING_TIME_SHARE = 0.4
"""The fraction of the hard stop timeout that is reserved for storing the last results."""
RESULT_STORING_TIME_MIN = 1.0
"""The minimum number of seconds for storing the last results, even if the deadline of the stop has
already passed. If the share `RESULT_STORING_TIME_SHARE` of the hard stop timeout is shorter, the
minimum is that share."""


class StopTimeouts:
    """Computes how many seconds are left for each step of a stop."""

    def __init__(self, soft_timeout: timedelta | None, hard_timeout: timedelta) -> None:
        """`soft_timeout` limits how long jobs may keep running after the stop request; None means
        no limit. `hard_timeout` limits how long cancelled jobs and the storing of results may
        take."""
        self._soft_timeout = math.inf if soft_timeout is None else soft_timeout.total_seconds()
        self._hard_timeout = hard_timeout.total_seconds()
        self._stop_requested_at: float | None = None
        self._stop_deadline = math.inf
        self._result_storing_scope: anyio.CancelScope | None = None

    @property
    def is_stop_requested(self) -> bool:
        """Whether a stop was requested. After a fault or a cancellation, a run also ends without a
        stop request."""
        return self._stop_requested_at is not None

    def start_timeouts(self) -> None:
        """Start the soft and the hard stop timeout, because a stop was requested."""
        self._stop_requested_at = time.monotonic()
        self._shorten_deadline(self._soft_timeout + self._hard_timeout)

    def start_hard_stop_timeout(self) -> None:
        """Start the hard stop timeout now. If the stop already has an earlier deadline, that
        deadline stays."""
        self._shorten_deadline(self._hard_timeout)

    def soft_stop_seconds_left(self) -> float | None:
        """Return how many seconds jobs may keep running; None means no limit. The result is 0 if
        the time has passed, or if the run ends without a stop request."""
        if self._stop_requested_at is None:
            return 0.0
        left = self._stop_requested_at + self._soft_timeout - time.monotonic()
        return None if left == math.inf else max(left, 0.0)

    def seconds_left_for_cancelled_jobs(self) -> float:
        """Return how many seconds cancelled jobs may take to end."""
        return max(self.stop_seconds_left() - self._hard_timeout * RESULT_STORING_TIME_SHARE, 0.0)

    def stop_seconds_left(self) -> float:
        """Return the seconds until the end of the stop. If the stop has no deadline yet, the hard
        stop timeout starts now."""
        if self._stop_deadline == math.inf:
            self.start_hard_stop_timeout()
        return max(self._stop_deadline - time.monotonic(), 0.0)

    async def wait_until_results_stored(self, all_stored: asyncio.Event) -> None:
        """Wait until `all_stored` is set or the deadline of the stop has passed. A cancellation of
        the caller does not end the wait."""
        minimum = min(self._hard_timeout * RESULT_STORING_TIME_SHARE, RESULT_STORING_TIME_MIN)
        until = anyio.current_time() + max(self.stop_seconds_left(), minimum)
        with anyio.CancelScope(shield=True, deadline=until) as self._result_storing_scope:
            await all_stored.wait()
        self._result_storing_scope = None

    def _shorten_deadline(self, seconds: float) -> None:
        self._stop_deadline = min(self._stop_deadline, time.monotonic() + seconds)
        if self._result_storing_scope is not None:
            until = anyio.current_time() + seconds
            self._result_storing_scope.deadline = min(self._result_storing_scope.deadline, until)


class StopReport(msgspec.Struct, frozen=True):
    """What was still running, not stored or in doubt when a run stopped. After a clean stop, all
    fields have their default values."""

    abandoned: tuple[ClaimKey, ...] = ()
    """The claim keys of the attempts whose code did not end in time. Their jobs stay `running` in
    the database."""
    unstored: int = 0
    """The number of results that could not be stored in time. Their jobs stay `running` in the
    database."""

    claims_in_doubt: bool = False
    """Whether the answer to a claim was lost and the claim could not be checked. Jobs that this
    claim took but the client did not run may stay `running`."""
    maintenance_left: bool = False
    """Whether maintenance is still running, because a hook of the user does not end. When the
    client is no longer leader, the database rejects what maintenance writes through riverpy, but
    not what the hook writes over the user's own connection."""
    singletons_left: tuple[str, ...] = ()
    """The names of the singletons whose function is still running, because it ignores the
    cancellation or runs in a thread. If the function calls `Lease.fence` before it writes, the
    database rejects its writes."""

    @property
    def is_clean(self) -> bool:
        """Whether all attempts, maintenance and singletons ended, all results were stored, and each
        claim was answered or checked."""
        return self == StopReport()


def log_stop_report(report: StopReport) -> None:
    """Log one event for each field of the report that is not empty."""
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
