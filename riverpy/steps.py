"""Steps: the methods of `Job` for long work that continues after an interruption.

A job with steps remembers which steps are completed, and its next attempt skips them. The metadata
keys are River's, so an attempt that began in Go continues in Python, and the reverse.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, TypeVarTuple, overload

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

ArgsT = TypeVarTuple("ArgsT")
CursorT = TypeVar("CursorT")
ResultT = TypeVar("ResultT")
JsonT = TypeVar("JsonT", bound="str | int | float | bool | list[Any] | dict[str, Any] | None")
"""The type of a value that is the same after it was encoded as JSON and decoded again."""


class StepRunner(Protocol):
    """Runs the steps of one attempt."""

    def run_step(
        self,
        name: str,
        function: Callable[..., object],
        args: tuple[object, ...],
        *,
        cursor: type[Any] | None,
        keep: bool,
        result_type: type[Any] | None,
    ) -> Coroutine[object, None, Any]:
        """Run or skip a step, as `StepMethods.step`."""
        ...

    def set_cursor(self, value: object) -> None:
        """Set the cursor of the running step."""

    def checkpoint(
        self, tx: CallerTransaction | None, *, now: bool
    ) -> Coroutine[object, None, bool]:
        """Store the progress, as `StepMethods.checkpoint`."""
        ...


class StepMethods:
    """The methods of a job for its steps."""

    __slots__ = ()

    @overload
    def step(
        self, name: str, function: Callable[[*ArgsT], Awaitable[ResultT]], /, *args: *ArgsT
    ) -> Coroutine[object, None, ResultT | None]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[*ArgsT], Awaitable[JsonT]],
        /,
        *args: *ArgsT,
        keep: Literal[True],
    ) -> Coroutine[object, None, JsonT]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[*ArgsT], Awaitable[ResultT]],
        /,
        *args: *ArgsT,
        keep: Literal[True],
        result_type: type[ResultT],
    ) -> Coroutine[object, None, ResultT]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[CursorT | None, *ArgsT], Awaitable[ResultT]],
        /,
        *args: *ArgsT,
        cursor: type[CursorT],
    ) -> Coroutine[object, None, ResultT | None]: ...
    @overload
    def step(
        self, name: str, function: Callable[[*ArgsT], ResultT], /, *args: *ArgsT
    ) -> Coroutine[object, None, ResultT | None]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[*ArgsT], JsonT],
        /,
        *args: *ArgsT,
        keep: Literal[True],
    ) -> Coroutine[object, None, JsonT]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[*ArgsT], ResultT],
        /,
        *args: *ArgsT,
        keep: Literal[True],
        result_type: type[ResultT],
    ) -> Coroutine[object, None, ResultT]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[CursorT | None, *ArgsT], ResultT],
        /,
        *args: *ArgsT,
        cursor: type[CursorT],
    ) -> Coroutine[object, None, ResultT | None]: ...
    def step(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        cursor: type[Any] | None = None,
        keep: bool = False,
        result_type: type[Any] | None = None,
    ) -> Coroutine[object, None, Any]:
        """Run a step of this job, or skip it because an earlier attempt has completed it.

        Returns what the function returned; None if the step is skipped and its result was not kept.
        An error of the function is raised, and the attempt fails with it, even if the code of the
        job catches it.

        Args:
            name: the name of the step, unique in the job and the same in every attempt.
            function: an `async def`, or a plain function that does not block the event loop.
            args: the arguments of the function.
            cursor: the type of the cursor. The function gets the stored cursor as its first
                argument, or None, and moves it with `set_cursor`. Default: the step has no cursor.
            keep: store the result, at most 1 MiB as JSON, before this call returns. A later
                attempt returns the stored result and does not run the step. Default False.
            result_type: the type of a kept result that is not plain JSON, for instance a Struct.
                Default: the decoded JSON is returned.

        Raises:
            StepError: the name was used before in this attempt, steps are nested, the stored cursor
                cannot be decoded, or a step with a cursor in an earlier attempt has none now.
            ArgsError: the result cannot be stored as JSON, or is larger than 1 MiB.
            AttemptLostError: the attempt no longer belongs to this client.
            ClientStateError: the job is a blocking job.
        """
        return self._get_step_runner("job.step").run_step(
            name, function, args, cursor=cursor, keep=keep, result_type=result_type
        )

    def set_cursor(self, value: object) -> None:
        """Set the cursor of the running step. It is stored when the attempt fails, is snoozed,
        cancelled or interrupted, and by `checkpoint`. A step may call this in a thread.

        Raises:
            ArgsError: the value cannot be stored as JSON, or is larger than 1 MiB.
            StepError: no step with a cursor is running, or the value cannot be decoded as the type
                of its cursor.
            ClientStateError: the job is a blocking job.
        """
        runner = self._get_step_runner("job.set_cursor", needs_event_loop=False)
        runner.set_cursor(value)

    @overload
    def checkpoint(self, tx: BlockingTransaction, *, now: bool = ...) -> bool: ...
    @overload
    def checkpoint(
        self, tx: CallerTransaction | None = ..., *, now: bool = ...
    ) -> Coroutine[object, None, bool]: ...
    def checkpoint(
        self, tx: BlockingTransaction | CallerTransaction | None = None, *, now: bool = False
    ) -> bool | Coroutine[object, None, bool]:
        """Store the completed steps and the cursors now, so that a killed process does not lose
        them. Returns whether they were stored.

        Without `tx`, they are stored at most once a second, and only if they have changed. With
        `tx`, the running step is stored in the caller's transaction: a step with a cursor at its
        cursor, another step as completed. Call it last in the transaction. After a rollback, the
        next attempt continues from what was stored before.

        With a blocking session as `tx`, which a step may use in a thread, the call needs no `await`
        and has done its work when it returns; see `complete_tx`.

        Args:
            tx: the transaction in which the running step writes its data.
            now: store also if the last call was less than a second ago. Default False.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client: end the job. A
                transaction given as `tx` stays usable.
            StepError: with `tx`, no step is running, or its cursor is not set.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            ClientStateError: the job is a blocking job.
        """
        return self._store_steps(tx, now=now)

    def _store_steps(
        self, tx: BlockingTransaction | CallerTransaction | None, *, now: bool
    ) -> bool | Coroutine[object, None, bool]:
        """Store the progress, as `checkpoint`. A blocking session as `tx` gives the result at
        once."""
        raise make_event_loop_required_error("job.checkpoint")

    def _get_step_runner(self, method: str, *, needs_event_loop: bool = True) -> StepRunner:
        """Return the steps of this attempt. `method` is the called method, for error texts.
        `needs_event_loop`: whether the method works only in the event loop."""
        raise make_event_loop_required_error(method)


def make_event_loop_required_error(
    method: str, *, is_blocking_session_allowed: bool = False
) -> ClientStateError:
    """Return the error for a method that needs the event loop of the worker.
    `is_blocking_session_allowed`: whether a blocking session as `tx` works in a thread too."""
    text = (
        f"{method} works only in an async job: register the function with @workers.job, and call "
        "blocking code in it with `await asyncio.to_thread(…)`"
    )
    if is_blocking_session_allowed:
        text += ". A blocking job in a thread may pass a blocking session as tx"
    return ClientStateError(text)


def is_in_event_loop() -> bool:
    """Whether the calling code runs in an event loop, and so can await."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
