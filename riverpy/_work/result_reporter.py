"""ResultReporter: counts, logs and publishes stored results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import JOB_CANCELLED_AFTER_ITS_ATTEMPT, JOB_ENDED
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._work.attempt import Attempt
    from riverpy._work.counters import Counters
    from riverpy._work.subscriptions import Subscriptions


class ResultReporter:
    """Reports the results that the completer has stored."""

    def __init__(
        self,
        counters: Counters,
        subscriptions: Subscriptions,
        expect: Callable[[str, float], None],
    ) -> None:
        """`expect` is called with the name of a queue, and the seconds until a job of this queue is
        due again."""
        self._counters, self._subscriptions, self._expect = counters, subscriptions, expect
        self._log = get_logger()
        self._logs_jobs = self._log.is_debug_enabled
        self._limited_log = self._log.limited()

    def report(self, attempts: list[Attempt]) -> None:
        """Report a stored batch. A batch holds either only plain completions, or no plain
        completion."""
        self._counters.count_ends(attempts)
        if self._logs_jobs:
            self._log_ends(attempts)
        if not attempts or attempts[0].is_plain:
            self._subscriptions.publish_attempts(attempts)
            return
        self._subscriptions.publish_attempts([one for one in attempts if one.has_event])
        for attempt in attempts:
            if attempt.outcome is not None and attempt.state_stored == JobState.AVAILABLE:
                self._expect(attempt.queue, attempt.outcome.delay or 0.0)
            if attempt.state_stored == JobState.CANCELLED != attempt.target_state:
                self._limited_log.info(
                    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
                    job_id=attempt.id,
                    kind=attempt.kind,
                    queue=attempt.queue,
                )

    def _log_ends(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._log.debug(
                JOB_ENDED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                attempt=attempt.attempt,
                outcome=attempt.event.value,
                state=attempt.state_stored,
                seconds=round(attempt.ended - (attempt.started or attempt.ended), 6),
            )
