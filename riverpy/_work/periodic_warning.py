"""PeriodicWarning: warns of periodic jobs in a client that takes no part in leader election."""

from __future__ import annotations

from typing import TYPE_CHECKING

from structlog import get_logger

from riverpy._log_events import PERIODIC_JOBS_IGNORED

if TYPE_CHECKING:
    from riverpy.periodic import PeriodicJobs


class PeriodicWarning:
    """Logs once each periodic job that this client will not insert, because only a leader inserts
    periodic jobs.

    River refuses such a configuration. riverpy accepts it, because another client may insert the
    same jobs.
    """

    def __init__(self, jobs: PeriodicJobs) -> None:
        """Watch these jobs, and the jobs that are added to `jobs` later."""
        self._jobs = jobs
        self._named: set[str] = set()
        self._log = get_logger()
        jobs.wake = self.warn

    def warn(self) -> None:
        """Log the jobs that were not logged before."""
        ids = [job.id for job in self._jobs if job.id not in self._named]
        if ids:
            self._named.update(ids)
            self._log.warning(
                PERIODIC_JOBS_IGNORED,
                reason="the client has candidate=False",
                advice="configure periodic jobs in clients with candidate=True",
                periodic_job_ids=ids,
            )
