"""The goals of a run, and the check whether the run reached them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from scripts._bench.samples import Samples


class Goal(NamedTuple):
    """A limit for one of riverpy's figures, or for its ratio to a competitor's figure."""

    measure: str
    bound: float
    against: str | None = None
    """The competitor for the ratio; None compares riverpy's figure itself with the limit."""
    is_least: bool = True
    """True if the limit is a minimum, False if it is a maximum."""

    @property
    def text(self) -> str:
        """Return the goal as text, like `at least 1.8 x river_go`."""
        least = "at least" if self.is_least else "at most"
        return f"{least} {self.bound:g}" + (f" x {self.against}" if self.against else "")

    def verdict(self, samples: Samples) -> ProbeResult:
        """Compare the samples with the goal."""
        if self.against is None:
            value = samples.median(self.measure, "riverpy")
        else:
            value = samples.ratio(self.measure, self.against)
        if value is None:
            return ProbeResult(self, None, None)
        return ProbeResult(
            self, value, value >= self.bound if self.is_least else value <= self.bound
        )


class ProbeResult(NamedTuple):
    """A goal and the figure that was measured for it."""

    goal: Goal
    value: float | None
    met: bool | None
    """Whether the goal was reached. None: it was not measured."""

    @property
    def text(self) -> str:
        """Return the result as text, like `at least 1 x bare: 1.02, met`."""
        if self.value is None:
            reason = f"no {self.goal.against}" if self.goal.against else "not measured"
            return f"{self.goal.text}: {reason}"
        return f"{self.goal.text}: {self.value:.2f}, {'met' if self.met else 'MISSED'}"


GOALS = (
    Goal("work_1000", 1.8, "river_go"),
    Goal("work_1000", 1.15, "bare"),
    Goal("work_100", 1.9, "river_go"),
    Goal("work_100", 1.0, "bare"),
    Goal("work_100", 2.0, "pgqueuer"),
    Goal("occupancy_5ms", 0.90),
    Goal("occupancy_50ms", 0.97),
    Goal("two_processes", 0.85, "bare"),
    Goal("repeated", 0, is_least=False),
    Goal("pickup_p50_ms", 2.0, "bare", is_least=False),
    Goal("pickup_p99_ms", 3.0, "bare", is_least=False),
    Goal("insert_one", 0.9, "bare"),
    Goal("insert_100_callers", 8.0, "river_go"),
    Goal("insert_100_shared", 0.4, "bare"),
    Goal("insert_many", 0.8, "bare"),
    Goal("insert_fast", 0.9, "bare"),
    Goal("sustained_backlog_growth", 0.01, is_least=False),
    Goal("sustained_p99_to_p50", 20.0, is_least=False),
    Goal("old_rows", 0.9),
    Goal("backlog", 0.9),
    Goal("claim_cost", 1.2, is_least=False),
    Goal("open_snapshot", 1.0, "river_go"),
    Goal("rss_mib", 1.45, "bare", is_least=False),
    Goal("rss_growth", 1.1, is_least=False),
    Goal("idle_statements_per_s", 2.0, is_least=False),
    Goal("idle_cpu", 0.01, is_least=False),
    Goal("start_version", 1.85, "bare", is_least=False),
    Goal("start_insert", 4.3, "bare", is_least=False),
    Goal("insert_many_unique", 2.0, "bare", is_least=False),
    Goal("insert_many_mixed", 2.0, "bare", is_least=False),
    Goal("job_cancel_many", 2.0, "bare", is_least=False),
    Goal("queue_pause_300", 2.0, "bare", is_least=False),
    Goal("job_get_100_tasks", 2.0, "bare", is_least=False),
    Goal("share_35_queues", 0.7),
    Goal("pickup_35_queues", 1.2, is_least=False),
    Goal("idle_35_queues", 2.5, is_least=False),
)


def verdicts(samples: Samples) -> list[ProbeResult]:
    """Compare the samples with all goals."""
    return [goal.verdict(samples) for goal in GOALS]
