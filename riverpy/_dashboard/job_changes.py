"""Changes of jobs: retry, cancel and delete, with a question before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast, get_args

from riverpy._dashboard.errors import PageError
from riverpy._dashboard.messages import Message
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_CHANGED_JOBS
from riverpy._tools.text import format_count
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy.client import Client
    from riverpy.job_list import JobChanges

JobAction: TypeAlias = Literal["retry", "cancel", "delete"]

IDS_PER_CHANGE_MAX = 1_000
"""The maximum number of jobs that one form names."""
LOGGED_IDS_MAX = 20
"""The maximum number of job ids in one log event."""
REASONS_SHOWN_MAX = 3
PAST_PARTICIPLES: dict[JobAction, str] = {
    "retry": "retried",
    "cancel": "cancelled",
    "delete": "deleted",
}
_EFFECTS: dict[JobAction, str] = {
    "retry": "They become available now, with one more attempt if none is left. Running jobs stay "
    "as they are.",
    "cancel": "They are not worked again. The workers of running jobs are notified. Jobs that have "
    "ended stay as they are.",
    "delete": "They are gone for good. Running jobs stay as they are.",
}


class JobChangeForm(NamedTuple):
    """A form that asks for a change of jobs."""

    action: JobAction
    ids: Sequence[int]
    is_confirmed: bool
    """Whether the user has answered the question."""
    back: str
    """The path to return to, below the dashboard's own."""

    @property
    def needs_question(self) -> bool:
        """Whether the user has to be asked first."""
        return not self.is_confirmed and (self.action != "retry" or len(self.ids) > 1)

    @property
    def question(self) -> str:
        """The question to the user."""
        which = f"job {self.ids[0]}" if len(self.ids) == 1 else f"these {len(self.ids):,} jobs"
        return f"{self.action.capitalize()} {which}?"

    @property
    def effect(self) -> str:
        """What the change does."""
        return _EFFECTS[self.action]


def read_change_form(form: QueryParams) -> JobChangeForm:
    """Return the change that a form asks for.

    Raises:
        PageError: the form is not one of this dashboard, or no job is chosen.
    """
    action = form.get("action")
    if action not in get_args(JobAction):
        raise PageError(400, "The form names no change.", "Go back, and use one of the buttons.")
    texts = form.getlist("id")
    if not texts:
        raise PageError(400, "No job is chosen.", "Go back, and tick the jobs to change.")
    if len(texts) > IDS_PER_CHANGE_MAX:
        raise PageError(
            400,
            f"A form can name {IDS_PER_CHANGE_MAX:,} jobs at most.",
            "Go back, and choose fewer jobs.",
        )
    ids = sorted({_parse_job_id(text) for text in texts})
    back = form.get("back", "")
    is_own_path = back.startswith("/") and not back.startswith("//") and "\\" not in back
    return JobChangeForm(
        cast("JobAction", action),
        ids,
        form.get("confirmed") == "yes",
        back if is_own_path else "/jobs",
    )


def _parse_job_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise PageError(400, f"{text[:30]!r} is no id of a job.", "Go back, and choose jobs again.")
    return int(text)


async def change_jobs(client: Client, form: JobChangeForm, access: Access) -> Message:
    """Change the jobs of a form, log it, and return the message for the user."""
    methods: dict[JobAction, Callable[..., Awaitable[JobChanges]]] = {
        "retry": client.job_retry_many,
        "cancel": client.job_cancel_many,
        "delete": client.job_delete_in_batches,
    }
    try:
        changes = await methods[form.action](ids=form.ids)
    except ConfigError as error:
        raise PageError(400, f"Nothing was changed: {error}", "Go back, and try again.") from None
    get_logger().info(
        DASHBOARD_CHANGED_JOBS,
        action=form.action,
        user=access.user,
        job_ids=list(form.ids[:LOGGED_IDS_MAX]),
        requested=len(form.ids),
        changed=changes.changed,
        refused=changes.refused,
    )
    return describe_changes(form, changes)


def describe_changes(form: JobChangeForm, changes: JobChanges) -> Message:
    """Return the message about a change."""
    parts: list[str] = []
    if len(form.ids) == 1:
        job = f"Job {form.ids[0]}"
        if changes.running and changes.changed:
            parts.append(f"{job} runs: its worker was notified, and cancels it.")
        elif changes.changed:
            parts.append(f"{job} was {PAST_PARTICIPLES[form.action]}.")
        elif changes.unchanged:
            reason = "it runs" if changes.running else "it needed no change"
            parts.append(f"{job} was not changed: {reason}.")
        elif changes.missing:
            parts.append(f"{job} does not exist any more.")
        else:
            parts.append(f"{job} was not changed: {next(iter(changes.reasons.values()), '')}.")
    else:
        parts += _describe_numbers(form, changes)
    state = "ok" if changes.changed == changes.done else "look" if changes.changed else "act"
    return Message(" ".join(parts), state)


def _describe_numbers(form: JobChangeForm, changes: JobChanges) -> list[str]:
    parts = [f"{format_count(changes.changed, 'job')} {PAST_PARTICIPLES[form.action]}."]
    if changes.running and form.action == "cancel":
        parts.append(f"{changes.running:,} of them run: their workers were notified.")
    if changes.unchanged:
        running = f" ({changes.running:,} of them run)" if changes.running else ""
        parts.append(f"{changes.unchanged:,} needed no change{running}.")
    if changes.missing:
        parts.append(f"{changes.missing:,} do not exist any more.")
    if changes.refused:
        shown = list(changes.reasons.items())[:REASONS_SHOWN_MAX]
        reasons = "; ".join(f"job {job_id}: {reason}" for job_id, reason in shown)
        more = "" if changes.refused <= len(shown) else "; …"
        parts.append(f"{changes.refused:,} were refused ({reasons}{more}).")
    return parts
