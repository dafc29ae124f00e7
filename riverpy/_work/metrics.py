"""Metrics: hands what is measured to the metric_emit hooks of a client."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._lifecycle import only_exceptions
from riverpy._log import get_logger
from riverpy._log_events import METRIC_HOOK_FAILED
from riverpy.hooks import JobGetAvailableCount, JobGetAvailableDuration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.hooks import HookMetricEmit, Metric


class Metrics:
    """The metric_emit hooks of one run. What they raise is logged, and is nobody's failure."""

    def __init__(self, hooks: Sequence[HookMetricEmit]) -> None:
        self._hooks = hooks
        self._failing: set[int] = set()
        self._log = get_logger()

    def claimed(self, queue: str, count: int, seconds: float) -> None:
        """A claim brought so many jobs, and took so long."""
        if self._hooks:
            duration = timedelta(seconds=seconds)
            self._emit(JobGetAvailableDuration(queue=queue, duration=duration))
            self._emit(JobGetAvailableCount(queue=queue, count=count))

    def _emit(self, metric: Metric) -> None:
        for index, hook in enumerate(self._hooks):
            try:
                with only_exceptions("metric_emit"):
                    hook.metric_emit(metric)
            except Exception as error:
                self._failed(index, hook, error)
            else:
                self._failing.discard(index)

    def _failed(self, index: int, hook: HookMetricEmit, error: Exception) -> None:
        """It is called often: its failure is said once, until it works again."""
        say = self._log.debug if index in self._failing else self._log.warning
        self._failing.add(index)
        say(METRIC_HOOK_FAILED, hook=type(hook).__name__, error=repr(error))
