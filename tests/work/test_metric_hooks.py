"""The hook metric_emit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy import HookMetricEmitFunc, JobGetAvailableCount, JobGetAvailableDuration, Metric
from riverpy._log_events import METRIC_HOOK_FAILED
from tests.work.rig import Task

if TYPE_CHECKING:
    from tests.work.rig import Rig


async def test_claims(rig: Rig) -> None:
    """Each successful claim emits its duration and its number of jobs."""
    metrics: list[Metric] = []

    rig.register_task()
    await rig.insert_rows(3)
    async with rig.working(hooks=[HookMetricEmitFunc(metrics.append)]):
        await rig.take(3)
    durations = [one for one in metrics if isinstance(one, JobGetAvailableDuration)]
    counts = [one for one in metrics if isinstance(one, JobGetAvailableCount)]
    assert len(durations) == len(counts) > 0
    assert all(one.duration > timedelta(0) for one in durations)
    assert {one.queue for one in metrics} == {"default"}
    assert sum(one.count for one in counts) == 3


async def test_failing(rig: Rig, log: list[dict[str, object]]) -> None:
    """A hook that fails stops no claim. It is logged once, and the other hooks are called."""
    seen: list[Metric] = []

    def fail(metric: Metric) -> None:
        raise SystemExit(str(metric))

    rig.register_task()
    hooks = [HookMetricEmitFunc(fail), HookMetricEmitFunc(seen.append)]
    async with rig.working(hooks=hooks) as client:
        await rig.work(client, Task(1))
        await rig.work(client, Task(2))
    said = [one for one in log if one["event"] == METRIC_HOOK_FAILED]
    assert [one["log_level"] for one in said].count("warning") == 1
    assert len(seen) >= 4
