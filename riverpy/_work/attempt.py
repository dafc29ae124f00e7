"""Attempt: one execution of a job, with its claimed row, its deadline and its outcome."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec
from msgspec import UNSET

from riverpy._names import CURSORS_METADATA_KEY, QUOTED_STEP_METADATA_KEY_PREFIX, STEP_METADATA_KEY
from riverpy._postgres.jobs import AttemptResult, ClaimKey, StoredOutcome
from riverpy._postgres.transactions import is_blocking_transaction, run_at_once_if_blocking
from riverpy._work.attempt_store import encode_json_object
from riverpy.events import EventKind
from riverpy.job import (
    ERRORS_PER_JOB_MAX,
    OUTPUT_METADATA_KEY,
    Job,
    JobColumn,
    JobRow,
    JobState,
    encode_metadata_value,
)
from riverpy.progress import PROGRESS_METADATA_KEY
from riverpy.steps import is_in_event_loop, make_event_loop_required_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from riverpy._lifecycle import StopCause
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy._work.attempt_store import AttemptStore
    from riverpy._work.steps import AttemptStepRunner
    from riverpy.attempt_log import AttemptLog
    from riverpy.progress import JobProgress
    from riverpy.worker import RegisteredWorker

SNOOZE_COUNT_METADATA_KEY = "snoozes"
"""The metadata key under which riverpy, like River, stores the number of snoozes."""


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of an attempt that failed, or was snoozed, cancelled or interrupted."""

    event_kind: EventKind
    state: JobState
    attempt_to_store: int
    """The value to store in the row's column `attempt`."""
    is_final: bool
    seconds_until_due: float | None = 0.0
    """Seconds until the job is due again. None if `scheduled_at` does not change. Not used if
    `is_final` is True."""
    error_entry: str | None = None
    """The new entry of the job's errors, as JSON. None if there is no new error."""


