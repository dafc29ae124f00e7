"""Plots of the counts of jobs: the paths for the SVG, and the same values in words and numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_count_cache import SPARKLINE_STEP_SECONDS, TIME_RANGES
from riverpy._dashboard.rendering import format_capped_count, format_duration
from riverpy._postgres.job_counts import (
    ALL_QUEUES_NAME,
    OTHER_QUEUES_NAME,
    QUEUES_PER_PERIOD_MAX,
    WAIT_BOUNDS_SECONDS,
)
from riverpy._tools.text import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._dashboard.job_count_cache import TimeRange
    from riverpy._dashboard.page import PageRequest
    from riverpy._postgres.job_counts import JobCounts, QueueTimeStepCounts, TimeStepCounts
    from riverpy._tools.top.status import OverallStatus

PLOT_HEIGHT = 100
"""The height of a plot in SVG units. The width of a step is 1 unit."""
RANGE_PARAMETER = "range"
_WAIT_SCALE_TOPS = (
    0.01,
    0.05,
    0.1,
    0.5,
    1,
    5,
    10,
    30,
    60,
    300,
    600,
    1800,
    3600,
    4 * 3600,
    24 * 3600,
)
"""The possible maximum values of the scale for waits, in seconds. For longer waits, the maximum is
a whole number of days."""
_MANY_QUEUES_TEXT = (
    f"More than {QUEUES_PER_PERIOD_MAX} queues had jobs at once. When this queue was not among the "
    "busiest ones, its jobs were only counted together with those of other queues."
)
_SPARKLINE_STEPS = 3600 // SPARKLINE_STEP_SECONDS


class BarSeries(NamedTuple):
    """The bars of one series of values in a plot."""

    style: str
    """The CSS class of the bars."""
    path: str
    """The outline of all bars, as the data of an SVG path."""


class Plot(NamedTuple):
    """One plot. All plots of a page have the same time axis."""

    title: str
    text: str
    """A sentence about the largest value of the plot."""
    top: str
    """The value at the top of the scale, as text."""
    bars: Sequence[BarSeries]


class PlotTableRow(NamedTuple):
    """The counts of one step, for the table below the plots."""

    time: str
    counts: JobCounts


class TimeRangeLink(NamedTuple):
    """A link to the same page with another time range."""

    title: str
    path: str
    is_current: bool


class PlotSection(NamedTuple):
    """The plots of a page, with their texts and their table."""

    links: Sequence[TimeRangeLink]
    title: str
    unit: str
    """The length of a step in words."""
    text: str
    """The totals of all steps in words."""
    plots: Sequence[Plot]
    width: int
    """The number of steps."""
    unknown_steps: int
    """The number of steps at the start of the time range that are older than all stored counts. How
    many attempts ended in these steps is not known."""
    times: Sequence[str]
    """The start times of the first, the middle and the last step."""
    rows: Sequence[PlotTableRow]
    """The steps in which attempts ended, the newest first."""
    notes: Sequence[str]
    """Sentences about what the plots do not contain."""


class Sparkline(NamedTuple):
    """A small plot of the attempts in one queue during the last hour."""

    attempts: int
    failed: int
    bars: Sequence[BarSeries]
    width: int = _SPARKLINE_STEPS


async def load_plots(
    view: PageRequest, status: OverallStatus, path: str, *, queue: str | None = None
) -> PlotSection:
    """Read the counts of the time range in the page's URL query, and return their plots.

    Args:
        view: the request for the page. Its query may contain the time range.
        status: the status of all clients. If some of them are not riverpy clients, the result
            contains a note that their jobs are not counted.
        path: the path of the page, for the links to other time ranges.
        queue: the queue. None: all queues together.

    Raises:
        PageError: there is no such time range.
    """
    chosen = view.query.get(RANGE_PARAMETER, TIME_RANGES[0].name)
    time_range = next((one for one in TIME_RANGES if one.name == chosen), None)
    if time_range is None:
        raise PageError(400, f"There is no range {chosen!r}.", "Choose hour, day or week.")
    row = ALL_QUEUES_NAME if queue is None else queue
    read = await view.site.job_counts.read_queue_counts(row, time_range)
    notes = [] if read.problem is None else [read.problem]
    if queue is not None:
        rest = await view.site.job_counts.read_queue_counts(OTHER_QUEUES_NAME, time_range)
        if any(step.counts.attempts for step in rest.counts):
            notes.append(_MANY_QUEUES_TEXT)
    others = [item for item in view.query.multi_items() if item[0] != RANGE_PARAMETER]
    links = [
        TimeRangeLink(
            one.title,
            f"{path}?{urlencode([*others, (RANGE_PARAMETER, one.name)])}",
            one is time_range,
        )
        for one in TIME_RANGES
    ]
    has_others = any(worker.state == "unregistered" for worker in status.workers)
    if has_others or (status.leader is not None and status.leader.foreign):
        notes.append("Jobs that clients of River in Go work are not counted here.")
    return make_plot_section(read.counts, time_range, links, notes)


def make_plot_section(
    steps: Sequence[TimeStepCounts],
    time_range: TimeRange,
    links: Sequence[TimeRangeLink],
    notes: Sequence[str],
) -> PlotSection:
    """Return a section of a page with plots of the ended attempts, the failed attempts and the
    waits in each of `steps` (the equal parts of the time range). If no attempt ended in the time
    range, the section has no plots."""
    rows = [
        PlotTableRow(_format_timestamp(one.started_at, time_range.time_format), one.counts)
        for one in reversed(steps)
        if one.counts.attempts
    ]
    unknown = _count_steps_before_counting(steps, time_range)
    more: list[str] = []
    if steps and steps[0].counted_since is None:
        more.append("Nothing was counted yet. Workers write counts once a minute.")
    elif 0 < unknown < len(steps):
        since = _format_timestamp(steps[unknown].started_at, time_range.time_format)
        more.append(f"Nothing was counted before {since} (UTC). This part is grey.")
    elif steps and unknown:
        more.append(f"The counts of {time_range.unit} are shown when it has ended.")
    return PlotSection(
        links=links,
        title=time_range.title,
        unit=time_range.unit,
        text=(
            _describe_totals(rows, time_range, are_counted=unknown < len(steps)) if steps else ""
        ),
        plots=_make_plots(steps, rows, time_range) if rows else [],
        width=max(len(steps), 1),
        unknown_steps=unknown,
        times=[
            _format_timestamp(steps[place].started_at, time_range.time_format)
            for place in (0, len(steps) // 2, -1)
            if steps
        ],
        rows=rows,
        notes=[*notes, *more],
    )


def make_sparklines(
    recent: Mapping[str, list[QueueTimeStepCounts]], now: datetime
) -> Mapping[str, Sparkline]:
    """Return a sparkline for each queue in `recent`, which contains the counts of the last hour.
    `now` is the server's time."""
    last = int(now.timestamp()) // SPARKLINE_STEP_SECONDS
    found: dict[str, Sparkline] = {}
    for queue, steps in recent.items():
        attempts, failed = [0] * _SPARKLINE_STEPS, [0] * _SPARKLINE_STEPS
        for step in steps:
            place = _SPARKLINE_STEPS - 1 - last + step.started_at // SPARKLINE_STEP_SECONDS
            if 0 <= place < _SPARKLINE_STEPS:
                attempts[place], failed[place] = step.attempts, step.failed
        top = max(attempts)
        if top:
            bars = [
                BarSeries("plot-main", draw_bars(attempts, top)),
                BarSeries("plot-bad", draw_bars(failed, top)),
            ]
            found[queue] = Sparkline(sum(attempts), sum(failed), bars)
    return found


