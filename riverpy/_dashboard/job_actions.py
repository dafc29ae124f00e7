"""The actions of users on jobs (retry, cancel and delete) and the words that describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from riverpy._postgres.jobs import FINAL_STATES
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy.client import Client
    from riverpy.job_list import JobChanges

JobAction: TypeAlias = Literal["retry", "cancel", "delete"]

REASONS_SHOWN_MAX = 3
_KNOWN_STATES = frozenset(JobState)
PAST_PARTICIPLE_BY_ACTION: dict[JobAction, str] = {
    "retry": "retried",
    "cancel": "cancelled",
    "delete": "deleted",
}
EFFECT_BY_ACTION: dict[JobAction, str] = {
    "retry": "They become available now, with one more attempt if none is left. Running jobs stay "
    "as they are.",
    "cancel": "They are not worked again. The workers of running jobs are notified. "
    "Jobs that have ended stay as they are.",
    "delete": "They are gone for good. Running jobs stay as they are.",
}


def list_possible_actions(state: str) -> list[JobAction]:
    """Return the actions that are possible for a job in this state. There are none if a newer
    version of River added the state."""
    if state not in _KNOWN_STATES:
        return []
    if state == JobState.RUNNING:
        return ["cancel"]
    actions: list[JobAction] = [] if state == JobState.AVAILABLE else ["retry"]
    return [*actions, *([] if state in FINAL_STATES else ["cancel"]), "delete"]


def get_change_method(client: Client, action: JobAction) -> Callable[..., Awaitable[JobChanges]]:
    """Return the method of the client that applies an action to many jobs."""
    methods: dict[JobAction, Callable[..., Awaitable[JobChanges]]] = {
        "retry": client.job_retry_many,
        "cancel": client.job_cancel_many,
        "delete": client.job_delete_in_batches,
    }
    return methods[action]


def describe_change_counts(action: JobAction, changes: JobChanges) -> list[str]:
    """Return sentences about the result of an action on many jobs."""
    noun = "job" if changes.changed == 1 else "jobs"
    parts = [f"{changes.changed:,} {noun} {PAST_PARTICIPLE_BY_ACTION[action]}."]
    if changes.running and action == "cancel":
        parts.append(f"{changes.running:,} of them run: their workers were notified.")
    if changes.unchanged:
        is_counted = changes.running and action != "cancel"
        running = f" ({changes.running:,} of them run)" if is_counted else ""
        parts.append(f"{changes.unchanged:,} needed no change{running}.")
    if changes.missing:
        parts.append(f"{changes.missing:,} do not exist any more.")
    if changes.refused:
        shown = list(changes.reasons.items())[:REASONS_SHOWN_MAX]
        reasons = "; ".join(f"job {job_id}: {reason}" for job_id, reason in shown)
        more = "" if changes.refused <= len(shown) else "; …"
        parts.append(f"{changes.refused:,} were refused ({reasons}{more}).")
    return parts
