"""Metrics: calls the `metric_emit` hooks of a client."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._lifecycle import only_exceptions
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import METRIC_HOOK_FAILED
from riverpy.hooks import JobGetAvailableCount, JobGetAvailableDuration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.hooks import HookMetricEmit, Metric


class Metrics:
    """Calls the `metric_emit` hooks of one run. Errors of hooks are only logged."""

    def __init__(self, hooks: Sequence[HookMetricEmit]) -> None:
        log = get_logger()
        self._hooks = [(hook, RepeatedFailureLog(log)) for hook in hooks]

    def emit_claim(self, queue: str, count: int, seconds: float) -> None:
        """Call the hooks with the duration of a claim in seconds, and the number of its jobs."""
        if self._hooks:
            duration = timedelta(seconds=seconds)
            self._emit(JobGetAvailableDuration(queue=queue, duration=duration))
            self._emit(JobGetAvailableCount(queue=queue, count=count))

    def _emit(self, metric: Metric) -> None:
        for hook, failures in self._hooks:
            try:
                with only_exceptions("metric_emit"):
                    hook.metric_emit(metric)
            except Exception as error:
                failures.failed(METRIC_HOOK_FAILED, hook=type(hook).__name__, error=repr(error))
            else:
                failures.recovered()
