"""Services: the long-running parts of a client, the groups that run them, and the causes of a stop.

A service is an object with a coroutine `run`, which a `ServiceGroup` runs in a task. At the end of
its `async with` block, the group stops its services and waits for them. A client has nested groups,
and stops the innermost group first. The cause of a stop is stored before the cancellation, because
code cannot read a cause from anyio's cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar, cast

import anyio
import anyio.lowlevel

from riverpy._without_loop import is_without_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from types import TracebackType

    from anyio.abc import TaskGroup, TaskStatus

TEST_SIGNAL_TIMEOUT = 30.0
"""Seconds that a test waits for a `TestSignal` before the test fails."""
SERVICE_PROGRESS_DELAY_MAX = 20.0
"""A service counts as stuck if its progress is late by more than this number of seconds."""
ResultT = TypeVar("ResultT")


class StopCause(Enum):
    """Why a service, a job, or code that needs a lease was stopped."""

    CLIENT_STOP = "client stop"
    HARD_STOP = "hard stop"
    LEADERSHIP_LOST = "leadership lost"
    LEASE_LOST = "lease lost"
    LEASE_HANDED_OVER = "lease handed over"
    QUEUE_REMOVED = "queue removed"
    JOB_CANCELLED = "job cancelled remotely"
    JOB_TIMEOUT = "job timeout"


class StopScope:
    """A cancel scope around a service or other code. It stores the cause of its stop, and the time
    by which the service must make progress.

    `with scope:` suppresses only the cancellation of this scope. If this scope was not stopped but
    its parent was, the parent's cause applies.
    """

    def __init__(self, parent: StopScope | None = None) -> None:
        self._cancel_scope = anyio.CancelScope()
        self._parent = parent
        self._own_cause: StopCause | None = None
        self._shield_scopes: dict[anyio.CancelScope, float] = {}
        self.progress_deadline = math.inf
        """The time by which the service must make progress, in seconds of the monotonic clock.
        Infinity: the service may wait without a limit."""

    def set_progress_deadline(self, within: float) -> None:
        """Record that the service makes progress, and that the next call of this method must come
        within `within` seconds. If that call is late by more than `SERVICE_PROGRESS_DELAY_MAX`, the
        service counts as stuck."""
        self.progress_deadline = time.monotonic() + within + SERVICE_PROGRESS_DELAY_MAX

    def clear_progress_deadline(self) -> None:
        """Remove the progress deadline. Call this before the service waits for an event that may
        never happen."""
        self.progress_deadline = math.inf

    @property
    def cause(self) -> StopCause | None:
        """Why this scope, or a scope around it, was stopped. None: neither was stopped."""
        return self._own_cause or (self._parent.cause if self._parent else None)

    def stop(self, cause: StopCause) -> None:
        """Record the cause, then cancel the scope. If another cause was recorded before, the
        earlier cause is kept."""
        self._own_cause = self._own_cause or cause
        self.cancel(cause.value)

    def cancel(self, reason: str) -> None:
        """Cancel the scope without a cause, for example because another service failed."""
        self._cancel_scope.cancel(reason=reason)
        for shield, after_stop in self._shield_scopes.items():
            shield.deadline = min(shield.deadline, anyio.current_time() + after_stop)

    @contextmanager
    def shield_from_stop(self, timeout: float, *, timeout_after_stop: float) -> Generator[None]:
        """Let the `with` block continue when the scope is stopped. The block may take `timeout`
        seconds in total, and at most `timeout_after_stop` seconds after the stop. If the scope was
        stopped before the block, `timeout_after_stop` counts from the start of the block.

        Raises:
            TimeoutError: the block took too long.
        """
        if self.cause is not None or self._cancel_scope.cancel_called:
            timeout = min(timeout, timeout_after_stop)
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + timeout) as shield:
            self._shield_scopes[shield] = timeout_after_stop
            try:
                yield
            finally:
                del self._shield_scopes[shield]
        if shield.cancelled_caught:
            raise TimeoutError("the step was not finished in time")

    def __enter__(self) -> Self:
        self._cancel_scope.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        return self._cancel_scope.__exit__(exc_type, exc, tb)


class Service(Protocol):
    """One long-running part of a client."""

    name: str

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Run until the service is stopped. Call `task_status.started()` when the service has
        started. If the service cannot start, raise an error and do not call
        `task_status.started()`."""
        ...


