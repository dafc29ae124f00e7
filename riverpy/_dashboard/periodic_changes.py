"""Changes of periodic jobs: pause, resume and run now."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args
from urllib.parse import unquote

from riverpy._dashboard.change import ChangeRoute, ConfirmationQuestion, RequestedChange, log_change
from riverpy._dashboard.database import acquire_connection, open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.messages import FlashMessage
from riverpy._dashboard.paths import quote_name
from riverpy._dashboard.periodic_health import find_domain_leader, split_periodic_id
from riverpy._dashboard.rendering import format_utc, format_value
from riverpy._postgres.periodic import periodic_get
from riverpy.errors import NotFoundError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.site import Site
    from riverpy.periodic import PeriodicJobState

PeriodicAction: TypeAlias = Literal["pause", "resume", "run"]


class PeriodicChangeForm(NamedTuple):
    """A form that asks for a change of a periodic job."""

    action: PeriodicAction
    job_id: str


def parse_periodic_change_form(
    _path_params: Mapping[str, Any], fields: QueryParams
) -> RequestedChange:
    """Return the change that a form asks for. The field of the button has the action as its name,
    and the id of the periodic job as its value, with escapes as in an address.

    Raises:
        PageError: the form is not one of this dashboard.
    """
    actions = [action for action in get_args(PeriodicAction) if action in fields]
    if len(actions) != 1:
        raise PageError(400, "The form names no change.", "Go back, and use one of the buttons.")
    form = PeriodicChangeForm(cast("PeriodicAction", actions[0]), unquote(fields[actions[0]]))
    if not form.job_id or "\0" in form.job_id:
        raise PageError(
            400, "The form names no periodic job.", "Go back, and use one of the buttons."
        )
    question = None
    if form.action == "run":
        question = partial(_make_run_question, form.job_id)
    return RequestedChange(partial(change_periodic_job, form), question)


async def _make_run_question(job_id: str, site: Site) -> ConfirmationQuestion:
    """Check that the periodic job exists, and ask."""
    try:
        async with open_read_transaction(site.client) as tx:
            await periodic_get(tx, site.client.config.schema, job_id)
    except NotFoundError:
        raise _make_not_found_error(job_id) from None
    except SchemaMissingError as error:
        raise _make_missing_table_error(error) from None
    return ConfirmationQuestion(
        f"Run {format_value(job_id)} now?",
        "The leader inserts one more job now, also if the periodic job is paused. The schedule "
        "does not change.",
        keep_text="Do not run it now",
    )


def _make_not_found_error(job_id: str) -> PageError:
    return PageError(
        404,
        f"There is no periodic job {quote_name(job_id)}.",
        "A leader registers the periodic jobs of its code. The page Periodic lists all. To "
        "add one, start a worker with its code.",
    )


def _make_missing_table_error(error: SchemaMissingError) -> PageError:
    return PageError(404, f"Nothing was changed: {error}.", "Then load the page again.")


async def change_periodic_job(form: PeriodicChangeForm, site: Site, access: Access) -> FlashMessage:
    """Change a periodic job, log it, and return the message for the user."""
    client = site.client
    methods = {
        "pause": client.periodic_pause,
        "resume": client.periodic_resume,
        "run": client.periodic_run,
    }
    try:
        async with acquire_connection(client) as connection, connection.transaction():
            before = await periodic_get(connection, client.config.schema, form.job_id)
            await methods[form.action](form.job_id, tx=connection)
    except NotFoundError:
        raise _make_not_found_error(form.job_id) from None
    except SchemaMissingError as error:
        raise _make_missing_table_error(error) from None
    log_change(access, f"{form.action} periodic job", form.job_id)
    if form.action == "run":
        return await _make_run_message(before, site)
    return _make_pause_message(form, before)


def _make_pause_message(form: PeriodicChangeForm, before: PeriodicJobState) -> FlashMessage:
    name = f"The periodic job {format_value(form.job_id)}"
    if form.action == "resume":
        if before.paused_at is None:
            return FlashMessage(f"{name} was not paused.")
        return FlashMessage(f"{name} is resumed. Runs that were due during the pause are skipped.")
    if before.paused_at is not None:
        return FlashMessage(f"{name} has been paused since {format_utc(before.paused_at)}.")
    return FlashMessage(f"{name} is paused: no job is inserted until it is resumed.")


async def _make_run_message(before: PeriodicJobState, site: Site) -> FlashMessage:
    """Return the message about a requested run, which names the leader that inserts the job."""
    name = format_value(before.id)
    if before.run_requested_at is not None:
        return FlashMessage(
            f"A run of {name} was requested at {format_utc(before.run_requested_at)} already: the "
            "leader inserts one job for both requests.",
            "look",
        )
    _, domain = split_periodic_id(before.id)
    leader = find_domain_leader(domain, await site.statuses.read())
    if leader is None:
        return FlashMessage(
            f"A run of {name} is requested. There is no leader now: the next leader that has it "
            "inserts the job.",
            "look",
        )
    return FlashMessage(
        f"A run of {name} is requested: the leader {format_value(leader.leader_id)} inserts the "
        "job within seconds, if its code has this periodic job."
    )


CHANGE_ROUTE = ChangeRoute("/periodic/change", parse_periodic_change_form, "/periodic")
