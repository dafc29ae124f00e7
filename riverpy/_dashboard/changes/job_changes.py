"""The form of the dashboard that retries, cancels or deletes chosen jobs. Most of these changes
need a confirmation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from riverpy._dashboard.cancelling_jobs import describe_cancelling_job, read_cancelling_job
from riverpy._dashboard.change import (
    BACK_PATH_FIELD,
    ChangeRoute,
    ConfirmationQuestion,
    RequestedChange,
)
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.job_actions import (
    EFFECT_BY_ACTION,
    PAST_PARTICIPLE_BY_ACTION,
    JobAction,
    describe_change_counts,
    get_change_method,
)
from riverpy._dashboard.messages import FlashMessage
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_CHANGED_JOBS
from riverpy._tools.text import format_job_ids
from riverpy.errors import ConfigError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.cancelling_jobs import CancellingJob
    from riverpy._dashboard.site import Site
    from riverpy.job_list import JobChanges

IDS_PER_CHANGE_MAX = 1_000
"""The maximum number of job ids in one form."""
LOGGED_IDS_MAX = 20
"""The maximum number of job ids in one log event. Further ids are left out."""

_SINGLE_JOB_EFFECT_BY_ACTION: dict[JobAction, str] = {
    "retry": EFFECT_BY_ACTION["retry"],
    "cancel": "It is not worked again. If it runs, its worker is notified.",
    "delete": "It is gone for good.",
}
_REPEAT_EFFECT = (
    "Completed jobs run again. If their code sends mails or charges cards, it does so again."
)


class JobChangeForm(NamedTuple):
    """A form that retries, cancels or deletes the jobs with the ids in `ids`."""

    action: JobAction
    ids: Sequence[int]
    are_completed: bool = False
    """Whether the page that sent the form showed the jobs as completed."""

    def make_question(self) -> ConfirmationQuestion | None:
        """Return the question that the user must confirm. None: the change needs no
        confirmation."""
        is_one = len(self.ids) == 1
        is_repeated = self.action == "retry" and self.are_completed
        if self.action == "retry" and is_one and not is_repeated:
            return None
        effects = _SINGLE_JOB_EFFECT_BY_ACTION if is_one else EFFECT_BY_ACTION
        jobs = "completed job" if is_repeated else "job"
        return ConfirmationQuestion(
            f"{self.action.capitalize()} {jobs} {self.ids[0]}?"
            if is_one
            else f"{self.action.capitalize()} these {len(self.ids):,} {jobs}s?",
            _REPEAT_EFFECT if is_repeated else effects[self.action],
            "" if is_one else f"These are {format_job_ids(self.ids)}.",
            "Keep it as it is" if is_one else "Keep them as they are",
            is_dangerous=self.action == "delete" or is_repeated,
        )


def parse_job_change_form(_path_params: Mapping[str, Any], fields: QueryParams) -> RequestedChange:
    """Parse a form that retries, cancels or deletes chosen jobs. Return the requested change.

    Raises:
        PageError: the form does not come from this dashboard, or contains no job or too many jobs.
    """
    action = fields.get("action")
    if action not in get_args(JobAction):
        raise PageError(400, "The form names no change.", "Go back, and use one of the buttons.")
    texts = fields.getlist("id")
    if not texts:
        raise PageError(400, "No job is chosen.", "Go back, and tick the jobs to change.")
    if len(texts) > IDS_PER_CHANGE_MAX:
        raise PageError(
            400,
            f"A form can name {IDS_PER_CHANGE_MAX:,} jobs at most.",
            "Go back, and choose fewer jobs.",
        )
    ids = sorted({parse_job_id(text) for text in texts})
    are_completed = fields.get("state") == JobState.COMPLETED
    form = JobChangeForm(cast("JobAction", action), ids, are_completed)
    job_path = f"/jobs/{form.ids[0]}"
    is_page_gone = form.action == "delete" and fields.get(BACK_PATH_FIELD) == job_path
    next_path = "/jobs" if is_page_gone else None
    return RequestedChange(partial(change_jobs, form), form.make_question(), next_path)


def parse_job_id(text: str) -> int:
    """Parse the id of a job.

    Raises:
        PageError: the text is not a job id.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise PageError(400, f"{text[:30]!r} is no id of a job.", "Go back, and choose jobs again.")
    return int(text)


async def change_jobs(form: JobChangeForm, site: Site, access: Access) -> FlashMessage:
    """Retry, cancel or delete the jobs that a form names. Log the change, and return the message
    for the user."""
    earlier: CancellingJob | None = None
    if form.action == "cancel" and len(form.ids) == 1:
        earlier = await read_cancelling_job(site, form.ids[0])
    try:
        changes = await get_change_method(site.client, form.action)(ids=form.ids)
    except ConfigError as error:
        raise PageError(400, f"Nothing was changed: {error}", "Go back, and try again.") from None
    log_job_change(form, access, changes)
    if earlier is not None and changes.running:
        sentence = await describe_cancelling_job(site, earlier)
        return FlashMessage(sentence.text, "look", sentence.link or "", sentence.link_text)
    return make_change_message(form, changes)


def log_job_change(form: JobChangeForm, access: Access, changes: JobChanges) -> None:
    """Log a change of jobs. The log event contains the name of the user, job ids and counts."""
    get_logger().info(
        DASHBOARD_CHANGED_JOBS,
        action=form.action,
        user=access.user,
        job_ids=list(form.ids[:LOGGED_IDS_MAX]),
        requested=len(form.ids),
        changed=changes.changed,
        refused=changes.refused,
    )


def make_change_message(form: JobChangeForm, changes: JobChanges) -> FlashMessage:
    """Return the message for the user about a change of jobs."""
    parts: list[str] = []
    if len(form.ids) == 1:
        job = f"Job {form.ids[0]}"
        if changes.running and changes.changed:
            parts.append(f"{job} runs: its worker was notified of the cancellation.")
        elif changes.changed:
            parts.append(f"{job} was {PAST_PARTICIPLE_BY_ACTION[form.action]}.")
        elif changes.unchanged:
            reason = "it runs" if changes.running else "it needed no change"
            parts.append(f"{job} was not changed: {reason}.")
        elif changes.missing:
            parts.append(f"{job} does not exist any more.")
        else:
            parts.append(f"{job} was not changed: {next(iter(changes.reasons.values()), '')}.")
    else:
        parts += describe_change_counts(form.action, changes)
    state = "ok" if changes.changed == changes.done else "look" if changes.changed else "act"
    return FlashMessage(" ".join(parts), state)


CHANGE_ROUTE = ChangeRoute("/jobs/change", parse_job_change_form, "/jobs")