class Attempt(Job[Any]):
    """A claimed job, from its claim until its result is stored. User code receives this object as
    its `Job`."""

    __slots__ = (
        "attempt_store",
        "claimed_at",
        "deadline",
        "ended_at",
        "has_own_timeout",
        "is_completed_in_transaction",
        "is_result_replaced",
        "outcome",
        "release_slot",
        "started_at",
        "step_runner",
        "stop_cause",
        "stored_at",
        "stored_row",
        "stored_state",
        "task",
        "timeout",
        "worker",
    )

    def __init__(
        self,
        row: Sequence[Any],
        worker_and_timeout: tuple[RegisteredWorker | None, float],
        release_slot: Callable[[], None],
        claimed_at: float,
        attempt_store: AttemptStore,
    ) -> None:
        """`worker_and_timeout` contains the worker for the job's kind, or None, and the timeout in
        seconds."""
        self._row = row
        self._metadata_updates = None
        self.worker, self.timeout = worker_and_timeout
        self.has_own_timeout = False
        """Whether the worker's method `timeout` has set the timeout of this attempt."""
        self.release_slot = release_slot
        """The callback that frees the slot of the attempt for another job. It is called once."""
        self.deadline = math.inf
        """The time at which the attempt times out, in monotonic seconds. Infinity if the attempt
        has no timeout or has not started. After a cancellation: the time from which the attempt
        counts as stuck if it is still running."""
        self.stop_cause: StopCause | None = None
        self.task: asyncio.Task[None] | None = None
        self.outcome: Outcome | None = None
        """The outcome of an attempt that failed, or was snoozed, cancelled or interrupted. None if
        the attempt is running or has completed: a completion needs no further values."""
        self.claimed_at = claimed_at
        """The time at which this client received the row, in monotonic seconds."""
        self.started_at = self.ended_at = self.stored_at = 0.0
        """`started_at`, `ended_at` and `stored_at`: when the attempt started, when it ended, and
        when its result was stored, in monotonic seconds. A time is 0 before its event. `started_at`
        stays 0 if the job is released before its start."""
        self.stored_state: str | None = None
        self.stored_row: Sequence[Any] | None = None
        """The row that was read from the database, if another session has ended the job before this
        result was stored; otherwise None."""
        self.is_result_replaced = False
        self.attempt_store = attempt_store
        self.step_runner: AttemptStepRunner | None = None
        """Runs the steps of the job. None if this attempt has not used steps so far, and earlier
        attempts have stored none."""
        self.is_completed_in_transaction = False
        """Whether the job's code has called `complete_tx`. If the transaction of that call was
        rolled back, the attempt ends as usual."""

    def get_encoded_values(self) -> Sequence[Any]:
        """Return the encoded values of the claimed row. If `attempted_by` is None or empty, it
        becomes a list with this client's id. If `tags` is None, it becomes an empty list."""
        row = self._row
        if row[JobColumn.ATTEMPTED_BY] and row[JobColumn.TAGS] is not None:
            return row
        whole = list(row)
        whole[JobColumn.ATTEMPTED_BY] = row[JobColumn.ATTEMPTED_BY] or [
            self.attempt_store.client_id
        ]
        whole[JobColumn.TAGS] = row[JobColumn.TAGS] or []
        return whole

    @property
    def claimed_row(self) -> Sequence[Any]:
        """The row as the claim returned it. The claim leaves out two values that most jobs do not
        need: `attempted_by` is None if this claim has added its first entry, and `tags` is None
        if the job has no tags. `get_encoded_values` returns the row with both values."""
        return self._row

    @property
    def claim_key(self) -> ClaimKey:
        """The claim key (id, attempt, attempted_at). The result is stored only if the row still has
        these values."""
        row = self._row
        return ClaimKey(row[JobColumn.ID], row[JobColumn.ATTEMPT], row[JobColumn.ATTEMPTED_AT])

    @property
    def is_completed_without_metadata(self) -> bool:
        """Whether the attempt completed and recorded no metadata. The completer stores such results
        with a faster statement."""
        return self.outcome is None and self._metadata_updates is None

    @property
    def event_kind(self) -> EventKind:
        """The kind of event for the end of the attempt. It depends on the stored state."""
        if self.outcome is None:
            return EventKind.JOB_COMPLETED
        if self.stored_state == JobState.CANCELLED:
            return EventKind.JOB_CANCELLED
        return self.outcome.event_kind

    @property
    def should_publish_event(self) -> bool:
        """Whether the end of the attempt is published as an event. If the attempt did not start,
        its end is published only if another session has changed the job's state, for example by a
        cancellation."""
        return self.started_at != 0.0 or self.stored_state != self.target_state

    @property
    def is_job_stored_as_available(self) -> bool:
        """Whether the job is stored as `available` and due now."""
        outcome = self.outcome
        return (
            outcome is not None
            and not outcome.seconds_until_due
            and self.stored_state == JobState.AVAILABLE
        )

    @property
    def target_state(self) -> str:
        """The state of the job after the result is stored, if no other session has changed the
        row."""
        return JobState.COMPLETED if self.outcome is None else self.outcome.state

    @property
    def result_length(self) -> int:
        """The approximate length of the result, in characters."""
        size = len(self.outcome.error_entry or "") if self.outcome is not None else 0
        return size + sum(map(len, (self._metadata_updates or {}).values()))

    def set_outcome_from_row(self, row: Sequence[Any]) -> None:
        """Replace the outcome with the outcome in the row, because another session has cancelled,
        completed or discarded the job."""
        self.stored_row, state = row, JobState(row[JobColumn.STATE])
        self.outcome = None
        if state is not JobState.COMPLETED:
            is_cancelled = state is JobState.CANCELLED
            event = EventKind.JOB_CANCELLED if is_cancelled else EventKind.JOB_FAILED
            self.outcome = Outcome(
                event_kind=event, state=state, attempt_to_store=self.attempt, is_final=True
            )

    def is_outcome_stored(self, row_outcome: StoredOutcome) -> bool:
        """Return whether `row_outcome`, which was read from the job's row, is the outcome of this
        attempt. A row in the state `cancelled` also counts if the outcome of this attempt is not
        final: after a `job_cancel` during the attempt, the database cancels the job when it stores
        such an outcome."""
        outcome, own = self.outcome, self.claim_key
        errors = len(self._row[JobColumn.ERRORS] or ())
        if outcome is None:
            return row_outcome == StoredOutcome(own, JobState.COMPLETED, errors)
        if outcome.error_entry is not None:
            errors = min(errors + 1, ERRORS_PER_JOB_MAX)
        stored = StoredOutcome(
            own._replace(attempt=outcome.attempt_to_store), outcome.state, errors
        )
        cancelled = StoredOutcome(own, JobState.CANCELLED, errors)
        return row_outcome == stored or (not outcome.is_final and row_outcome == cancelled)

    def make_timeout_error(self) -> TimeoutError:
        """Return the error of an attempt that exceeds its timeout."""
        text = f"job exceeded its timeout of {self.timeout:g} s"
        if self.worker is not None and self.worker.timeout is UNSET and not self.has_own_timeout:
            text += " (the client's job_timeout; give the worker a timeout of its own to change it)"
        return TimeoutError(text)

    def set_cancelled_flag(self) -> None:
        """Set the event `job.cancelled`."""
        self._get_cancelled_event().set()

    def set_args(self, args: Any) -> None:
        """Set the decoded args."""
        self._args = args

    def record_metadata(self, key: str, json_text: str) -> None:
        """Record a metadata key and its value (JSON text). They are merged into the job's metadata
        when the result is stored. Unlike user code, this method may set keys that River
        reserves."""
        self._record_metadata(key, json_text)

    def set_log(self, log: AttemptLog) -> None:
        """Set the log that the code of the job uses."""
        self._log = log

    def _report_progress(self, progress: JobProgress) -> None:
        self.report_progress_text(msgspec.json.encode(progress).decode())

    def report_progress_text(self, text: str) -> None:
        """Report the progress of the job, as JSON text. The client stores it with its next write of
        progress, or at the latest with the result of the job. After the end of the attempt, do
        nothing. This method may be called in any thread."""
        if self.ended_at:  # the job's code has reported after the end of the attempt
            return
        self._record_metadata(PROGRESS_METADATA_KEY, text)
        self.attempt_store.progress_reports.add_report(self.claim_key, text)

    def save_output(self, value: object) -> Coroutine[object, None, None]:
        if not is_in_event_loop():
            raise make_event_loop_required_error("job.save_output")
        text = encode_metadata_value(value)
        if not self.ended_at:
            self._record_metadata(OUTPUT_METADATA_KEY, text)
        return self.attempt_store.output_saver.save_output(self, self.claim_key, text)

    # -- steps, and completion with `complete_tx`

    @property
    def metadata_text(self) -> str:
        """The metadata of the claimed row, as JSON text."""
        return self._row[JobColumn.METADATA]

    def read_stored_steps(self) -> None:
        """Read the steps and cursors that earlier attempts have stored, if there are any.

        Raises:
            StepError: the stored cursors are a JSON list, not a JSON object.
        """
        if QUOTED_STEP_METADATA_KEY_PREFIX in self._row[JobColumn.METADATA]:
            self.step_runner = self._make_step_runner()

    def _make_step_runner(self) -> AttemptStepRunner:
        from riverpy._work.steps import AttemptStepRunner  # most jobs have no steps

        return AttemptStepRunner(self)

    def _get_step_runner(self, method: str, *, needs_event_loop: bool = True) -> AttemptStepRunner:
        """Return the step runner. Create it if there is none.

        Without an event loop, raise an error that names `method` if `needs_event_loop` is True or
        if there is no step runner yet.
        """
        if not is_in_event_loop() and (needs_event_loop or self.step_runner is None):
            raise make_event_loop_required_error(method)
        if self.step_runner is None:
            self.step_runner = self._make_step_runner()
        return self.step_runner

    def _store_steps(
        self, tx: BlockingTransaction | CallerTransaction | None, *, now: bool
    ) -> bool | Coroutine[object, None, bool]:
        is_blocking = is_blocking_transaction(tx)
        runner = self._get_step_runner("job.checkpoint", needs_event_loop=not is_blocking)
        call = runner.checkpoint(cast("CallerTransaction | None", tx), now=now)
        return run_at_once_if_blocking(tx, call)

    def remove_metadata_update(self, key: str) -> None:
        """Remove a key from the metadata that is stored when the attempt ends."""
        if self._metadata_updates is not None:
            self._metadata_updates.pop(key, None)
            self._metadata_updates = self._metadata_updates or None

    def remove_outcome_metadata(self) -> None:
        """Remove the number of snoozes, the last completed step and the cursors from the metadata
        to store, because `complete_tx` has already completed the job. Other recorded metadata is
        kept."""
        for key in (SNOOZE_COUNT_METADATA_KEY, STEP_METADATA_KEY, CURSORS_METADATA_KEY):
            self.remove_metadata_update(key)

    async def store_metadata_now(
        self,
        updates: Mapping[str, str],
        *,
        tx: CallerTransaction | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Merge metadata keys and their values (JSON texts) into the job's row now, before the
        attempt ends.

        Without `tx`, retry after temporary errors for at most `timeout` seconds; 0: do not retry.
        """
        if tx is None and timeout:
            await self.attempt_store.merge_metadata_with_retries(
                self.claim_key, updates, timeout=timeout
            )
        else:
            await self.attempt_store.merge_metadata(self.claim_key, updates, tx=tx)

    @overload
    def complete_tx(self, tx: BlockingTransaction) -> JobRow: ...
    @overload
    def complete_tx(self, tx: CallerTransaction) -> Coroutine[object, None, JobRow]: ...
    def complete_tx(
        self, tx: BlockingTransaction | CallerTransaction
    ) -> JobRow | Coroutine[object, None, JobRow]:
        if not is_in_event_loop() and not is_blocking_transaction(tx):
            raise make_event_loop_required_error(
                "job.complete_tx", is_blocking_session_allowed=True
            )
        call = self._complete_in_transaction(cast("CallerTransaction", tx))
        return run_at_once_if_blocking(tx, call)

    async def _complete_in_transaction(self, tx: CallerTransaction) -> JobRow:
        job = await self.attempt_store.complete_job(self.claim_key, self.metadata_updates_json, tx)
        self.is_completed_in_transaction = True
        return job

    def remove_all_metadata_updates(self) -> None:
        """Remove all recorded metadata, because the database refuses to store it."""
        self._metadata_updates = None

    def convert_error_text_to_ascii(self) -> bool:
        """Replace each non-ASCII character of the error text with `?`. Return whether the text
        had such a character."""
        outcome = self.outcome
        if outcome is None or outcome.error_entry is None or outcome.error_entry.isascii():
            return False
        error = outcome.error_entry.encode("ascii", "replace").decode()
        self.outcome = msgspec.structs.replace(outcome, error_entry=error)
        return True

    def make_attempt_result(self, now: float) -> AttemptResult:
        """Return the values for the statement that stores the result. `now` is in monotonic
        seconds."""
        outcome = self.outcome
        return AttemptResult(
            *self.claim_key,
            state=self.target_state,
            is_final=True if outcome is None or outcome.is_final else None,
            seconds_since_end=now - self.ended_at,
            new_attempt=self.attempt if outcome is None else outcome.attempt_to_store,
            delay=outcome and outcome.seconds_until_due,
            error=outcome and outcome.error_entry,
            metadata_updates=self.metadata_updates_json,
        )

    @property
    def metadata_updates_json(self) -> str | None:
        """The recorded metadata as the text of a JSON object. None if nothing was recorded."""
        return encode_json_object(self._metadata_updates) if self._metadata_updates else None

    def encode_merged_metadata(self) -> str:
        """Return the metadata of the claimed row, merged with the recorded keys, as JSON text."""
        text: str = self._row[JobColumn.METADATA]
        if not self._metadata_updates:
            return text
        if text.startswith("{"):
            try:
                members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            except RecursionError:  # too deeply nested for Python: omit the row's metadata
                members = {}
            texts = {key: bytes(raw).decode() for key, raw in members.items()}
            return encode_json_object(texts | self._metadata_updates)
        # Merge as PostgreSQL's operator `||` does: if the metadata is not an object, the result is
        # an array.
        elements = text[1:-1] if text.startswith("[") else text
        return (
            f"[{', '.join(filter(None, [elements, encode_json_object(self._metadata_updates)]))}]"
        )
