"""The forms of the dashboard that pause or resume a queue, or delete its jobs."""

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
from riverpy._dashboard.queue_health import add_queue_to_status
from riverpy._dashboard.rendering import (
    format_capped_count,
    format_utc_with_milliseconds,
    format_with_escapes,
)
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_CHANGED_JOBS
from riverpy._tools.text import format_count
from riverpy.errors import NotFoundError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.site import Site
    from riverpy.queue import Queue

QueueAction: TypeAlias = Literal["pause", "resume", "clear", "clear_all"]

ALL_QUEUES = "*"
"""The queue name that means all queues."""
CLEARED_JOBS_MAX = 50_000
"""The maximum number of jobs that one form deletes. It is limited because the browser waits for the
result."""
_DELETED_STATES_BY_ACTION: dict[QueueAction, tuple[str, ...]] = {
    "clear": ("available",),
    "clear_all": ("available", "scheduled", "retryable"),
}
"""The states of the jobs that each action deletes."""
_WORDS_BY_STATE = {"available": "waiting", "scheduled": "scheduled", "retryable": "retrying"}
"""The words that pages and messages use for the states of the jobs that a form deletes."""


class QueueChangeForm(NamedTuple):
    """A form that pauses or resumes a queue or all queues, or deletes jobs of a queue."""

    action: QueueAction
    name: str

    @property
    def target_text(self) -> str:
        """The name of the queue, or `all queues`, as part of a sentence."""
        return (
            "all queues"
            if self.name == ALL_QUEUES
            else f"the queue {format_with_escapes(self.name)}"
        )

    @property
    def deleted_states_text(self) -> str:
        """The states of the jobs that the form deletes, in the words of its button."""
        first, *rest = (_WORDS_BY_STATE[state] for state in _DELETED_STATES_BY_ACTION[self.action])
        return f"{first}, {' and '.join(rest)}" if rest else first


def parse_queue_change_form(
    _path_params: Mapping[str, Any], fields: QueryParams
) -> RequestedChange:
    """Parse a form that pauses or resumes queues, or deletes the jobs of a queue. Return the
    requested change.

    Raises:
        PageError: the form does not come from this dashboard.
    """
    action, name = parse_pressed_button(fields, get_args(QueueAction), "queue")
    form = QueueChangeForm(cast("QueueAction", action), name)
    if form.action in {"clear", "clear_all"}:
        if form.name == ALL_QUEUES:
            raise PageError(400, "Jobs of only one queue can be deleted at a time.", "Go back.")
        return RequestedChange(partial(_delete_jobs, form), partial(_make_delete_question, form))
    if form.name == ALL_QUEUES:
        return RequestedChange(partial(_pause_or_resume, form), _make_all_queues_question(form))
    return RequestedChange(partial(_pause_or_resume, form))


def _make_all_queues_question(form: QueueChangeForm) -> ConfirmationQuestion:
    if form.action == "pause":
        effect = "No worker takes jobs of any queue until you resume them. Running jobs continue."
    else:
        effect = "Workers take jobs of all queues again, also of queues that others have paused."
    return ConfirmationQuestion(
        f"{form.action.capitalize()} all queues?", effect, keep_text="Leave them as they are"
    )


async def _make_delete_question(form: QueueChangeForm, site: Site) -> ConfirmationQuestion:
    """Count the jobs to delete, and return the question that the user must confirm. Raise PageError
    if there are no such jobs."""
    fleet = await site.statuses.read()
    async with open_read_transaction(site.client) as tx:
        fleet = await add_queue_to_status(tx, site.client.config.schema, fleet, form.name)
    queue = next(one for one in fleet.queues if one.name == form.name)
    counts = {state: getattr(queue, state) for state in _DELETED_STATES_BY_ACTION[form.action]}
    if not any(counts.values()):
        raise PageError(
            404,
            f"The queue {quote_name_for_sentence(form.name)} has no {form.deleted_states_text} "
            "jobs.",
            "Nothing was deleted. Go back, and load the page again.",
        )
    numbers = " and ".join(
        f"{format_capped_count(count, fleet.cap)} {_WORDS_BY_STATE[state]}"
        for state, count in counts.items()
    )
    effect = (
        f"These jobs are gone for good: {numbers}. Running jobs and jobs that have ended stay. "
    )
    effect += "A worker may still start some of them first." if not queue.paused else ""
    if any(count >= fleet.cap for count in counts.values()):
        effect += f" At most {CLEARED_JOBS_MAX:,} jobs are deleted at once."
    return ConfirmationQuestion(
        f"Delete {form.deleted_states_text} jobs of {form.target_text}?",
        effect.strip(),
        keep_text="Keep the jobs",
        is_dangerous=True,
    )