def draw_bars(values: Sequence[float], top: float) -> str:
    """Return the data of an SVG path with a bar for each value. A value above 0 always has a
    visible bar."""
    bars: list[str] = []
    for place, value in enumerate(values):
        if value > 0:
            height = max(min(value / top, 1.0) * PLOT_HEIGHT, 1.5)
            bars.append(f"M{place}.1 {PLOT_HEIGHT}v-{height:.1f}h.8v{height:.1f}z")
    return "".join(bars)


def choose_count_scale_top(highest: float) -> int:
    """Return the maximum of a scale of counts: 1, 2 or 5 times a power of ten."""
    power = 10 ** max(math.floor(math.log10(max(highest, 1))), 0)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= highest)


def choose_wait_scale_top(longest: float) -> float:
    """Return the maximum of a scale of waits, in seconds."""
    day = 24 * 3600
    return next((top for top in _WAIT_SCALE_TOPS if top >= longest), math.ceil(longest / day) * day)


def _make_plots(
    steps: Sequence[TimeStepCounts], rows: Sequence[PlotTableRow], time_range: TimeRange
) -> list[Plot]:
    most = max(rows, key=lambda row: row.counts.attempts)
    worst = max(rows, key=lambda row: row.counts.failed)
    longest = max(rows, key=lambda row: row.counts.wait_max)
    attempts_top = choose_count_scale_top(most.counts.attempts)
    failed_top = choose_count_scale_top(worst.counts.failed)
    wait_top = choose_wait_scale_top(longest.counts.wait_max)
    failed = sum(row.counts.failed for row in rows)
    return [
        Plot(
            f"Ended attempts in {time_range.unit}",
            f"Most: {format_capped_count(most.counts.attempts)} at {most.time}.",
            format_count(attempts_top, "attempt"),
            [
                BarSeries(
                    "plot-main", draw_bars([one.counts.attempts for one in steps], attempts_top)
                )
            ],
        ),
        Plot(
            "Failed attempts",
            f"Most: {format_capped_count(worst.counts.failed)} at {worst.time}."
            if failed
            else "No attempt failed.",
            format_count(failed_top, "failure"),
            [BarSeries("plot-bad", draw_bars([one.counts.failed for one in steps], failed_top))],
        ),
        Plot(
            "Waits: the longest (light) and the mean (dark)",
            f"Longest: {format_duration(longest.counts.wait_max)} at {longest.time}.",
            format_duration(wait_top),
            [
                BarSeries(
                    "plot-light", draw_bars([one.counts.wait_max for one in steps], wait_top)
                ),
                BarSeries(
                    "plot-main",
                    draw_bars([one.counts.mean_wait for one in steps], wait_top),
                ),
            ],
        ),
    ]


