"""Stuck jobs: jobs that do not end although they were cancelled, and the handler for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from datetime import timedelta


class StuckJob(msgspec.Struct, frozen=True):
    """A job that still runs `Config.job_stuck_threshold` after it was cancelled."""

    id: int
    kind: str
    queue: str
    running: timedelta
    """The time for which the attempt has been running."""
    total: int
    """The number of stuck jobs of this client, including this one."""


class JobStuckHandler(Protocol):
    """A handler that is called once for each stuck job."""

    def handle_stuck(self, job: StuckJob, /) -> bool:
        """Handle a stuck job, in the event loop. Return True to give the slot of the stuck job to
        another job. Then more than `max_workers` jobs may run until the stuck job ends.

        An error of the handler is logged and counts as False.
        """
        ...
