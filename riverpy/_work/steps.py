"""Runs the steps of a job and records which steps are completed, in the same metadata keys as
River.

The metadata has the name of the last completed step. The next attempt skips this step and all steps
before it. But if the metadata also has a cursor for this step, the step runs again with its cursor.
Nothing is written when a job completes. Error texts that begin with `river:` are the same as in
River.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import msgspec

from riverpy import _json
from riverpy._json_decoder import make_decoder
from riverpy._names import CURSORS_METADATA_KEY, KEPT_RESULTS_METADATA_KEY, STEP_METADATA_KEY
from riverpy._postgres.driver import DATABASE_ERRORS, is_permanent_statement_error
from riverpy._work.attempt_store import encode_json_object
from riverpy.errors import ArgsError, StepError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from riverpy._postgres.sessions.protocols import CallerTransaction

STEP_VALUE_SIZE_MAX = 1024 * 1024
"""The maximum size of a cursor or of a kept result as JSON, in bytes."""
KEPT_RESULTS_SIZE_MAX = 8 * STEP_VALUE_SIZE_MAX
"""The maximum size of all kept results of a job together as JSON, in bytes."""
CHECKPOINT_INTERVAL_MIN = 1.0
"""The minimum number of seconds between two checkpoints without `now=True`."""
STEP_PROGRESS_STORE_TIMEOUT = 60.0
"""Seconds within which progress must be stored, for example a kept result. If this takes longer,
the attempt fails, and the progress is stored together with the failure."""
_JSON_NULL = "null"


class AttemptWithSteps(Protocol):
    """The attributes and methods of an attempt that its steps use."""

    @property
    def metadata_text(self) -> str:
        """The metadata of the job as JSON text, from the time of the claim."""
        ...

    def record_metadata(self, key: str, json_text: str) -> None:
        """Set a key of the metadata to a JSON text. It is stored when the attempt ends."""

    def remove_metadata_update(self, key: str) -> None:
        """Remove a key that `record_metadata` has set, so that it is not stored when the attempt
        ends."""

    async def store_metadata_now(
        self,
        updates: Mapping[str, str],
        *,
        tx: CallerTransaction | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Merge keys into the metadata of the job in the database now, in the transaction `tx` if
        there is one. Without `tx`, a failed statement is repeated for up to `timeout` seconds."""