def _count_steps_before_counting(steps: Sequence[TimeStepCounts], time_range: TimeRange) -> int:
    """Return the number of steps that are older than all stored counts. In a later step without
    counts, no attempt ended."""
    if not steps or steps[0].counted_since is None:
        return len(steps)
    since = steps[0].counted_since
    return sum(one.started_at + time_range.step_seconds <= since for one in steps)


def _describe_totals(
    rows: Sequence[PlotTableRow], time_range: TimeRange, *, are_counted: bool
) -> str:
    counts = [row.counts for row in rows]
    attempts = sum(one.attempts for one in counts)
    if not attempts:
        what = "no attempt ended" if are_counted else "nothing was counted"
        return f"{time_range.title}: {what}."
    completed, failed, discarded = (
        sum(values)
        for values in zip(
            *((one.completed, one.failed, one.discarded) for one in counts), strict=True
        )
    )
    longest = max(one.wait_max for one in counts)
    overs = [
        sum(values)
        for values in zip(*(tuple(one)[-len(WAIT_BOUNDS_SECONDS) :] for one in counts), strict=True)
    ]
    verb = "was" if discarded == 1 else "were"
    return (
        f"{time_range.title}: {format_count(attempts, 'attempt')} ended ({completed:,} completed, "
        f"{failed:,} failed). {format_count(discarded, 'job')} {verb} discarded. The longest wait "
        f"was {format_duration(longest)}{_describe_wait_percentile(attempts, overs, longest)}."
    )


def _describe_wait_percentile(attempts: int, overs: Sequence[int], longest: float) -> str:
    """Return a text such as `, and 95 % of the jobs waited less than 10s`.

    Only the number of waits above each of `WAIT_BOUNDS_SECONDS` is stored. So the text contains the
    first of these limits that at most 5 % of the waits exceeded. If more than 5 % of the waits
    exceeded the last limit, the text reports this. If the limit equals the longest wait, the text
    is empty.

    Args:
        attempts: the number of waits.
        overs: for each of `WAIT_BOUNDS_SECONDS`, the number of longer waits.
        longest: the longest wait in seconds.
    """
    allowed = attempts * 0.05
    fitting = (one for one, over in zip(WAIT_BOUNDS_SECONDS, overs, strict=True) if over <= allowed)
    bound = next(fitting, None)
    if bound is None:
        longest_bound = format_duration(WAIT_BOUNDS_SECONDS[-1])
        return f", and more than 5 % of the jobs waited longer than {longest_bound}"
    if format_duration(longest) == format_duration(bound):
        return ""
    return f", and 95 % of the jobs waited less than {format_duration(bound)}"


def _format_timestamp(seconds: int, time_format: str) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(time_format)
