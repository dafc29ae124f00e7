"""Attempt: one run of a job, with its claimed row, its deadline and its outcome."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy._postgres.jobs import ClaimKey, Settlement, StoredOutcome
from riverpy.events import EventKind
from riverpy.job import ERRORS_MAX, Job, JobColumn, JobState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from riverpy._lifecycle import StopCause
    from riverpy._work.plan import Plan


_FINAL_EVENTS = {
    JobState.CANCELLED: EventKind.JOB_CANCELLED,
    JobState.DISCARDED: EventKind.JOB_FAILED,
}
"""The event for each final state that another session can set."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of an attempt that did not simply complete."""

    event: EventKind
    state: JobState
    attempt: int
    """The attempt number to store."""
    final: bool
    delay: float | None = 0.0
    """Seconds until the job is due again; not used for a final outcome. None: `scheduled_at`
    stays."""
    error: str | None = None
    """The new entry of the job's errors, as JSON."""


class Attempt(Job[Any]):
    """A claimed job from its claim until its result is stored. Handlers receive it as their
    `Job`."""

    __slots__ = (
        "cause",
        "claimed",
        "deadline",
        "ended",
        "free_slot",
        "is_replaced",
        "outcome",
        "started",
        "state_stored",
        "stored",
        "stored_row",
        "task",
        "timeout",
        "timeout_is_default",
        "unit",
    )

    def __init__(
        self,
        row: Sequence[Any],
        plan: Plan | None,
        free_slot: Callable[[], None],
        claimed: float,
    ) -> None:
        self._row = row
        self._updates = None
        if plan is None:
            self.unit, self.timeout, self.timeout_is_default = None, math.inf, False
        else:
            self.unit = plan.unit
            self.timeout = plan.timeout
            self.timeout_is_default = plan.timeout_is_default
        self.free_slot = free_slot
        """Frees the slot of the attempt. Called once."""
        self.deadline = math.inf
        """Monotonic seconds; infinity for no deadline and before the start."""
        self.cause: StopCause | None = None
        self.task: asyncio.Task[None] | None = None
        self.outcome: Outcome | None = None
        """None while it runs, and for an attempt that completed."""
        self.claimed = claimed
        """When the answer of its claim arrived; monotonic seconds."""
        self.started = self.ended = self.stored = 0.0
        """Monotonic seconds; 0 before. `started` stays 0 if the job is released before its
        start."""
        self.state_stored: str | None = None
        self.stored_row: Sequence[Any] | None = None
        """The stored row, if another session made the job final before this result was stored."""
        self.is_replaced = False

    @property
    def claim_key(self) -> ClaimKey:
        """The claim key. A result is stored only in a row that still has it."""
        row = self._row
        return ClaimKey(row[JobColumn.ID], row[JobColumn.ATTEMPT], row[JobColumn.ATTEMPTED_AT])

    @property
    def is_plain(self) -> bool:
        """Whether it completed and recorded nothing. The plain statement stores such results."""
        return self.outcome is None and self._updates is None

    @property
    def event(self) -> EventKind:
        """The kind of the event of its end. The stored state decides."""
        if self.outcome is None:
            return EventKind.JOB_COMPLETED
        if self.state_stored == JobState.CANCELLED:
            return EventKind.JOB_CANCELLED
        return self.outcome.event

    @property
    def has_event(self) -> bool:
        """Whether its end is an event. A release before the start is none, unless the job was
        cancelled."""
        return self.started != 0.0 or self.state_stored != self.target_state

    @property
    def is_due(self) -> bool:
        """Whether its job is stored as `available` and due now."""
        outcome = self.outcome
        return outcome is not None and not outcome.delay and self.state_stored == JobState.AVAILABLE

    @property
    def target_state(self) -> str:
        """The state that the result asks for."""
        return JobState.COMPLETED if self.outcome is None else self.outcome.state

    @property
    def size(self) -> int:
        """The approximate number of characters of the result."""
        size = len(self.outcome.error or "") if self.outcome is not None else 0
        return size + sum(map(len, (self._updates or {}).values()))

    def use_stored_end(self, row: Sequence[Any]) -> None:
        """Use the end that another session has stored for this attempt."""
        self.stored_row, state = row, JobState(row[JobColumn.STATE])
        self.outcome = None
        if state is not JobState.COMPLETED:
            event = _FINAL_EVENTS[state]
            self.outcome = Outcome(event=event, state=state, attempt=self.attempt, final=True)

    def is_stored_as(self, found: StoredOutcome) -> bool:
        """Whether the stored outcome is this attempt's, or that of a cancel that arrived while it
        ran."""
        outcome, own = self.outcome, self.claim_key
        errors = len(self._row[JobColumn.ERRORS] or ())
        if outcome is None:
            return found == StoredOutcome(own, JobState.COMPLETED, errors)
        if outcome.error is not None:
            errors = min(errors + 1, ERRORS_MAX)
        stored = StoredOutcome(own._replace(attempt=outcome.attempt), outcome.state, errors)
        cancelled = StoredOutcome(own, JobState.CANCELLED, errors)
        return found == stored or (not outcome.final and found == cancelled)

    def timeout_error(self) -> TimeoutError:
        """Return the error with which the attempt ends at its timeout."""
        text = f"job exceeded its timeout of {self.timeout:g} s"
        if self.timeout_is_default:
            text += " (the client's job_timeout; give the worker a timeout of its own to change it)"
        return TimeoutError(text)

    def set_cancelled(self) -> None:
        """Set `cancelled`."""
        self._cancelled_event().set()

    def set_args(self, args: Any) -> None:
        """Keep the decoded args."""
        self._args = args

    def merge_metadata(self, key: str, text: str) -> None:
        """Merge a key into the metadata, with its value as JSON text. Keys of River are allowed."""
        self._merge(key, text)

    def drop_updates(self) -> None:
        """Forget the recorded metadata, which the database refuses."""
        self._updates = None

    @property
    def has_foreign_error(self) -> bool:
        """Whether the error entry has characters outside ASCII."""
        return self.outcome is not None and not (self.outcome.error or "").isascii()

    def make_error_ascii(self) -> None:
        """Replace each character of the error entry that is not ASCII with `?`."""
        outcome = self.outcome
        if outcome is not None and outcome.error is not None:
            error = outcome.error.encode("ascii", "replace").decode()
            self.outcome = msgspec.structs.replace(outcome, error=error)

    def settlement(self, now: float) -> Settlement:
        """Return the values for the general statement."""
        row, outcome = self._row, self.outcome
        if outcome is None:
            attempt, final, delay, error = row[JobColumn.ATTEMPT], True, None, None
        else:
            attempt, final = outcome.attempt, outcome.final
            delay, error = outcome.delay, outcome.error
        return Settlement(
            *self.claim_key,
            state=self.target_state,
            finalize=True if final else None,
            age=now - self.ended,
            new_attempt=attempt,
            delay=delay,
            error=error,
            updates=self.updates,
        )

    @property
    def updates(self) -> str | None:
        """The recorded metadata, a JSON object as text; None if nothing was recorded."""
        return _object(self._updates) if self._updates else None

    def merged_metadata(self) -> str:
        """Return the metadata after the merge, as JSON text."""
        text: str = self._row[JobColumn.METADATA]
        if not self._updates:
            return text
        if text.startswith("{"):
            try:
                members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            except RecursionError:  # nested too deeply for Python
                members = {}
            texts = {key: bytes(raw).decode() for key, raw in members.items()}
            return _object(texts | self._updates)
        # PostgreSQL's `||` joins a value that is not an object as elements of an array.
        elements = text[1:-1] if text.startswith("[") else text
        return f"[{', '.join(filter(None, [elements, _object(self._updates)]))}]"


def _object(members: dict[str, str]) -> str:
    texts = (f"{msgspec.json.encode(key).decode()}:{text}" for key, text in members.items())
    return "{" + ",".join(texts) + "}"