async def _delete_jobs(form: QueueChangeForm, site: Site, access: Access) -> FlashMessage:
    """Delete the jobs that a form names, log the change, and return the message for the user."""
    changes = await site.client.job_delete_in_batches(
        queues=[form.name],
        states=[JobState(state) for state in _DELETED_STATES_BY_ACTION[form.action]],
        limit=CLEARED_JOBS_MAX,
    )
    get_logger().info(
        DASHBOARD_CHANGED_JOBS,
        action=f"delete {form.deleted_states_text} jobs",
        user=access.user,
        queue=form.name,
        requested=changes.done,
        changed=changes.changed,
        refused=changes.refused,
    )
    noun = f"{form.deleted_states_text} job"
    parts = [f"{format_count(changes.changed, noun)} of {form.target_text} deleted."]
    if changes.unchanged:
        parts.append(f"{changes.unchanged:,} were started or changed before, and stay.")
    if changes.missing:
        parts.append(f"{changes.missing:,} had been deleted before.")
    if changes.refused:
        reason = next(iter(changes.reasons.values()), "")
        parts.append(f"{changes.refused:,} were refused ({reason}).")
    if changes.done >= CLEARED_JOBS_MAX:
        parts.append("There may be more: delete again.")
    is_complete = not changes.refused and changes.done < CLEARED_JOBS_MAX
    return FlashMessage(" ".join(parts), "ok" if is_complete else "look")


async def _pause_or_resume(form: QueueChangeForm, site: Site, access: Access) -> FlashMessage:
    """Pause or resume one queue or all queues, log the change, and return the message for the
    user."""
    client = site.client
    method = client.queue_pause if form.action == "pause" else client.queue_resume
    try:
        async with acquire_connection(client) as connection, connection.transaction():
            before = None
            if form.name != ALL_QUEUES:
                before = await client.queue_get(form.name, tx=connection)
            await method(form.name, tx=connection)
    except NotFoundError:
        raise PageError(
            404,
            f"There is no queue {quote_name_for_sentence(form.name)} that could be paused or "
            "resumed.",
            "Only a queue that a worker works, or has worked lately, can be paused. Start a worker "
            "of the queue first.",
        ) from None
    log_change(access, f"{form.action} queue", form.name)
    return _make_pause_message(form, before)


def _make_pause_message(form: QueueChangeForm, before: Queue | None) -> FlashMessage:
    subject = (
        form.target_text.capitalize() if form.name == ALL_QUEUES else f"The{form.target_text[3:]}"
    )
    verb, whose = ("are", "their") if form.name == ALL_QUEUES else ("is", "its")
    was_paused = before is not None and before.paused_at is not None
    if form.action == "resume":
        if before is not None and not was_paused:
            return FlashMessage(f"{subject} was not paused.")
        return FlashMessage(f"{subject} {verb} resumed: workers take {whose} jobs again.")
    if before is not None and before.paused_at is not None:
        return FlashMessage(
            f"{subject} has been paused since {format_utc_with_milliseconds(before.paused_at)}."
        )
    return FlashMessage(f"{subject} {verb} paused. Running jobs continue.")


CHANGE_ROUTE = ChangeRoute("/queues/change", parse_queue_change_form, "/queues")