class _ServiceGroupMember(NamedTuple):
    """A service of a `ServiceGroup`, with its scope and an event that is set when the service has
    ended."""

    service: Service
    scope: StopScope
    ended_event: asyncio.Event


class ServiceGroup:
    """Runs services in an `async with` block. A service of the group is called a member. When the
    block ends, the group stops its members with the cause CLIENT_STOP, and waits until they have
    ended. After an error in the block, the group cancels its members without a cause.

    If a member fails, the group fails with the member's error.
    """

    def __init__(self, parent: StopScope | None = None) -> None:
        self._parent = parent
        self._members: dict[StopScope, _ServiceGroupMember] = {}
        self._task_group: TaskGroup = anyio.create_task_group()
        self._context = contextvars.copy_context()

    async def start(self, service: Service) -> None:
        """Start a service, and return when it has started.

        Raises:
            Exception: the service raised this error before it had started.
        """
        member = self._add_member(service)
        await self._task_group.start(self._run_member, member, name=f"riverpy {service.name}")

    def start_soon(self, service: Service) -> None:
        """Start a service, and return at once. The service runs with the context variables of the
        code that created the group, not with those of the caller, which may be a job."""
        member, name = self._add_member(service), f"riverpy {service.name}"
        run = partial(self._run_member, member, task_status=anyio.TASK_STATUS_IGNORED)
        self._context.run(partial(self._task_group.start_soon, run, name=name))

    def stop(self, cause: StopCause) -> None:
        """Stop every member with this cause. This method does not wait for the members. The end of
        the `async with` block waits for them."""
        for scope in self._members:
            scope.stop(cause)

    async def stop_service(self, service: Service, cause: StopCause) -> None:
        """Stop one member with this cause, and wait until it has ended."""
        for member in list(self._members.values()):
            if member.service is service:
                member.scope.stop(cause)
                await member.ended_event.wait()

    def stuck_service_names(self) -> list[str]:
        """Return the names of the members whose progress deadline has passed."""
        now = time.monotonic()
        return [
            member.service.name
            for scope, member in self._members.items()
            if scope.progress_deadline < now
        ]

    def extend_progress_deadlines(self, seconds: float) -> None:
        """Move the progress deadlines of all members `seconds` later, because the event loop was
        blocked for this time."""
        for scope in self._members:
            scope.progress_deadline += seconds

    def _add_member(self, service: Service) -> _ServiceGroupMember:
        scope = StopScope(self._parent)
        self._members[scope] = member = _ServiceGroupMember(service, scope, asyncio.Event())
        return member

    async def _run_member(
        self, member: _ServiceGroupMember, *, task_status: TaskStatus[None]
    ) -> None:
        try:
            with member.scope as scope:
                # The group may stop a service before it starts. Then `run` is not called.
                await anyio.lowlevel.checkpoint_if_cancelled()
                await member.service.run(scope, task_status=task_status)
        finally:
            del self._members[member.scope]
            member.ended_event.set()

    async def __aenter__(self) -> Self:
        await self._task_group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> bool | None:
        if exc_type is None:
            self.stop(StopCause.CLIENT_STOP)
        else:
            for scope in self._members:
                scope.cancel("the group failed or was cancelled")
        return await self._task_group.__aexit__(exc_type, exc, tb)


