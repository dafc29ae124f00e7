"""The page that lists all periodic jobs: when each runs next, and its last run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.health_summary import describe_leaders
from riverpy._dashboard.page import Page
from riverpy._dashboard.periodic_health import (
    SEARCHED_JOBS_MAX,
    describe_missing_run,
    explain_periodic_job,
    find_last_jobs,
)
from riverpy._dashboard.periodic_runs import find_run_caused_by_schedule, make_run_of_inserted_job
from riverpy._dashboard.sentence import rank_health, sort_sentences
from riverpy._postgres.dashboard_reads import periodic_list_entries
from riverpy._postgres.periodic import PERIODIC_TABLE_MISSING_MESSAGE, periodic_table_exists
from riverpy._postgres.transactions import read_server_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.periodic_runs import ListedRun
    from riverpy._dashboard.sentence import HealthSentence
    from riverpy._postgres.dashboard_reads import InsertedPeriodicJob, PeriodicJobDashboardRow
    from riverpy._tools.top.status import OverallStatus

PERIODIC_JOBS_SHOWN_MAX = 500


class ListedPeriodicJob(NamedTuple):
    """One row of the table: a periodic job with the texts that the page shows."""

    entry: PeriodicJobDashboardRow
    sentence: HealthSentence
    last_job: ListedRun | None
    """The newest job that the periodic job inserted, for any cause, such as the schedule or a
    request. None: not known."""
    run_by_schedule: ListedRun | None
    """The newest job that the schedule caused. None: it is the same as `last_job`, or is not
    known."""
    kind: str | None
    """The kind of the jobs that the periodic job inserts. None: not known."""
    missing_run: str
    """Why `last_job` is None. Empty: `last_job` is not None."""


async def load_periodic_list_page(view: PageRequest) -> Mapping[str, object]:
    """Read all periodic jobs and return the values of the page."""
    client = view.site.client
    schema = client.config.schema
    fleet = await view.site.statuses.read()
    async with open_read_transaction(client) as tx:
        if not await periodic_table_exists(tx, schema):
            return {"missing": PERIODIC_TABLE_MISSING_MESSAGE}
        now = await read_server_time(tx)
        entries = await periodic_list_entries(tx, schema, limit=PERIODIC_JOBS_SHOWN_MAX + 1)
        shown = entries[:PERIODIC_JOBS_SHOWN_MAX]
        last_jobs = await find_last_jobs(tx, schema, shown)
    kinds = {job.id: job.kind for job in client.periodic_jobs}
    found = [
        _make_listed_periodic_job(
            entry, last_jobs.get(entry.id, ()), kinds.get(entry.id), fleet, now
        )
        for entry in shown
    ]
    return {
        "missing": None,
        "now": now,
        "leader_sentences": sort_sentences(list(describe_leaders(fleet))),
        "periodic_jobs": sorted(found, key=_get_periodic_job_sort_key),
        "are_left_out": len(entries) > PERIODIC_JOBS_SHOWN_MAX,
        "searched_jobs_max": SEARCHED_JOBS_MAX,
    }


PAGE = Page("periodic", "/periodic", "periodic.html", load_periodic_list_page, "Periodic")


def _make_listed_periodic_job(
    entry: PeriodicJobDashboardRow,
    last_jobs: Sequence[InsertedPeriodicJob],
    kind: str | None,
    fleet: OverallStatus,
    now: datetime,
) -> ListedPeriodicJob:
    runs = [make_run_of_inserted_job(job) for job in last_jobs]
    last = runs[0] if runs else None
    by_schedule = find_run_caused_by_schedule(runs)
    return ListedPeriodicJob(
        entry,
        explain_periodic_job(entry, fleet, now),
        last,
        None if by_schedule is last else by_schedule,
        kind if last is None else last.kind,
        describe_missing_run(entry, now, is_job_found=last is not None),
    )


def _get_periodic_job_sort_key(one: ListedPeriodicJob) -> tuple[int, bool, float, str]:
    """Return the sort key of a periodic job. Jobs with the worst health come first, then those that
    run next."""
    next_run_at = one.entry.next_run_at
    timestamp = 0.0 if next_run_at is None else next_run_at.timestamp()
    return -rank_health(one.sentence.health), next_run_at is None, timestamp, one.entry.id
