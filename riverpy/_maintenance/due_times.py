"""Finds the due times of a periodic job's schedule, and chooses those for which a job is
inserted."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy.schedules import CronSchedule, IntervalSchedule, find_next_due_time

if TYPE_CHECKING:
    from datetime import datetime

    from riverpy.periodic import MissedPolicy
    from riverpy.schedules import PeriodicSchedule

DUE_TIME_MISSED_AFTER = timedelta(seconds=30)
"""If the leader handles a due time with a longer delay than this, the due time counts as missed. A
change of leader alone takes less time."""
MISSED_JOBS_MAX = 1000
"""The maximum number of jobs that are inserted for the missed times of one periodic job."""
TIMES_COMPUTED_ONE_BY_ONE_MAX = 10_000
"""If a user's own schedule has at most this number of due times up to now, all of them are
computed. If it has more, the newest ones are found by a search backwards from now."""
_SEARCH_PERIOD_MIN = timedelta(milliseconds=1)


class DueTimes(NamedTuple):
    """The due times for which a job is inserted, and the first time that is not due yet."""

    times_with_job: list[datetime]
    """The due times for which a job is inserted, oldest first."""
    next_time: datetime | None
    """The first time that is not due yet. None: the schedule has ended."""
    has_dropped_times: bool
    """Whether `missed` is `all` and there are more than `MISSED_JOBS_MAX` due times. Then no job is
    inserted for the oldest ones."""


def find_due_times(
    schedule: PeriodicSchedule, missed: MissedPolicy, first_due_at: datetime, now: datetime
) -> DueTimes:
    """Find the due times from `first_due_at` to `now`, and choose those for which a job is
    inserted. `first_due_at` is a due time of the schedule.

    If `missed` is `one`, the newest due time is chosen. `skip`: the newest, unless it is missed
    (see `DUE_TIME_MISSED_AFTER`). `all`: the newest `MISSED_JOBS_MAX` due times.

    Raises:
        Exception: the schedule failed, or returned a wrong value.
    """
    count = MISSED_JOBS_MAX if missed == "all" else 1
    times: deque[datetime] = deque(maxlen=count)
    due: datetime | None = _choose_first_time_to_compute(schedule, first_due_at, now, count)
    while due is not None and due <= now:
        times.append(due)
        due = find_next_due_time(schedule, due)
    has_dropped_times = missed == "all" and bool(times) and times[0] != first_due_at
    if missed == "skip" and times and now - times[-1] > DUE_TIME_MISSED_AFTER:
        times.clear()
    return DueTimes(list(times), due, has_dropped_times)


def _choose_first_time_to_compute(
    schedule: PeriodicSchedule, first_due_at: datetime, now: datetime, times_to_keep: int
) -> datetime | None:
    """Return the due time at which `find_due_times` starts. From there to `now`, the schedule has
    at least the newest `times_to_keep` due times (or all, if it has fewer), and only few more. So
    after a long gap, not all due times are computed.

    For an interval schedule, the returned time is calculated. For a cron schedule, the function
    searches backwards from `now`. This search is correct only if no due time depends on earlier due
    times. In a user's own schedule, due times may depend on each other. So if such a schedule has
    at most `TIMES_COMPUTED_ONE_BY_ONE_MAX` due times, `first_due_at` is returned without a search.
    """
    if isinstance(schedule, IntervalSchedule):
        passed = (now - first_due_at) // schedule.interval
        return first_due_at + max(passed + 1 - times_to_keep, 0) * schedule.interval
    is_cron = isinstance(schedule, CronSchedule)
    if not is_cron and not has_due_times(
        schedule, first_due_at, now, TIMES_COMPUTED_ONE_BY_ONE_MAX
    ):
        return first_due_at
    span = _SEARCH_PERIOD_MIN
    while now - first_due_at > span:  # `now - span` must stay in datetime's range
        if has_due_times(schedule, now - span, now, times_to_keep):
            return find_next_due_time(schedule, now - span)
        span *= 2
    return first_due_at


def has_due_times(schedule: PeriodicSchedule, after: datetime, until: datetime, count: int) -> bool:
    """Return whether the schedule has at least `count` times that are later than `after` and not
    later than `until`."""
    due: datetime | None = after
    for _ in range(count):
        due = find_next_due_time(schedule, due)
        if due is None or due > until:
            return False
    return True
