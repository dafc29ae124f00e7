"""Bulk runs: changes of all jobs that match a search. A run continues when the user closes the
page.

A run is a background task of the client, so it ends when the application closes the client. Its
progress and result are stored only in the memory of this process.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from riverpy._dashboard.database import start_background_task
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_actions import get_change_method
from riverpy._log import get_logger
from riverpy._log_events import (
    DASHBOARD_BULK_CHANGE_ENDED,
    DASHBOARD_BULK_CHANGE_STARTED,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._server_events import is_uvicorn_stopping
from riverpy.errors import RiverError
from riverpy.job_list import JobChanges

if TYPE_CHECKING:
    from riverpy._dashboard.job_actions import JobAction
    from riverpy.client import Client
    from riverpy.job_list import JobFilters

RUNS_AT_A_TIME_MAX = 3
"""The maximum number of active bulk runs of one dashboard in one process."""
KEPT_RUNS_MAX = 20
"""The maximum number of bulk runs that are kept in memory with their results. If there are more,
the oldest runs that have ended are dropped."""
SERVER_STOPPED_TEXT = "The web server stopped."

RunOutcome: TypeAlias = Literal["running", "done", "stopped", "failed"]


class _RunStoppedError(Exception):
    """Raised between two batches to end a bulk run."""


class BulkChangePlan(NamedTuple):
    """What a bulk run does: the action, and the filters that select the jobs. The other fields are
    for the page of the run and for the log."""

    run_id: str
    action: JobAction
    filters: JobFilters
    filters_text: str
    """The filters in words, for the page and the log."""
    list_path: str
    """The path of the page that lists the jobs that pass the filters, relative to the dashboard's
    mount path."""
    user: str | None
    matched: int
    """The number of jobs that matched when the run started."""
    is_count_exact: bool
    """Whether `matched` is exact. False: more jobs may have matched."""


class BulkChangeRun:
    """A bulk run: changes all jobs that match a search, and records its progress and result."""

    def __init__(self, plan: BulkChangePlan) -> None:
        self.plan = plan
        self.changes = JobChanges()
        """How many jobs the run has changed so far, and how many it could not change."""
        self.outcome: RunOutcome = "running"
        self.problem = ""
        """Why the run ended early. Empty: the run did not end early, or the user stopped it."""
        self.started_at = datetime.now(UTC)
        self.ended_at: datetime | None = None
        self._is_stop_requested = False

    def request_stop(self) -> None:
        """Request that the run ends after its current batch."""
        self._is_stop_requested = True

    async def run(self, client: Client) -> None:
        """Change all matching jobs that exist now, in batches, and record the result."""
        plan, log = self.plan, get_logger()
        values = {"action": plan.action, "filters": plan.filters_text, "user": plan.user}
        log.info(DASHBOARD_BULK_CHANGE_STARTED, **values)
        try:
            change = get_change_method(client, plan.action)
            self.changes = await change(on_progress=self._record_progress_or_stop, **plan.filters)
            self.outcome = "done"
        except _RunStoppedError:
            self.outcome = "stopped"
        except (RiverError, *DATABASE_ERRORS) as error:
            self.outcome, self.problem = "failed", describe_error(error)
        except asyncio.CancelledError:
            self.outcome, self.problem = "stopped", SERVER_STOPPED_TEXT
            raise
        finally:
            if self.outcome == "running":
                self.outcome, self.problem = "failed", "An internal error: see the log."
            self.ended_at = datetime.now(UTC)
            log.info(
                DASHBOARD_BULK_CHANGE_ENDED,
                **values,
                outcome=self.outcome,
                problem=self.problem,
                changed=self.changes.changed,
                refused=self.changes.refused,
            )

    def _record_progress_or_stop(self, changes: JobChanges) -> None:
        self.changes = changes
        if is_uvicorn_stopping():
            self.problem = SERVER_STOPPED_TEXT
            raise _RunStoppedError
        if self._is_stop_requested:
            raise _RunStoppedError


class BulkChangeManager:
    """Starts the bulk runs of one dashboard in this process, and finds them by their ids."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._run_by_id: dict[str, BulkChangeRun] = {}

    def start(self, plan: BulkChangePlan) -> None:
        """Start a run. If this run was already started, do nothing, because a browser may send a
        form twice.

        Raises:
            PageError: too many runs are active.
        """
        if plan.run_id in self._run_by_id:
            return
        running = [one for one in self._run_by_id.values() if one.outcome == "running"]
        if len(running) >= RUNS_AT_A_TIME_MAX:
            raise PageError(
                409,
                f"{RUNS_AT_A_TIME_MAX} changes of all jobs run already, so nothing was changed.",
                "Wait until one of them has ended, or stop one: the page Jobs lists them.",
            )
        run = BulkChangeRun(plan)
        start_background_task(self._client, f"bulk {plan.action}", partial(run.run, self._client))
        self._run_by_id[plan.run_id] = run
        self._forget_old_runs()

    def find(self, run_id: str) -> BulkChangeRun | None:
        """Return the run with this id. None: this process does not know the run."""
        return self._run_by_id.get(run_id)

    def list_newest_first(self) -> list[BulkChangeRun]:
        """Return the runs that this process knows, the newest first."""
        return list(reversed(self._run_by_id.values()))

    def _forget_old_runs(self) -> None:
        ended = [one for one in self._run_by_id.values() if one.outcome != "running"]
        for run in ended[: max(len(self._run_by_id) - KEPT_RUNS_MAX, 0)]:
            del self._run_by_id[run.plan.run_id]
