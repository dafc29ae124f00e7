"""The forms of the dashboard that change all jobs that match a search. One form starts the change
after a confirmation, and another form stops the change."""

from __future__ import annotations

import secrets
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from riverpy._dashboard.access import CSRF_TOKEN_FIELD
from riverpy._dashboard.bulk_runs import BulkChangePlan
from riverpy._dashboard.change import (
    BACK_PATH_FIELD,
    CONFIRMED_FIELD,
    ChangeRoute,
    ConfirmationQuestion,
    RequestedChange,
    log_change,
)
from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_actions import (
    EFFECT_BY_ACTION,
    PAST_PARTICIPLE_BY_ACTION,
    JobAction,
    list_possible_actions,
)
from riverpy._dashboard.job_search import find_job_ids, parse_filters, parse_search
from riverpy._dashboard.messages import FlashMessage
from riverpy._dashboard.paths import make_bulk_run_path
from riverpy._dashboard.rendering import format_capped_count
from riverpy._postgres.driver import (
    PostgresError,
    is_damaged_or_untranslatable_error,
    is_server_statement_timeout,
)
from riverpy._postgres.job_lists import job_count_up_to
from riverpy._tools.top.statements import set_statement_timeout
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.job_search import JobSearch
    from riverpy._dashboard.site import Site

MATCHES_COUNTED_MAX = 10_000
COUNT_TIMEOUT = timedelta(seconds=1)
"""The timeout of the statement that counts the matching jobs."""
RUN_ID_FIELD = "run"
"""The form field with the id of the bulk run. The confirmation page adds this field."""
_NON_FILTER_FIELDS = ("action", RUN_ID_FIELD, CSRF_TOKEN_FIELD, CONFIRMED_FIELD, BACK_PATH_FIELD)
"""The form fields that are not filters of the search."""


class BulkChangeForm(NamedTuple):
    """A form that retries, cancels or deletes all jobs that match a search."""

    action: JobAction
    search: JobSearch
    run_id: str

    async def make_question(self, site: Site) -> ConfirmationQuestion:
        """Return the question that the user must confirm before the change.

        Raises:
            PageError: no job matches the search, or a filter would reveal args that the dashboard
                hides.
        """
        self.search.require_allowed_filters(site.options)
        matched, is_exact = await count_matching_jobs(site, self.search)
        if not matched:
            raise PageError(400, "No job matches now.", "Go back, and load the list again.")
        number = format_capped_count(matched, MATCHES_COUNTED_MAX)
        at_least = "" if is_exact or matched >= MATCHES_COUNTED_MAX else "at least "
        noun = "job" if matched == 1 else "jobs"
        return ConfirmationQuestion(
            f"{self.action.capitalize()} all {at_least}{number} {noun} that match?",
            f"{EFFECT_BY_ACTION[self.action]} Jobs that are inserted later stay as they are.",
            f"The filters are: {self.search.describe()}.",
            "Keep them as they are",
            is_dangerous=self.action == "delete",
            fields=((RUN_ID_FIELD, self.run_id),),
        )


async def count_matching_jobs(site: Site, search: JobSearch) -> tuple[int, bool]:
    """Return the number of jobs that match, up to `MATCHES_COUNTED_MAX`, and whether this number is
    exact. If the count takes longer than `COUNT_TIMEOUT`, or the server cannot read a job, search
    as the job list does. Such a search reads a limited number of jobs, and may not find all."""
    schema = site.client.config.schema
    try:
        async with open_read_transaction(site.client) as tx:
            await set_statement_timeout(tx, COUNT_TIMEOUT)
            count = await job_count_up_to(tx, schema, search.filters.values, MATCHES_COUNTED_MAX)
        return count, count < MATCHES_COUNTED_MAX
    except PostgresError as error:
        if not (is_server_statement_timeout(error) or is_damaged_or_untranslatable_error(error)):
            raise
    async with open_read_transaction(site.client) as tx:
        found = await find_job_ids(tx, schema, search, limit=MATCHES_COUNTED_MAX)
    count = len(found.ids)
    return count, count < MATCHES_COUNTED_MAX and found.limit_note is None


def parse_bulk_change_form(_path_params: Mapping[str, Any], fields: QueryParams) -> RequestedChange:
    """Parse a form that changes all jobs that match a search. Return the requested change.

    Raises:
        PageError: the form does not come from this dashboard, does not contain a state, or requests
            an action that is not possible for jobs in this state.
    """
    search = parse_search(fields, non_filter_names=_NON_FILTER_FIELDS)
    action = fields.get("action", "")
    if not search.state:
        raise PageError(400, "The form names no state.", "Go back, and choose a state first.")
    if action not in get_args(JobAction):
        raise PageError(400, "The form names no change.", "Go back, and use one of the buttons.")
    for possible in list_possible_actions(JobState(search.state)):
        if action == possible:
            run_id = fields.get(RUN_ID_FIELD, "")[:32] or secrets.token_hex(16)
            form = BulkChangeForm(possible, search, run_id)
            return RequestedChange(
                partial(start_bulk_change, form),
                form.make_question,
                next_path=make_bulk_run_path(run_id),
            )
    done = PAST_PARTICIPLE_BY_ACTION[cast("JobAction", action)]
    raise PageError(
        400,
        f"{search.state.capitalize()} jobs cannot be {done}.",
        "Go back, and use one of the buttons.",
    )


async def start_bulk_change(form: BulkChangeForm, site: Site, access: Access) -> None:
    """Start the change of all matching jobs as a background run. The page of the run shows its
    progress."""
    form.search.require_allowed_filters(site.options)
    matched, is_exact = await count_matching_jobs(site, form.search)
    site.bulk_runs.start(
        BulkChangePlan(
            form.run_id,
            form.action,
            parse_filters(form.search.texts),
            form.search.describe(),
            form.search.make_path(),
            access.user,
            matched,
            is_exact,
        )
    )


def parse_stop_bulk_change_form(
    path_params: Mapping[str, Any], _fields: QueryParams
) -> RequestedChange:
    """Parse a form that stops a bulk run. Return the requested change. The path of the form
    contains the id of the run."""
    run_id: str = path_params["run_id"]
    return RequestedChange(partial(_stop_run, run_id), next_path=make_bulk_run_path(run_id))


async def _stop_run(run_id: str, site: Site, access: Access) -> FlashMessage:
    run = site.bulk_runs.find(run_id)
    if run is None or run.outcome != "running":
        return FlashMessage("The change does not run any more.", "look")
    run.request_stop()
    log_change(access, f"stop bulk {run.plan.action}", run.plan.filters_text)
    return FlashMessage("The change stops after its present batch.")


START_ROUTE = ChangeRoute("/jobs/change-all", parse_bulk_change_form, "/jobs")
STOP_ROUTE = ChangeRoute("/bulk-change/{run_id}/stop", parse_stop_bulk_change_form, "/jobs")
