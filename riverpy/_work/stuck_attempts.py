"""StuckAttempts: the attempts that keep running although they were cancelled long ago."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import STUCK_JOB_ENDED, STUCK_JOB_FOUND, STUCK_JOB_HANDLER_FAILED
from riverpy.stuck import StuckJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._work.attempt import Attempt
    from riverpy.stuck import JobStuckHandler


class StuckAttempts:
    """The stuck attempts of one run. The user's handler decides whether a stuck attempt keeps its
    slot."""

    def __init__(self, handler: JobStuckHandler | None) -> None:
        self._handler = handler
        self._keeps_slot: dict[Attempt, bool] = {}
        log = get_logger()
        self._limited_log = log.limited()

    @property
    def keeps_slot(self) -> Mapping[Attempt, bool]:
        """The stuck attempts. The value is whether the attempt keeps its slot."""
        return self._keeps_slot

    def add(self, attempt: Attempt, now: float) -> None:
        """Call the handler for a stuck attempt, log the attempt, and free its slot if the handler
        returned True."""
        running = timedelta(seconds=now - attempt.started)
        self._keeps_slot[attempt] = True
        job = StuckJob(attempt.id, attempt.kind, attempt.queue, running, len(self._keeps_slot))
        keeps_slot = self._keeps_slot[attempt] = not self._gives_slot(job)
        self._limited_log.warning(
            STUCK_JOB_FOUND,
            job_id=job.id,
            kind=job.kind,
            queue=job.queue,
            reason=attempt.cause and attempt.cause.value,
            seconds=round(running.total_seconds(), 3),
            keeps_slot=keeps_slot,
            stuck=job.total,
        )
        if not keeps_slot:
            attempt.free_slot()

    def remove(self, attempt: Attempt) -> bool:
        """Remove an attempt that ended. Returns whether the attempt still had its slot."""
        keeps_slot = self._keeps_slot.pop(attempt, None)
        if keeps_slot is None:
            return True
        self._limited_log.info(
            STUCK_JOB_ENDED,
            job_id=attempt.id,
            kind=attempt.kind,
            queue=attempt.queue,
            seconds=round(attempt.ended - attempt.started, 3),
            stuck=len(self._keeps_slot),
        )
        return keeps_slot

    def _gives_slot(self, job: StuckJob) -> bool:
        if self._handler is None:
            return False
        try:
            return bool(self._handler.handle_stuck(job))
        except BaseException:  # user code must not end the event loop
            self._limited_log.exception(STUCK_JOB_HANDLER_FAILED, job_id=job.id, kind=job.kind)
            return False
