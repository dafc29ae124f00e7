"""IgnoredPeriodicJobsLog: warns about periodic jobs of a client that never becomes leader, and so
never inserts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import PERIODIC_JOBS_IGNORED

if TYPE_CHECKING:
    from riverpy.periodic import PeriodicJobs


class IgnoredPeriodicJobsLog:
    """Warns once about each periodic job of a client with `candidate=False`.

    River refuses such periodic jobs. riverpy accepts them, because another client may insert the
    same jobs.
    """

    def __init__(self, periodic_jobs: PeriodicJobs) -> None:
        self._periodic_jobs = periodic_jobs
        self._warned_ids: set[str] = set()

    def start(self) -> None:
        """Log the warnings now, and for each periodic job that is added later."""
        self._periodic_jobs.wake = self._log_new_periodic_jobs
        self._log_new_periodic_jobs()

    def _log_new_periodic_jobs(self) -> None:
        new_ids = [job.id for job in self._periodic_jobs if job.id not in self._warned_ids]
        if new_ids:
            self._warned_ids.update(new_ids)
            get_logger().warning(
                PERIODIC_JOBS_IGNORED,
                reason="the client has candidate=False",
                advice="configure periodic jobs in clients with candidate=True",
                periodic_job_ids=new_ids,
            )
