"""The form of the dashboard that pauses, resumes or runs a periodic job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

from riverpy._dashboard.change import (
    ChangeRoute,
    ConfirmationQuestion,
    RequestedChange,
    log_change,
    parse_pressed_button,
)
from riverpy._dashboard.database import acquire_connection, open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.messages import FlashMessage
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.periodic_health import find_domain_leader, split_periodic_row_id
from riverpy._dashboard.rendering import format_utc, format_with_escapes
from riverpy._postgres.periodic import (
    periodic_get,
    periodic_pause,
    periodic_request_run,
    periodic_resume,
)
from riverpy.errors import NotFoundError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.site import Site
    from riverpy.periodic import PeriodicJobState

USER_LENGTH_MAX = 200
"""The maximum number of characters of the user's name. The name is stored with the user's request
to run a periodic job."""
PeriodicAction: TypeAlias = Literal["pause", "resume", "run"]


class PeriodicChangeForm(NamedTuple):
    """A form that pauses, resumes or runs a periodic job."""

    action: PeriodicAction
    job_id: str


def parse_periodic_change_form(
    _path_params: Mapping[str, Any], fields: QueryParams
) -> RequestedChange:
    """Parse a form that pauses, resumes or runs a periodic job. Return the requested change.

    Raises:
        PageError: the form does not come from this dashboard.
    """
    action, job_id = parse_pressed_button(fields, get_args(PeriodicAction), "periodic job")
    form = PeriodicChangeForm(cast("PeriodicAction", action), job_id)
    question = None
    if form.action == "run":
        question = partial(_make_run_question, form.job_id)
    return RequestedChange(partial(change_periodic_job, form), question)


async def _make_run_question(job_id: str, site: Site) -> ConfirmationQuestion:
    """Return the question that the user must confirm. Raise PageError if the periodic job, or
    the table of periodic jobs, does not exist."""
    try:
        async with open_read_transaction(site.client) as tx:
            await periodic_get(tx, site.client.config.schema, job_id)
    except NotFoundError:
        raise _make_not_found_error(job_id) from None
    except SchemaMissingError as error:
        raise _make_missing_table_error(error) from None
    return ConfirmationQuestion(
        f"Run {format_with_escapes(job_id)} now?",
        "The leader inserts one more job now, also if the periodic job is paused. The schedule "
        "does not change.",
        keep_text="Do not run it now",
    )


def _make_not_found_error(job_id: str) -> PageError:
    return PageError(
        404,
        f"There is no periodic job {quote_name_for_sentence(job_id)}.",
        "A leader registers the periodic jobs of its code. The page Periodic lists all. To "
        "add one, start a worker with its code.",
    )


def _make_missing_table_error(error: SchemaMissingError) -> PageError:
    return PageError(404, f"Nothing was changed: {error}.", "Then load the page again.")


async def change_periodic_job(form: PeriodicChangeForm, site: Site, access: Access) -> FlashMessage:
    """Pause or resume a periodic job, or request a run of the job. Log the change, and return the
    message for the user."""
    client = site.client
    schema = client.config.schema
    user = None if access.user is None else format_with_escapes(access.user)[:USER_LENGTH_MAX]
    try:
        async with acquire_connection(client) as connection, connection.transaction():
            before = await periodic_get(connection, schema, form.job_id)
            match form.action:
                case "pause":
                    await periodic_pause(connection, schema, form.job_id)
                case "resume":
                    await periodic_resume(connection, schema, form.job_id)
                case "run":
                    await periodic_request_run(connection, schema, form.job_id, user=user)
    except NotFoundError:
        raise _make_not_found_error(form.job_id) from None
    except SchemaMissingError as error:
        raise _make_missing_table_error(error) from None
    log_change(access, f"{form.action} periodic job", form.job_id)
    if form.action == "run":
        return await _make_run_message(before, site)
    return _make_pause_message(form, before)


def _make_pause_message(form: PeriodicChangeForm, before: PeriodicJobState) -> FlashMessage:
    name = f"The periodic job {format_with_escapes(form.job_id)}"
    if form.action == "resume":
        if before.paused_at is None:
            return FlashMessage(f"{name} was not paused.")
        return FlashMessage(f"{name} is resumed. Runs that were due during the pause are skipped.")
    if before.paused_at is not None:
        return FlashMessage(f"{name} has been paused since {format_utc(before.paused_at)}.")
    return FlashMessage(f"{name} is paused: no job is inserted until it is resumed.")


async def _make_run_message(before: PeriodicJobState, site: Site) -> FlashMessage:
    """Return the message for the user who has requested a run of a periodic job. `before` is the
    state of the periodic job before the request. If an earlier request still waits, the message
    reports this request. Otherwise, the message names the leader that inserts the job, if a leader
    exists."""
    name = format_with_escapes(before.id)
    if before.run_requested_at is not None:
        return FlashMessage(
            f"A run of {name} was requested at {format_utc(before.run_requested_at)} already: the "
            "leader inserts one job for both requests.",
            "look",
        )
    _, domain = split_periodic_row_id(before.id)
    leader = find_domain_leader(domain, await site.statuses.read())
    if leader is None:
        return FlashMessage(
            f"A run of {name} is requested. There is no leader now: the next leader that has it "
            "inserts the job.",
            "look",
        )
    return FlashMessage(
        f"A run of {name} is requested: the leader {format_with_escapes(leader.leader_id)} "
        "inserts the job within seconds, if its code has this periodic job."
    )


CHANGE_ROUTE = ChangeRoute("/periodic/change", parse_periodic_change_form, "/periodic")
