"""The result of a run as JSON and as a text table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts._bench.competitors import NAMES
from scripts._bench.goals import verdicts
from scripts._bench.samples import rounded
from scripts._bench.tx_insert.names import COLUMNS, MEASURE, SESSIONS, make_measure_key

if TYPE_CHECKING:
    from scripts._bench.samples import Samples

KEYS = (
    "work_1000",
    "work_100",
    "pickup_p50_ms",
    "pickup_p99_ms",
    "insert_one",
    "insert_100_callers",
    "insert_100_shared",
    "insert_many",
    "insert_fast",
    "old_rows",
    "backlog",
    "rss_mib",
)
"""Keys that the JSON always has."""
TITLES = {
    "work_1000": "work, 1,000 slots (jobs/s)",
    "work_100": "work, 100 slots (jobs/s)",
    "pickup_p50_ms": "pickup p50 (ms)",
    "pickup_p99_ms": "pickup p99 (ms)",
    "insert_one": "insert, one at a time (jobs/s)",
    "insert_100_callers": "insert, 100 tasks at once (jobs/s)",
    "insert_100_shared": "the same, beside one bare statement",
    "insert_many": "insert_many (jobs/s)",
    "insert_fast": "insert_many_fast (jobs/s)",
    "old_rows": "rate with old rows / without",
    "backlog": "rate with a backlog / without",
    "rss_mib": "memory, 1,000 slots (MiB)",
    "occupancy_5ms": "slots occupied, jobs of 5 ms",
    "occupancy_50ms": "slots occupied, jobs of 50 ms",
    "two_processes": "work, two processes (jobs/s)",
    "repeated": "jobs that ran twice",
    "sustained_backlog_growth": "backlog growth / insert rate",
    "sustained_p99_to_p50": "wait p99 / p50 at 60 % load",
    "claim_cost": "claim cost, backlog / none",
    "open_snapshot": "rate, last / first tenth",
    "rss_growth": "memory at the end / at a tenth",
    "idle_statements_per_s": "idle, statements a second",
    "idle_cpu": "idle, share of a core",
    "start_version": "riverpy --version (ms)",
    "start_insert": "riverpy insert (ms)",
    "insert_many_unique": "insert_many, 1,000 unique jobs (ms)",
    "insert_many_mixed": "insert_many, 1,000 mixed jobs (ms)",
    "job_cancel_many": "job_cancel_many, 1,000 jobs (ms)",
    "queue_pause_300": "queue_pause, 300 queues (ms)",
    "job_get_100_tasks": "job_get, 100 tasks (ms)",
    "work_35_queues": "work, 100 slots in 35 queues (jobs/s)",
    "share_35_queues": "the same, beside one queue",
    "pickup_35_queues": "pickup p50, 35 idle queues / one",
    "idle_35_queues": "idle, 35 queues, statements a second",
    **{make_measure_key(name): f"{title} (µs)" for name, title in SESSIONS.items()},
}
GROUPS = {MEASURE: frozenset(map(make_measure_key, SESSIONS))}
"""Names of several measurements together."""


def _names_of(measure: str) -> tuple[str, ...]:
    return COLUMNS if measure in GROUPS[MEASURE] else NAMES


def _is_wanted(measure: str, only: list[str] | None) -> bool:
    names = {measure, *(group for group, members in GROUPS.items() if measure in members)}
    return only is None or not names.isdisjoint(only)


def as_json(samples: Samples, about: dict[str, Any]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    measures = [*KEYS, *(one for one in samples.measures if one not in KEYS)]
    return {
        **{measure: _figures(samples, measure) for measure in measures},
        "spread": {
            measure: {
                name: spread
                for name in _names_of(measure)
                if (spread := samples.spread(measure, name))
            }
            for measure in measures
        },
        "goals": [
            {
                "measure": one.goal.measure,
                "goal": one.goal.text,
                "value": None if one.value is None else round(one.value, 3),
                "met": one.met,
            }
            for one in verdicts(samples)
        ],
        "absent": samples.reasons,
        **about,
    }


def _figures(samples: Samples, measure: str) -> dict[str, float | None]:
    medians = {name: samples.median(measure, name) for name in _names_of(measure)}
    return {name: None if value is None else rounded(value) for name, value in medians.items()}


def as_text(samples: Samples, about: dict[str, Any]) -> str:
    """Return the table: a line for each wanted measurement, and riverpy's goals below."""
    width = max(map(len, TITLES.values()))
    lines = [
        *(f"{name}: {value}" for name, value in {**about["machine"], **about["versions"]}.items()),
        f"{about['rounds']} rounds of {about['jobs']:,} jobs; medians (least .. most)",
        *(f"not measured: {name}: {reason}" for name, reason in samples.reasons.items()),
        *about["notes"],
        "",
    ]
    by_measure: dict[str, list[str]] = {}
    for one in verdicts(samples):
        by_measure.setdefault(one.goal.measure, []).append(one.text)
    for measure, title in TITLES.items():
        if not _is_wanted(measure, about["only"]):
            continue
        figures = [
            f"{name} {_number(median)}{_range(samples.spread(measure, name))}"
            for name in _names_of(measure)
            if (median := samples.median(measure, name)) is not None
        ]
        lines.append(f"{title:<{width}}  {'   '.join(figures) or 'not measured'}")
        lines += [f"{'':<{width}}  goal {text}" for text in by_measure.get(measure, [])]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _range(spread: list[float] | None) -> str:
    if spread is None or spread[0] == spread[1]:
        return ""
    return f" ({_number(spread[0])} .. {_number(spread[1])})"