class AttemptStepRunner:
    """Runs and skips the steps of one attempt, and stores their progress."""

    def __init__(self, attempt: AttemptWithSteps) -> None:
        """Read the steps and cursors that earlier attempts have stored.

        Raises:
            StepError: the stored cursors are a JSON array instead of an object. River raises an
                error for this too.
        """
        self._attempt = attempt
        members = _decode_json_members(attempt.metadata_text)
        self._stored_step = _decode_step_name(members.get(STEP_METADATA_KEY, ""))
        """The name of the last completed step that an earlier attempt has stored. It is set to None
        when the job's code reaches this step. None: no step is skipped."""
        self._stored_cursors = _decode_cursors(members.get(CURSORS_METADATA_KEY, ""))
        self._cursors = dict(self._stored_cursors)
        """The cursors of steps that are not completed, by the name of the step, as JSON texts."""
        self._has_had_cursors = bool(self._cursors)
        self._kept_results = _decode_json_members(members.get(KEPT_RESULTS_METADATA_KEY, ""))
        self._unreached_steps: set[str] = set()
        """The steps with a stored cursor that the job's code has not reached yet. If a completed
        step is stored too, this set stays empty, because River then ignores a cursor whose step the
        code does not have."""
        if self._stored_step is None:
            self._unreached_steps.update(self._cursors)
        self._completed_step: str | None = None
        """The name of the last completed step. An earlier attempt may have completed it."""
        self._called_step_names: set[str] = set()
        self._running_step: _RunningStep | None = None
        self._step_in_transaction: str | None = None
        """The name of the step that `checkpoint(tx)` has stored in the caller's transaction; None:
        no such step. This object does not know whether the transaction was committed. The next
        attempt knows, because it reads the row."""
        self._step_error: BaseException | None = None
        """The error of the step that failed. After it, no other step runs."""
        self._has_new_progress = False
        """Whether there is progress that is not stored yet."""
        self._next_checkpoint_at = 0.0

    # -- running a step

    async def run_step(
        self,
        name: str,
        function: Callable[..., object],
        args: tuple[object, ...],
        *,
        cursor: type[Any] | None,
        keep: bool,
        result_type: type[Any] | None,
    ) -> Any:
        """Run or skip a step, as `StepMethods.step` describes."""
        self._check_step_call(
            name, has_cursor=cursor is not None, keep=keep, result_type=result_type
        )
        decode = None if result_type is None else make_decoder(result_type)
        if keep and (kept := self._kept_results.get(name)) is not None:
            self._set_completed_step(name)
            return _decode_kept_result(kept, decode)
        if self._should_skip_step(name, has_cursor=cursor is not None, keep=keep):
            return None
        if cursor is not None:
            args = (self._decode_cursor(name, cursor), *args)
        running = _RunningStep(name, asyncio.current_task(), cursor)
        self._running_step = running
        try:
            returned = await self._call_step_function(function, args)
            if not keep:
                self._end_running_step(running)
                return returned
            text = _encode_step_value(returned, f"the result of step {name!r}")
            value = _decode_kept_result(text, decode)
            self._end_running_step(running)
            await self._store_kept_result(name, text)
            return value
        except BaseException as error:
            self._step_error = error
            raise
        finally:
            self._running_step = None

    async def _call_step_function(
        self, function: Callable[..., object], args: tuple[object, ...]
    ) -> object:
        returned = function(*args)
        if isawaitable(returned):
            returned = await cast("Awaitable[object]", returned)
        if self._step_error is not None:  # the function has caught the error of a nested step
            raise self._step_error
        return returned

    def _check_step_call(
        self, name: str, *, has_cursor: bool, keep: bool, result_type: type[Any] | None
    ) -> None:
        """Check that a step with this name and these options may run now. Raise an error if not."""
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            self._raise_step_error(
                StepError(f"the name of a step is a text that is not empty, got {name!r}")
            )
        if has_cursor and keep:
            self._raise_step_error(
                StepError(f"step {name!r} has a cursor, so its result cannot be kept")
            )
        if result_type is not None and not keep:
            self._raise_step_error(StepError(f"step {name!r} has a result_type, but not keep=True"))
        _json.encode(name)  # raises ArgsError if the name cannot be stored
        if self._step_error is not None:
            raise self._step_error
        if self._running_step is not None:
            text = "river: resumable steps cannot be nested"
            if self._running_step.task is not asyncio.current_task():
                running = _quote_step_name(self._running_step.name)
                text += f", and not run at the same time: step {running} runs"
            self._raise_step_error(StepError(text))
        if name in self._called_step_names:
            self._raise_step_error(
                StepError(f"river: duplicate resumable step name {_quote_step_name(name)}")
            )
        self._called_step_names.add(name)
        if has_cursor:
            self._unreached_steps.discard(name)
        elif name in self._unreached_steps:
            text = f"river: resumable cursor step {_quote_step_name(name)} requires a cursor step"
            self._raise_step_error(StepError(text))

    def _raise_step_error(self, error: BaseException) -> NoReturn:
        if self._step_error is None:
            self._step_error = error
        raise error

    def _should_skip_step(self, name: str, *, has_cursor: bool, keep: bool) -> bool:
        """Return whether to skip a step, because an earlier attempt has completed it. A step with
        `keep` is not skipped if its result is not stored."""
        if self._stored_step is None:
            return False
        is_stored_step = name == self._stored_step
        if is_stored_step:
            self._set_completed_step(name)
        return not keep and not (is_stored_step and has_cursor and name in self._cursors)

    def _set_completed_step(self, name: str) -> None:
        """Set a step as the last completed one. Do nothing if an earlier attempt has stored a last
        completed step that the job's code has not reached yet."""
        if self._stored_step in {None, name}:
            self._stored_step, self._completed_step = None, name

    def _decode_cursor(self, name: str, cursor: type[Any]) -> Any:
        text = self._cursors.get(name, _JSON_NULL)
        if text == _JSON_NULL:
            return None
        try:
            return make_decoder(cursor)(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._raise_step_error(
                StepError(
                    f"river: unmarshal resumable cursor for step {_quote_step_name(name)}: {error}"
                )
            )

    def _end_running_step(self, running: _RunningStep) -> None:
        self._set_completed_step(running.name)
        if running.has_cursor:
            self._cursors.pop(running.name, None)
        self._step_in_transaction, self._has_new_progress = None, True

    async def _store_kept_result(self, name: str, text: str) -> None:
        """Store the result of a completed step. If the result cannot be stored now, it is stored
        when the attempt ends."""
        size = len(text) + sum(map(len, self._kept_results.values()))
        if size > KEPT_RESULTS_SIZE_MAX:
            raise ArgsError(
                f"the kept results of a job have at most {KEPT_RESULTS_SIZE_MAX} bytes as JSON, "
                f"with step {name!r} they have {size}"
            )
        self._kept_results[name] = text
        kept = encode_json_object(self._kept_results)
        self._attempt.record_metadata(KEPT_RESULTS_METADATA_KEY, kept)
        await self._store_step_progress(
            {KEPT_RESULTS_METADATA_KEY: kept}, timeout=STEP_PROGRESS_STORE_TIMEOUT
        )
        self._attempt.remove_metadata_update(KEPT_RESULTS_METADATA_KEY)

    # -- cursors and checkpoints

    def set_cursor(self, value: object) -> None:
        """Set the cursor of the running step, as `StepMethods.set_cursor` describes."""
        running = self._running_step
        if running is None or not running.has_cursor:
            raise StepError(
                "job.set_cursor works only in a step with a cursor, as in "
                "`await job.step(name, function, cursor=int)`"
            )
        text = _encode_step_value(value, f"the cursor of step {running.name!r}")
        running.check_cursor(text)
        running.cursor = text
        self._cursors[running.name] = running.cursor
        self._has_had_cursors = self._has_new_progress = True

    async def checkpoint(self, tx: CallerTransaction | None, *, now: bool) -> bool:
        """Store the progress, as `StepMethods.checkpoint` describes."""
        if tx is not None:
            await self._store_step_in_transaction(tx)
            return True
        if not self._has_new_progress or (not now and time.monotonic() < self._next_checkpoint_at):
            return False
        try:
            await self._store_step_progress({}, timeout=STEP_PROGRESS_STORE_TIMEOUT if now else 0.0)
        except DATABASE_ERRORS as error:
            if now or is_permanent_statement_error(error):
                raise
            return False  # the next checkpoint, or the end of the attempt, stores the progress
        return True

    async def _store_step_progress(self, updates: Mapping[str, str], *, timeout: float) -> None:
        """Store the progress together with other metadata keys, over a connection of the client."""
        self._next_checkpoint_at = time.monotonic() + CHECKPOINT_INTERVAL_MIN
        self._has_new_progress = False
        try:
            await self._attempt.store_metadata_now(
                {**updates, **self._make_step_metadata()}, timeout=timeout
            )
        except BaseException:
            self._has_new_progress = True
            raise

    async def _store_step_in_transaction(self, tx: CallerTransaction) -> None:
        """Store the running step in the caller's transaction.

        If the step has a cursor (a value that marks how far the step has come), store the step with
        the last value that `job.set_cursor` has set. Otherwise store the step as completed."""
        running = self._running_step
        if running is None:
            raise StepError("job.checkpoint(tx) stores the running step, so call it in a step")
        if running.has_cursor and running.cursor is None:
            raise StepError(
                "job.checkpoint(tx) stores the cursor of the step, so call job.set_cursor first"
            )
        if self._unreached_steps:
            name = _quote_step_name(min(self._unreached_steps))
            raise StepError(f"river: resumable checkpoint cannot precede saved cursor step {name}")
        cursors = dict(self._cursors)
        if running.cursor is not None:
            cursors[running.name] = running.cursor
        updates = {
            STEP_METADATA_KEY: _json.encode(running.name),
            CURSORS_METADATA_KEY: _encode_cursors(cursors),
        }
        await self._attempt.store_metadata_now(updates, tx=tx)
        self._step_in_transaction = running.name
        self._cursors.pop(running.name, None)

    # -- the end of the attempt

    def check_all_steps_ended(self, *, is_stopped: bool) -> None:
        """Check the steps after the code has returned. `is_stopped`: whether the attempt was
        cancelled by its timeout, by `job_cancel` or by a stop.

        Raises:
            BaseException: a step failed. Its error is raised even if the code has caught it.
            StepError: the code has not reached a stored step, or it has not awaited a step.
        """
        failure = self._step_error
        try:
            if isinstance(failure, asyncio.CancelledError) and not is_stopped:
                raise StepError("a step was cancelled, and the code continued") from failure
            if failure is not None:
                raise failure
        finally:
            del failure  # breaks the reference cycle with the frames of the error
        if self._running_step is not None:
            raise StepError(
                f"the code ended while step {_quote_step_name(self._running_step.name)} was running"
            )
        if self._stored_step is not None:
            name = _quote_step_name(self._stored_step)
            raise StepError(f"river: resumable step {name} not found in Worker")
        if self._unreached_steps:
            name = _quote_step_name(min(self._unreached_steps))
            raise StepError(f"river: resumable cursor step {name} not found in Worker")

    def merge_step_metadata(self) -> None:
        """Add the progress of the steps to the metadata that is stored when the attempt ends. Call
        this if the job is not completed."""
        for key, text in self._make_step_metadata().items():
            self._attempt.record_metadata(key, text)

    def forget_error(self) -> None:
        """Delete the error of the failed step. Its frames refer to this object, which would be a
        reference cycle."""
        self._step_error = None

    def _make_step_metadata(self) -> dict[str, str]:
        """Return the metadata keys that store the progress of the steps, with JSON texts."""
        if self._unreached_steps:  # as in River: a stored cursor is kept until its step is reached
            cursors = {**self._stored_cursors, **self._cursors}
            is_same = cursors == self._stored_cursors
            return {} if is_same else {CURSORS_METADATA_KEY: _encode_cursors(cursors)}
        if self._step_in_transaction is not None:
            has_new_cursor = self._step_in_transaction in self._cursors
            return {CURSORS_METADATA_KEY: _encode_cursors(self._cursors)} if has_new_cursor else {}
        progress: dict[str, str] = {}
        if self._completed_step is not None:
            progress[STEP_METADATA_KEY] = _json.encode(self._completed_step)
        if self._has_had_cursors:
            progress[CURSORS_METADATA_KEY] = _encode_cursors(self._cursors)
        return progress


@dataclass(slots=True)
class _RunningStep:
    """The step that runs now."""

    name: str
    task: asyncio.Task[Any] | None
    cursor_type: type[Any] | None
    """The type of the cursor; None: the step has no cursor."""
    cursor: str | None = None
    """The last cursor that the step has set, as JSON text."""
    decode_cursor: Callable[[str], Any] | None = None
    """The function that decodes a cursor; None: no cursor was set yet."""

    @property
    def has_cursor(self) -> bool:
        """Whether the step has a cursor."""
        return self.cursor_type is not None

    def check_cursor(self, text: str) -> None:
        """Check that a later attempt can decode this cursor.

        Raises:
            StepError: the cursor cannot be decoded.
        """
        if self.cursor_type is None or text == _JSON_NULL:
            return
        try:
            if self.decode_cursor is None:
                self.decode_cursor = make_decoder(self.cursor_type)
            self.decode_cursor(text)
        except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
            raise StepError(
                f"the cursor of step {_quote_step_name(self.name)} is not of the type that "
                f"`job.step(…, cursor=…)` names, so a later attempt could not read it: {error}"
            ) from None


def _quote_step_name(name: str) -> str:
    """Return the name of a step in quotes, as in the errors of River."""
    return json.dumps(name, ensure_ascii=False)


def _encode_cursors(cursors: dict[str, str]) -> str:
    """Return the value of the metadata key for cursors. Without cursors it is null, as in River,
    because merging metadata cannot remove a key."""
    return encode_json_object(cursors) if cursors else _JSON_NULL


def _encode_step_value(value: object, value_name: str) -> str:
    """Return a cursor or a kept result as JSON text.

    Raises:
        ArgsError: the value has no JSON form, or is too large.
    """
    text = _json.encode(value, path=value_name)
    size = len(text.encode())
    if size > STEP_VALUE_SIZE_MAX:
        raise ArgsError(f"{value_name} has at most {STEP_VALUE_SIZE_MAX} bytes as JSON, got {size}")
    return text


def _decode_kept_result(text: str, decode: Callable[[str], Any] | None) -> Any:
    """Decode a kept result, i.e. the stored result of a step with `keep=True`. The attempt that
    runs the step also encodes and decodes the result before it returns the result to the job's
    code, so that the code gets the same value in every attempt."""
    return json.loads(text) if decode is None else decode(text)


def _decode_json_members(text: str) -> dict[str, str]:
    """Return the members of a JSON object as JSON texts. Return an empty dict if the text is not an
    object, or is nested too deeply for Python."""
    try:
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {key: bytes(raw).decode() for key, raw in members.items()}


def _decode_step_name(text: str) -> str | None:
    """Return the name of the stored step, or None if no step is stored. As in River, a value that
    is not a string is ignored."""
    return (msgspec.json.decode(text, type=str) or None) if text.startswith('"') else None


def _decode_cursors(text: str) -> dict[str, str]:
    """Return the stored cursors as JSON texts, by the name of the step. As in River, a JSON array
    raises StepError, and another value that is not an object is ignored."""
    if text.startswith("["):
        raise StepError("river: unmarshal resumable cursors: expected an object, got an array")
    return _decode_json_members(text)
