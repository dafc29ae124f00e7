"""ReturnLog: logs handlers that return a value, or that return although they were cancelled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import CANCELLED_JOB_COMPLETED, JOB_RETURN_VALUE_IGNORED

if TYPE_CHECKING:
    from riverpy._work.attempt import Attempt


def returned_type(value: object) -> str | None:
    """Return the name of the type of a value; None for None."""
    return None if value is None else type(value).__name__


class ReturnLog:
    """Logs, for one run, handlers that returned a value or returned after a cancellation."""

    def __init__(self) -> None:
        self._log = get_logger()
        self._kinds_with_value: set[str] = set()
        self._limited_log = self._log.limited()

    def report(self, attempt: Attempt, returned: str | None) -> None:
        """Log a returned value, once for each kind, and a return after a cancellation.

        Args:
            attempt: the attempt, whose result is not stored yet.
            returned: the name of the type of the returned value.
        """
        if returned is not None and attempt.kind not in self._kinds_with_value:
            self._kinds_with_value.add(attempt.kind)
            self._log.warning(
                JOB_RETURN_VALUE_IGNORED,
                kind=attempt.kind,
                job_id=attempt.id,
                type=returned,
                advice="return nothing, or keep the value with job.record_output(…)",
            )
        if attempt.cause is not None:
            self._limited_log.warning(
                CANCELLED_JOB_COMPLETED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                reason=attempt.cause.value,
                seconds=round(time.monotonic() - attempt.started, 3),
            )
