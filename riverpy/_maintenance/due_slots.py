"""Due slots: finds the slots (times) of a schedule that are due, and chooses the slots that get a
job."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy.schedules import CronSchedule, IntervalSchedule, next_time

if TYPE_CHECKING:
    from datetime import datetime

    from riverpy.periodic import Missed
    from riverpy.schedules import PeriodicSchedule

MISSED_AFTER = timedelta(seconds=30)
"""A slot counts as missed if its delay is longer than this. A change of leader takes less time."""
MISSED_JOBS_MAX = 1000
"""The largest number of missed slots of one periodic job that get a job."""
SLOT_STEPS_MAX = 10_000
"""The largest number of slots of a user's own schedule that are computed one by one."""
_SEARCH_SPAN_MIN = timedelta(milliseconds=1)


class DueSlots(NamedTuple):
    """The due slots that get a job, and the first slot that is not due yet."""

    slots: list[datetime]
    """The slots that get a job, oldest first."""
    following: datetime | None
    """The first slot that is not due yet. None: the schedule has ended."""
    has_dropped_slots: bool
    """Whether some slots get no job although `missed` is `all`, because too many slots were
    missed."""


def due_slots(
    schedule: PeriodicSchedule, missed: Missed, slot: datetime, now: datetime
) -> DueSlots:
    """Return the due slots from `slot` to `now`. `slot` itself is due.

    Raises:
        Exception: the schedule failed, or returned a wrong value.
    """
    count = MISSED_JOBS_MAX if missed == "all" else 1
    slots: deque[datetime] = deque(maxlen=count)
    due: datetime | None = _skip_old_slots(schedule, slot, now, count)
    while due is not None and due <= now:
        slots.append(due)
        due = next_time(schedule, due)
    has_dropped_slots = missed == "all" and bool(slots) and slots[0] != slot
    if missed == "skip" and slots and now - slots[-1] > MISSED_AFTER:
        slots.clear()
    return DueSlots(list(slots), due, has_dropped_slots)


def _skip_old_slots(
    schedule: PeriodicSchedule, slot: datetime, now: datetime, count: int
) -> datetime | None:
    """Return a slot that is followed by at least the newest `count` due slots, and by few others.
    After a long gap there are too many slots to compute each one.

    The function searches backwards from `now`. This is correct only if slots do not depend on
    earlier slots. The slots of an interval schedule do depend on earlier slots. The slots of a
    user's schedule may depend on them too, so up to `SLOT_STEPS_MAX` slots are computed one by one.
    """
    if isinstance(schedule, IntervalSchedule):
        passed = (now - slot) // schedule.interval
        return slot + max(passed + 1 - count, 0) * schedule.interval
    if not (isinstance(schedule, CronSchedule) or has_slots(schedule, slot, now, SLOT_STEPS_MAX)):
        return slot
    span = _SEARCH_SPAN_MIN
    while now - slot > span:  # `now - span` must stay in datetime's range
        if has_slots(schedule, now - span, now, count):
            return next_time(schedule, now - span)
        span *= 2
    return slot


def has_slots(schedule: PeriodicSchedule, after: datetime, until: datetime, count: int) -> bool:
    """Whether at least `count` slots of the schedule lie between `after` and `until`."""
    due: datetime | None = after
    for _ in range(count):
        due = next_time(schedule, due)
        if due is None or due > until:
            return False
    return True
