"""The page of one periodic job: its next run times and its last jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.datastructures import QueryParams

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.health_summary import describe_leaders
from riverpy._dashboard.job_search import find_jobs, parse_search
from riverpy._dashboard.page import Page
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.periodic_health import (
    describe_missing_run,
    explain_periodic_job,
    find_last_jobs,
    split_periodic_row_id,
)
from riverpy._dashboard.periodic_runs import (
    UNKNOWN_CAUSE,
    find_run_caused_by_schedule,
    make_run_of_inserted_job,
    make_run_of_job,
)
from riverpy._dashboard.sentence import sort_sentences
from riverpy._postgres.dashboard_reads import periodic_find_job_of_due_time, periodic_list_entries
from riverpy._postgres.driver import PostgresError, is_damaged_or_untranslatable_error
from riverpy._postgres.periodic import periodic_table_exists
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import ConfigError
from riverpy.schedules import CronSchedule, find_next_due_time, parse_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.job_search import FoundJobs, JobSearch
    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.periodic_runs import ListedRun
    from riverpy._postgres.dashboard_reads import PeriodicJobDashboardRow
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.top.status import OverallStatus

NEXT_RUN_TIMES_SHOWN = 5
JOBS_SHOWN_MAX = 10
SEARCHED_QUEUES_MAX = 200
"""The maximum number of queues in which the page searches for the job of the last run."""


class NextRunTimes(NamedTuple):
    """The next run times of a periodic job."""

    times: list[datetime]
    zone_name: str | None = None
    """The name of the schedule's time zone. None: it is UTC, or the schedule has no time zone."""
    local_times: Sequence[str] = ()
    """The run times in `times` as texts, in the schedule's time zone. Empty: `zone_name` is
    None."""
    note: str = ""
    """Why the run times after the first one in `times` are not known. Empty: they are known."""


async def load_periodic_job_page(view: PageRequest) -> Mapping[str, object]:
    """Read the periodic job whose id is in the query parameter `id`."""
    row_id = view.query.get("id", "")
    client = view.site.client
    schema = client.config.schema
    fleet = await view.site.statuses.read()
    async with open_read_transaction(client) as tx:
        entry = await _read_periodic_job_entry(tx, schema, row_id)
        now = await read_server_time(tx)
        job_id, domain = split_periodic_row_id(entry.id)
        kind = {job.id: job.kind for job in client.periodic_jobs}.get(job_id)
        search = _make_search(job_id, kind)
        found = await find_jobs(tx, schema, search, limit=JOBS_SHOWN_MAX)
        last_job = await _find_last_job(tx, schema, entry, found, fleet)
        if last_job is not None and not found.jobs and kind is None:
            search = _make_search(job_id, last_job.kind)
            found = await find_jobs(tx, schema, search, limit=JOBS_SHOWN_MAX)
        runs = [make_run_of_job(job) for job in found.jobs]
        by_schedule = find_run_caused_by_schedule(runs or ([] if last_job is None else [last_job]))
        if by_schedule is None and len(runs) == JOBS_SHOWN_MAX:
            older = (await find_last_jobs(tx, schema, [entry])).get(entry.id, ())
            by_schedule = find_run_caused_by_schedule(
                [make_run_of_inserted_job(job) for job in older]
            )
    sentences = [explain_periodic_job(entry, fleet, now)]
    if by_schedule is not None:
        sentences.append(by_schedule.describe())
    return {
        "entry": entry,
        "now": now,
        "sentences": sort_sentences([*sentences, *describe_leaders(fleet)]),
        "domain": domain,
        "kind": kind if last_job is None else last_job.kind,
        "last_job": last_job,
        "missing_run": describe_missing_run(entry, now, is_job_found=last_job is not None),
        "found": found,
        "runs": list(zip(found.jobs, runs, strict=True)),
        "has_unknown_cause": any(run.cause == UNKNOWN_CAUSE for run in runs),
        "search": search,
        "next_times": compute_next_run_times(entry),
    }


PAGE = Page("periodic_job", "/periodic-job", "periodic_job.html", load_periodic_job_page)


async def _read_periodic_job_entry(
    tx: Transaction, schema: str | None, row_id: str
) -> PeriodicJobDashboardRow:
    if not await periodic_table_exists(tx, schema):
        raise PageError(
            404,
            "The table of periodic jobs is missing.",
            "Run `riverpy migrate up --line riverpy` on the database.",
        )
    entries: list[PeriodicJobDashboardRow] = []
    if row_id and "\0" not in row_id:
        entries = await periodic_list_entries(tx, schema, limit=1, job_id=row_id)
    if not entries:
        raise PageError(
            404,
            f"There is no periodic job {quote_name_for_sentence(row_id)}."
            if row_id
            else "This address names no periodic job.",
            "The page Periodic lists all that a leader has registered.",
        )
    return entries[0]


def _make_search(job_id: str, kind: str | None) -> JobSearch:
    """Return the search for the jobs of a periodic job."""
    metadata = msgspec.json.encode({"river:periodic_job_id": job_id}).decode()
    values = {"metadata": metadata, **({} if kind is None else {"kind": kind})}
    return parse_search(QueryParams(values))


async def _find_last_job(
    tx: Transaction,
    schema: str | None,
    entry: PeriodicJobDashboardRow,
    found: FoundJobs,
    fleet: OverallStatus,
) -> ListedRun | None:
    """Return the newest job that the periodic job inserted, or None if it is not known.

    This is the first job in `found`, the jobs that a search found. The search reads only a limited
    number of jobs. If `found` is empty, search for the job of the run at `entry.last_run_at`, which
    may be older.
    """
    if found.jobs:
        return make_run_of_job(found.jobs[0])
    if entry.last_run_at is None:
        return None
    queues = [queue.name for queue in fleet.queues[:SEARCHED_QUEUES_MAX]]
    job_id, _ = split_periodic_row_id(entry.id)
    try:
        async with tx.transaction():
            job = await periodic_find_job_of_due_time(
                tx, schema, periodic_job_id=job_id, due_at=entry.last_run_at, queues=queues
            )
            return None if job is None else make_run_of_inserted_job(job)
    except PostgresError as error:
        if not is_damaged_or_untranslatable_error(error):
            raise
        return None  # the server cannot read the job


def compute_next_run_times(entry: PeriodicJobDashboardRow) -> NextRunTimes:
    """Return the next run times of a periodic job. The first time is stored. The later times are
    computed from the text of the schedule, if riverpy can parse it."""
    if entry.next_run_at is None:
        return NextRunTimes([])
    times = [entry.next_run_at]
    try:
        schedule = parse_schedule(entry.schedule)
    except ConfigError as error:
        return NextRunTimes(times, note=f"Later times are not known: {error}.")
    if schedule is None:
        return NextRunTimes(times, note="Only the code of the schedule can compute later times.")
    while len(times) < NEXT_RUN_TIMES_SHOWN:
        following = find_next_due_time(schedule, times[-1])
        if following is None:
            break
        times.append(following)
    if not isinstance(schedule, CronSchedule) or schedule.timezone == "UTC":
        return NextRunTimes(times)
    local = [f"{time.astimezone(schedule.zone):%a %Y-%m-%d %H:%M:%S}" for time in times]
    return NextRunTimes(times, schedule.timezone, local)
