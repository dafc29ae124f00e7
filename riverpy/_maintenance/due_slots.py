"""Due slots: the times of a schedule that are due, and those of them that get a job."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy.schedules import CronSchedule, IntervalSchedule, next_time

if TYPE_CHECKING:
    from datetime import datetime

    from riverpy.periodic import Missed
    from riverpy.schedules import PeriodicSchedule

LATE = timedelta(seconds=30)
"""A slot that is at most so late does not count as missed. A change of the leader takes less."""
MISSED_MAX = 1000
"""The largest number of missed slots of one periodic job that get a job."""
STEPS_MAX = 10_000
"""How many slots of a user's own schedule are computed one by one."""
_SPAN_FIRST = timedelta(milliseconds=1)


class DueSlots(NamedTuple):
    """The due slots of a schedule."""

    slots: list[datetime]
    """The slots that get a job, oldest first."""
    following: datetime | None
    """The first slot that is not due yet. None if there is none."""
    passed_over: bool
    """Whether slots get no job although the policy is `all`, because there are too many."""


def due_slots(
    schedule: PeriodicSchedule, missed: Missed, slot: datetime, now: datetime
) -> DueSlots:
    """Return the due slots from `slot`, which is due, to `now`.

    Raises:
        Exception: the schedule failed, or returned a wrong value.
    """
    most = MISSED_MAX if missed == "all" else 1
    slots: deque[datetime] = deque(maxlen=most)
    due: datetime | None = _skip(schedule, slot, now, most)
    while due is not None and due <= now:
        slots.append(due)
        due = next_time(schedule, due)
    passed_over = missed == "all" and bool(slots) and slots[0] != slot
    if missed == "skip" and slots and now - slots[-1] > LATE:
        slots.clear()
    return DueSlots(list(slots), due, passed_over)


def _skip(schedule: PeriodicSchedule, slot: datetime, now: datetime, most: int) -> datetime | None:
    """Return a slot from which on there are the newest `most` due slots and few more. After a long
    gap there are too many slots to compute each of them.

    The slot is searched backwards from `now`. That works for a schedule whose slots do not depend
    on earlier slots. An interval's do, and those of a user's schedule may.
    """
    if isinstance(schedule, IntervalSchedule):
        passed = (now - slot) // schedule.interval
        return slot + max(passed + 1 - most, 0) * schedule.interval
    if not (isinstance(schedule, CronSchedule) or _has(schedule, slot, now, STEPS_MAX)):
        return slot
    span = _SPAN_FIRST
    while now - slot > span:  # before an ancient slot the calendar ends
        if _has(schedule, now - span, now, most):
            return next_time(schedule, now - span)
        span *= 2
    return slot


def _has(schedule: PeriodicSchedule, after: datetime, until: datetime, most: int) -> bool:
    """Whether at least `most` slots are between these times."""
    due: datetime | None = after
    for _ in range(most):
        due = next_time(schedule, due)
        if due is None or due > until:
            return False
    return True
