"""Sentences that explain when a periodic job runs next, or why it does not run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from riverpy._dashboard.health_summary import has_valid_lease
from riverpy._dashboard.rendering import format_duration, format_utc
from riverpy._dashboard.sentence import HealthSentence
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.dashboard_reads import periodic_find_newest_jobs
from riverpy._postgres.driver import PostgresError, is_damaged_or_untranslatable_error
from riverpy._tools.doctor.waiting_jobs import LATE_PERIODIC_WARN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from riverpy._postgres.dashboard_reads import InsertedPeriodicJob, PeriodicJobDashboardRow
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.top.status import LeaderStatus, OverallStatus

SEARCHED_JOBS_MAX = 10_000
"""The maximum number of jobs that `find_last_jobs` reads. It reads the newest jobs of River's job
table."""


def split_periodic_row_id(row_id: str) -> tuple[str, str]:
    """Split the id of a row in the table of periodic jobs into the id of the periodic job and its
    leader domain."""
    job_id, _, domain = row_id.partition("@")
    return job_id, domain or DEFAULT_DOMAIN


def find_domain_leader(domain: str, fleet: OverallStatus) -> LeaderStatus | None:
    """Return the leader of a leader domain. None: there is no leader now."""
    leader = fleet.leader
    if domain != DEFAULT_DOMAIN:
        leader = next((one.leader for one in fleet.domains if one.name == domain), None)
    return leader if has_valid_lease(leader) else None


def explain_periodic_job(
    entry: PeriodicJobDashboardRow, fleet: OverallStatus, now: datetime
) -> HealthSentence:
    """Return a sentence that explains when a periodic job runs next, or why it does not run."""
    _, domain = split_periodic_row_id(entry.id)
    leader = find_domain_leader(domain, fleet)
    if entry.paused_at is not None:
        since = format_duration((now - entry.paused_at).total_seconds())
        return HealthSentence(
            "look", f"Paused for {since}: no job is inserted until it is resumed."
        )
    if not entry.is_used:
        return HealthSentence(
            "look",
            "Not in use: no leader has used it for two hours or longer. Its code was removed, or "
            "no leader with this code runs. Its row is deleted after 30 days.",
        )
    due_at = min(filter(None, (entry.next_run_at, entry.run_requested_at)), default=None)
    if due_at is None:
        return HealthSentence("ok", "It has no schedule: it runs only with `Run now`.")
    late = (now - due_at).total_seconds()
    if leader is None:
        return _explain_missing_leader(domain, late)
    if late >= LATE_PERIODIC_WARN_SECONDS:
        return _explain_late_run(leader, late)
    if entry.run_requested_at is not None:
        return HealthSentence(
            "ok", "A run was requested. The leader inserts its job within seconds."
        )
    if late >= 0:
        return HealthSentence("ok", "It runs now.")
    return HealthSentence(
        "ok", f"It runs next in {format_duration(-late)}, at {format_utc(due_at)}."
    )


def _explain_missing_leader(domain: str, late: float) -> HealthSentence:
    where = "" if domain == DEFAULT_DOMAIN else f" of the domain {domain}"
    remedy = f"Start a worker{where}: it becomes leader."
    if late < 0:
        return HealthSentence(
            "look",
            f"It is due in {format_duration(-late)}, but there is no leader{where} now. If none "
            f"comes, it does not run. {remedy}",
        )
    return HealthSentence(
        "act", f"Late by {format_duration(late)}, because there is no leader{where}. {remedy}"
    )


def _explain_late_run(leader: LeaderStatus, late: float) -> HealthSentence:
    text = f"Late by {format_duration(late)}, although {leader.leader_id} is the leader."
    if leader.foreign:
        return HealthSentence(
            "act",
            f"{text} It is not a riverpy client, so it does not have this periodic job. Let only "
            "riverpy clients become leader, or give the riverpy clients a domain of their own.",
        )
    return HealthSentence(
        "look", f"{text} A leader inserts only the periodic jobs in its own code. Read its log."
    )


def describe_missing_run(
    entry: PeriodicJobDashboardRow, now: datetime, *, is_job_found: bool
) -> str:
    """Return sentences about why the page shows no last job of a periodic job: it has not run yet,
    or its job was not found. Return an empty text if a job was found.

    Args:
        entry: the row of the periodic job.
        now: the server's time.
        is_job_found: whether a job of this periodic job was found.
    """
    if is_job_found:
        return ""
    if entry.last_run_at is not None:
        return "It ran, but its job was not found: the leader deletes jobs after they end."
    if entry.paused_at is not None:
        return "It has not run since it was added, and is paused."
    if entry.next_run_at is None or entry.next_run_at <= now:
        return "It has not run since it was added."
    first = format_utc(entry.next_run_at)
    return f"It has not run since it was added. Its first run is due at {first}."


async def find_last_jobs(
    tx: Transaction, schema: str | None, entries: Sequence[PeriodicJobDashboardRow]
) -> dict[str, list[InsertedPeriodicJob]]:
    """Find the newest jobs that periodic jobs inserted. `entries` are the rows of the periodic
    jobs. Return a list of inserted jobs for each row, by the id of the row.

    A list contains one job for each cause, for example the schedule or a request. The newest job is
    first. If the jobs of a row are not known, the result has no list for it. An inserted job does
    not store its leader domain. So, if `entries` contains periodic jobs of several domains with the
    same id, their jobs are not known.
    """
    ids = sorted({split_periodic_row_id(entry.id)[0] for entry in entries})
    try:
        async with tx.transaction():
            found = await periodic_find_newest_jobs(
                tx, schema, periodic_job_ids=ids, searched_jobs_max=SEARCHED_JOBS_MAX
            )
    except PostgresError as error:
        if not is_damaged_or_untranslatable_error(error):
            raise
        return {}  # the server cannot read one of the jobs
    by_row = {entry.id: found.get(split_periodic_row_id(entry.id)[0]) for entry in entries}
    uses = Counter(split_periodic_row_id(entry.id)[0] for entry in entries)
    return {
        row_id: jobs
        for row_id, jobs in by_row.items()
        if jobs and uses[split_periodic_row_id(row_id)[0]] == 1
    }