@contextmanager
def convert_base_exceptions(code_name: str, *, is_awaited: bool = False) -> Generator[None]:
    """Raise RuntimeError instead of an exception of user code that is not a subclass of
    `Exception`, such as SystemExit. Without this, the exception could end the process or look like
    a cancellation. `is_awaited`: whether the `with` block awaits the user code. If True,
    GeneratorExit and a cancellation of this task are raised unchanged."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_awaited and (
            isinstance(error, GeneratorExit) or is_cancellation_of_current_task(error)
        ):
            raise
        raise RuntimeError(f"{code_name} raised {type(error).__name__}") from error


def is_cancellation_of_current_task(error: BaseException) -> bool:
    """Return whether this error is a cancellation of the current task.

    User code can also raise CancelledError itself, for example when it awaits a cancelled future.
    Such an error must not end a service silently.
    """
    task = asyncio.current_task()
    is_cancellation = isinstance(error, asyncio.CancelledError)
    return is_cancellation and task is not None and task.cancelling() > 0


async def await_in_separate_task(code_name: str, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await user code in a separate task. A cancellation of this task cancels the separate task
    once.

    After this cancellation, the code can await its clean-up, such as the end of a transaction. If
    the code ran in this task, anyio's cancel scope would cancel each await of the clean-up again.

    Raises:
        Exception: the code raised this error.
    """

    async def await_call() -> ResultT:
        with convert_base_exceptions(code_name, is_awaited=True):
            return await call()

    task = asyncio.get_running_loop().create_task(await_call(), name=f"riverpy {code_name}")
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        if not task.cancelled():
            # `await_call` raises a GeneratorExit of the user code unchanged. This block converts
            # the GeneratorExit to a RuntimeError.
            with convert_base_exceptions(code_name):
                task.result()
        raise
    if task.cancelled():
        raise RuntimeError(f"{code_name} cancelled itself")
    with convert_base_exceptions(code_name):
        return task.result()


async def run_despite_cancellation(step: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await `step` to its end, even if this task is cancelled. Then raise the cancellation. The
    step must have a timeout of its own. In code that runs without an event loop (see
    `riverpy/_without_loop.py`), `step` is awaited directly, because no code can cancel it there.

    A shielded scope of anyio is not enough: it protects the step from other scopes, but not from
    `task.cancel()`, which jobs and `asyncio.timeout` use.

    Raises:
        Exception: the step raised this error, and this task was not cancelled.
    """

    if is_without_loop():
        return await step()

    async def await_step() -> ResultT:
        return await step()

    task = asyncio.get_running_loop().create_task(await_step())
    cancellation: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancellation = error
    try:
        if cancellation is not None:
            if not task.cancelled():
                task.exception()  # mark the error as retrieved, so that asyncio does not log it
            raise cancellation
        return task.result()
    finally:
        cancellation = None  # break the reference cycle of the error and this frame


def unwrap_single_error(error: BaseException) -> BaseException:
    """Return the only error inside nested exception groups. Return any other error, and also a
    group of several errors, unchanged."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    first, *others = group.exceptions
    return group if others else unwrap_single_error(first)


class TestSignal:
    """Counts events, so that a test can wait for an event instead of sleeping. Before the test
    calls `init`, `emit` does nothing."""

    __test__ = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._emitted_events: asyncio.Semaphore | None = None

    def init(self) -> None:
        """Start counting events from zero."""
        self._emitted_events = asyncio.Semaphore(0)

    def emit(self) -> None:
        """Count the event, and wake the waiting test."""
        if self._emitted_events is not None:
            self._emitted_events.release()

    async def wait(self) -> None:
        """Wait for one event. If an event was emitted before and no call has waited for it yet,
        return at once.

        Raises:
            TimeoutError: no event happened within 30 s. The error text contains the name of the
                signal.
        """
        if self._emitted_events is None:
            raise RuntimeError(f"signal {self._name!r} was not initialised by the test")
        reason = f"signal {self._name!r} did not come within {TEST_SIGNAL_TIMEOUT:g} s"
        with anyio.fail_after(TEST_SIGNAL_TIMEOUT, reason=reason):
            await self._emitted_events.acquire()
