"""Steps: named parts of a job. The next attempt skips the steps that an earlier attempt completed.

The completed steps are stored in the job's metadata under River's keys. So a job that began in Go
can continue in Python, and the reverse.
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
"""A type whose values do not change when they are encoded as JSON and decoded again."""


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
        """Run or skip a step, as `StepMethods.step` describes."""
        ...

    def set_cursor(self, value: object) -> None:
        """Set the cursor of the running step, as `StepMethods.set_cursor` describes."""

    def checkpoint(
        self, tx: CallerTransaction | None, *, now: bool
    ) -> Coroutine[object, None, bool]:
        """Store the completed steps and the cursors, as `StepMethods.checkpoint` describes."""
        ...


class StepMethods:
    """The methods of `Job` for steps: parts of a job that do not run again after they completed."""

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

        Returns the result of the function, or None if the step is skipped and its result was not
        kept. If the function raises an error, this call raises it and the attempt fails with it,
        even if the code of the job catches the error.

        Args:
            name: the name of the step, unique in the job and the same in every attempt.
            function: an `async def`, or a plain function that does not block the event loop.
            args: the arguments of the function.
            cursor: the type of the step's cursor, i.e. the position from which the next attempt
                continues. The function receives the stored cursor (or None) as its first argument,
                and sets a new one with `set_cursor`. Default: the step has no cursor.
            keep: store the result, at most 1 MiB as JSON, before this call returns. A later
                attempt returns the stored result and does not run the step. Default False.
            result_type: the type of a kept result that is not plain JSON, for instance a Struct.
                Default: the decoded JSON is returned.

        Raises:
            StepError: the name was used before in this attempt, steps are nested, the stored cursor
                cannot be decoded, or an earlier attempt stored a cursor but `cursor` is not set
                now.
            ArgsError: the result cannot be stored as JSON, or is larger than 1 MiB.
            AttemptLostError: the attempt no longer belongs to this client.
            ClientStateError: the job is a blocking job.
        """
        return self._get_step_runner("job.step").run_step(
            name, function, args, cursor=cursor, keep=keep, result_type=result_type
        )

    def set_cursor(self, value: object) -> None:
        """Set the cursor of the running step, i.e. the position from which the next attempt
        continues. A step may call this in a thread.

        The cursor is stored by `checkpoint`, and when the attempt fails or is snoozed, cancelled or
        interrupted.

        Raises:
            ArgsError: the value cannot be stored as JSON, or is larger than 1 MiB.
            StepError: no step with a cursor is running, or the value does not have the type of its
                cursor.
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
        """Store the completed steps and the cursors now, so that they are not lost if the process
        is killed. Returns whether they were stored.

        Without `tx`, they are stored at most once a second, and only if they have changed. With
        `tx`, they are stored in the caller's transaction, together with the running step: the
        cursor of a step with a cursor is stored, and a step without a cursor is stored as
        completed, although it still runs. So make this call the last one in the transaction. If the
        transaction is rolled back, the next attempt continues from the state that was stored before
        the transaction.

        Without `tx`, or with an async session as `tx`, await the call. With a blocking session,
        which a step may use in a thread, do not await the call: it returns when the state is
        stored.

        Args:
            tx: the transaction in which the running step writes its data.
            now: store even if the last store was less than a second ago. Default False.

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
        """Store the steps, as `checkpoint` describes. With a blocking session as `tx`, return the
        result, otherwise a coroutine."""
        raise make_event_loop_required_error("job.checkpoint")

    def _get_step_runner(self, method: str, *, needs_event_loop: bool = True) -> StepRunner:
        """Return the object that runs the steps of this attempt.

        `method` is the name of the called method, for error texts. `needs_event_loop`: whether this
        method works only in the event loop.
        """
        raise make_event_loop_required_error(method)


def make_event_loop_required_error(
    method: str, *, is_blocking_session_allowed: bool = False
) -> ClientStateError:
    """Return the error for a call of `method` outside of the worker's event loop.

    `is_blocking_session_allowed`: whether `method` also works in a thread, with a blocking session
    as `tx`.
    """
    text = (
        f"{method} works only in an async job: register the function with @workers.job, and call "
        "blocking code in it with `await asyncio.to_thread(…)`"
    )
    if is_blocking_session_allowed:
        text += ". A blocking job in a thread may pass a blocking session as tx"
    return ClientStateError(text)


def is_in_event_loop() -> bool:
    """Return whether the calling code runs in an event loop, so that it can await."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
