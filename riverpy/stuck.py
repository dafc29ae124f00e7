"""Stuck jobs: jobs that do not end although they were cancelled, and who is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from datetime import timedelta


class StuckJob(msgspec.Struct, frozen=True):
    """A job that goes on `Config.job_stuck_threshold` after it was cancelled."""

    id: int
    kind: str
    queue: str
    running: timedelta
    """How long its attempt has run."""
    total: int
    """How many jobs of this client are stuck now, with this one."""


class JobStuckHandler(Protocol):
    """Told of each stuck job, once."""

    def handle_stuck(self, job: StuckJob, /) -> bool:
        """Called in the event loop when a job is found stuck. Return True to give its slot to
        another job: then more than `max_workers` may run, until the stuck one ends.

        An error of its own is logged and counts as False.
        """
        ...
