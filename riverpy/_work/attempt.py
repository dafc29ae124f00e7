"""One attempt at a job: the claimed row, what stops it, and what became of it."""

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
"""By the final state that another session has given to a job."""


class Outcome(msgspec.Struct, frozen=True):
    """How an attempt ended, if it did not simply complete."""

    event: EventKind
    state: JobState
    attempt: int
    """The attempt number to store."""
    final: bool
    delay: float | None = 0.0
    """Seconds until the job is due again, not for a final one; None: it is as due as it was."""
    error: str | None = None
    """The entry for the job's errors, as JSON."""


class Attempt(Job[Any]):
    """A job while one of our slots works it. Handlers see it as their `Job`."""

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
        """Frees the slot in which the attempt runs. Called once."""
        self.deadline = math.inf
        """Monotonic seconds; infinity for none, and before it begins."""
        self.cause: StopCause | None = None
        self.task: asyncio.Task[None] | None = None
        self.outcome: Outcome | None = None
        """None while it runs, and for an attempt that completed."""
        self.claimed = claimed
        """When the answer to its claim came; monotonic seconds."""
        self.started = self.ended = self.stored = 0.0
        """Monotonic seconds; 0 before. `started` stays so where it is given back."""
        self.state_stored: str | None = None
        self.stored_row: Sequence[Any] | None = None
        """The row, if another session made it final before this attempt's result was stored."""
        self.is_replaced = False

    @property
    def claim_key(self) -> ClaimKey:
        """What the result is fenced by."""
        row = self._row
        return ClaimKey(row[JobColumn.ID], row[JobColumn.ATTEMPT], row[JobColumn.ATTEMPTED_AT])

    @property
    def is_plain(self) -> bool:
        """Whether it completed and recorded nothing, so that the plain statement stores it."""
        return self.outcome is None and self._updates is None

    @property
    def event(self) -> EventKind:
        """The kind of event that its end is: what was stored decides."""
        if self.outcome is None:
            return EventKind.JOB_COMPLETED
        if self.state_stored == JobState.CANCELLED:
            return EventKind.JOB_CANCELLED
        return self.outcome.event

    @property
    def has_event(self) -> bool:
        """Whether its end is an event: it began, or a cancel mark ended its job as it was given
        back."""
        return self.started != 0.0 or self.state_stored != self.target

    @property
    def is_due(self) -> bool:
        """Whether its job is stored as one that is due now."""
        outcome = self.outcome
        return outcome is not None and not outcome.delay and self.state_stored == JobState.AVAILABLE

    @property
    def target(self) -> str:
        """The state that its end asks for."""
        return JobState.COMPLETED if self.outcome is None else self.outcome.state

    @property
    def size(self) -> int:
        """About how many characters its result has."""
        size = len(self.outcome.error or "") if self.outcome is not None else 0
        return size + sum(map(len, (self._updates or {}).values()))

    def adopt(self, row: Sequence[Any]) -> None:
        """Take over the end that another session has given to this attempt."""
        self.stored_row, state = row, JobState(row[JobColumn.STATE])
        self.outcome = None
        if state is not JobState.COMPLETED:
            event = _FINAL_EVENTS[state]
            self.outcome = Outcome(event=event, state=state, attempt=self.attempt, final=True)

    def is_stored_as(self, found: StoredOutcome) -> bool:
        """Whether a row that stands so has this attempt's result, or what a cancel mark made
        of it."""
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
        """What its code ends with at its timeout."""
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
        """Merge a key of River's own into the metadata, as JSON text."""
        self._merge(key, text)

    def drop_updates(self) -> None:
        """Forget what was recorded: the database refuses it."""
        self._updates = None

    @property
    def has_foreign_error(self) -> bool:
        """Whether the entry for the job's errors has characters other than ASCII's."""
        return self.outcome is not None and not (self.outcome.error or "").isascii()

    def make_error_ascii(self) -> None:
        """Write `?` for each character of the entry that is not ASCII."""
        outcome = self.outcome
        if outcome is not None and outcome.error is not None:
            error = outcome.error.encode("ascii", "replace").decode()
            self.outcome = msgspec.structs.replace(outcome, error=error)

    def settlement(self, now: float) -> Settlement:
        """What the general statement stores."""
        row, outcome = self._row, self.outcome
        if outcome is None:
            attempt, final, delay, error = row[JobColumn.ATTEMPT], True, None, None
        else:
            attempt, final = outcome.attempt, outcome.final
            delay, error = outcome.delay, outcome.error
        return Settlement(
            *self.claim_key,
            state=self.target,
            finalize=True if final else None,
            age=now - self.ended,
            new_attempt=attempt,
            delay=delay,
            error=error,
            updates=self.updates,
        )

    @property
    def updates(self) -> str | None:
        """What it recorded, to be merged into the metadata: an object as JSON text; or None."""
        return _object(self._updates) if self._updates else None

    def merged_metadata(self) -> str:
        """The metadata as it is after the merge, as JSON text."""
        text: str = self._row[JobColumn.METADATA]
        if not self._updates:
            return text
        if text.startswith("{"):
            try:
                members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            except RecursionError:  # nested more deeply than Python reads
                members = {}
            texts = {key: bytes(raw).decode() for key, raw in members.items()}
            return _object(texts | self._updates)
        # PostgreSQL joins what is no object as the elements of an array.
        elements = text[1:-1] if text.startswith("[") else text
        return f"[{', '.join(filter(None, [elements, _object(self._updates)]))}]"


def _object(members: dict[str, str]) -> str:
    texts = (f"{msgspec.json.encode(key).decode()}:{text}" for key, text in members.items())
    return "{" + ",".join(texts) + "}"
