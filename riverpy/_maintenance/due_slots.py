"""Slots: which times of a schedule are due, and which of them get a job."""

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
"""How late a slot may be that is not missed: a change of the leader takes less."""
MISSED_MAX = 1000
"""Slots of one periodic job that are caught up with after a gap."""
STEPS_MAX = 10_000
"""Slots of a schedule of the user's own that are gone through one by one."""
_SPAN_FIRST = timedelta(milliseconds=1)


class DueSlots(NamedTuple):
    """What a schedule says of the time that has passed."""

    slots: list[datetime]
    """Those that get a job, the oldest first."""
    following: datetime | None
    """The first slot that is not due yet; None: there is none."""
    passed_over: bool
    """Whether slots get no job though their policy is `all`: there are too many."""


def due_slots(
    schedule: PeriodicSchedule, missed: Missed, slot: datetime, now: datetime
) -> DueSlots:
    """What is due between `slot`, which is, and `now`.

    Raises:
        Exception: the schedule failed, or returned what it must not.
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
    """A slot, from which on there are the newest `most` that are due, and few more: a long gap has
    too many to go through.

    Looking back from `now` finds it, as slots do not depend on those before. Those of an interval
    do, and those of a user's schedule may.
    """
    if isinstance(schedule, IntervalSchedule):
        passed = (now - slot) // schedule.interval
        return slot + max(passed + 1 - most, 0) * schedule.interval
    if not (isinstance(schedule, CronSchedule) or _has(schedule, slot, now, STEPS_MAX)):
        return slot
    span = _SPAN_FIRST
    while now - slot > span:  # an ancient slot: the calendar has no time so far before it
        if _has(schedule, now - span, now, most):
            return next_time(schedule, now - span)
        span *= 2
    return slot


def _has(schedule: PeriodicSchedule, after: datetime, until: datetime, most: int) -> bool:
    """Whether so many slots are in this time."""
    due: datetime | None = after
    for _ in range(most):
        due = next_time(schedule, due)
        if due is None or due > until:
            return False
    return True
