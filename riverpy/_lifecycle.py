"""Who owns a task, how it is stopped, and why.

A service is one coroutine that runs in a `ServiceGroup` and says when it is up. Leaving the group
stops its members and joins them, so stopping a client is leaving its nested groups from the inside
out. A stop has a cause, which is
recorded before the cancellation is sent: anyio's cancellation carries none that code could branch
on.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from types import TracebackType

    from anyio.abc import TaskGroup, TaskStatus

SIGNAL_TIMEOUT = 30.0
"""Seconds that a test waits for a signal before it fails by the signal's name."""
PROGRESS_GRACE = 20.0
"""Seconds that a service may be later than it said before it counts as stuck."""
ResultT = TypeVar("ResultT")


class StopCause(Enum):
    """Why something of ours was stopped."""

    CLIENT_STOP = "client stop"
    HARD_STOP = "hard stop"
    LEADERSHIP_LOST = "leadership lost"
    LEASE_LOST = "lease lost"
    QUEUE_REMOVED = "queue removed"
    JOB_CANCELLED = "job cancelled remotely"
    JOB_TIMEOUT = "job timeout"


class StopScope:
    """A cancel scope that remembers why it was stopped, and by when what runs in it turns again.

    `with scope:` absorbs its own cancellation and nobody else's. A scope without a cause of its own
    has its parent's.
    """

    def __init__(self, parent: StopScope | None = None) -> None:
        self._scope = anyio.CancelScope()
        self._parent = parent
        self._own: StopCause | None = None
        self._shields: dict[anyio.CancelScope, float] = {}
        self.progress_due = math.inf
        """Monotonic seconds; infinity while it may rest for any time."""

    def expect_progress(self, within: float) -> None:
        """Say that the service comes here again within so many seconds, whatever the database
        does: one that does not for `PROGRESS_GRACE` more is stuck."""
        self.progress_due = time.monotonic() + within + PROGRESS_GRACE

    def expect_no_progress(self) -> None:
        """Say that the service waits for what may never come."""
        self.progress_due = math.inf

    @property
    def cause(self) -> StopCause | None:
        """Why this scope, or one around it, was stopped; None while it was not."""
        return self._own or (self._parent.cause if self._parent else None)

    def stop(self, cause: StopCause) -> None:
        """Record the cause, then cancel. The first cause is kept."""
        self._own = self._own or cause
        self.cancel(cause.value)

    def cancel(self, reason: str) -> None:
        """Cancel without a cause: something else has failed."""
        self._scope.cancel(reason=reason)
        for shield, after_stop in self._shields.items():
            shield.deadline = min(shield.deadline, anyio.current_time() + after_stop)

    @contextmanager
    def shielded(self, bound: float, *, after_stop: float) -> Generator[None]:
        """Finish a step in spite of a stop: for `bound` seconds at most, and `after_stop` seconds
        after a stop.

        Raises:
            TimeoutError: the time was over.
        """
        if self.cause is not None or self._scope.cancel_called:
            bound = min(bound, after_stop)
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + bound) as shield:
            self._shields[shield] = after_stop
            try:
                yield
            finally:
                del self._shields[shield]
        if shield.cancelled_caught:
            raise TimeoutError("the step was not finished in time")

    def __enter__(self) -> Self:
        self._scope.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        return self._scope.__exit__(exc_type, exc, tb)


class Service(Protocol):
    """One long-running part of a client."""

    name: str

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Run until stopped. Call `task_status.started()` when up; raise before that if it cannot
        start."""
        ...


class ServiceGroup:
    """Hosts services. Leaving it stops them all, with a cause, and joins them; an error inside only
    cancels them.

    A member that fails takes the group down with its error.
    """

    def __init__(self, parent: StopScope | None = None) -> None:
        self._parent = parent
        self._members: dict[StopScope, str] = {}
        self._tasks: TaskGroup = anyio.create_task_group()

    async def start(self, service: Service) -> None:
        """Start a service and return when it is up.

        Raises:
            Exception: whatever the service raised before it was up.
        """
        await self._tasks.start(self._host, service, name=f"riverpy {service.name}")

    def stop(self, cause: StopCause) -> None:
        """Stop every member with this cause. The group's owner joins them by leaving it."""
        for scope in self._members:
            scope.stop(cause)

    def stuck(self) -> list[str]:
        """The names of the members that have not turned in time."""
        now = time.monotonic()
        return [name for scope, name in self._members.items() if scope.progress_due < now]

    def postpone(self, seconds: float) -> None:
        """Nothing has run for so long, so nothing could turn."""
        for scope in self._members:
            scope.progress_due += seconds

    async def _host(self, service: Service, *, task_status: TaskStatus[None]) -> None:
        scope = StopScope(self._parent)
        self._members[scope] = service.name
        try:
            with scope:
                await anyio.lowlevel.checkpoint_if_cancelled()  # stopped before it began
                await service.run(scope, task_status=task_status)
        finally:
            del self._members[scope]

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
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
        return await self._tasks.__aexit__(exc_type, exc, tb)


@contextmanager
def only_exceptions(name: str) -> Generator[None]:
    """Code of the user's, which may not end the process, nor seem to be cancelled."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{name} raised {type(error).__name__}") from error


def is_cancelled(error: BaseException) -> bool:
    """Whether this is a cancellation of the task that runs now. Code may raise CancelledError for
    its own reasons, as when it awaits what somebody has cancelled: a service of ours would end by
    that without a word."""
    task = asyncio.current_task()
    is_cancellation = isinstance(error, asyncio.CancelledError)
    return is_cancellation and task is not None and task.cancelling() > 0


@contextmanager
def awaiting_only_exceptions(name: str) -> Generator[None]:
    """As `only_exceptions`, around code of the user's that is awaited: a cancellation of this task
    goes through."""
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        if is_cancelled(error):
            raise
        raise RuntimeError(f"{name} raised {type(error).__name__}") from error


async def cancelled_once(name: str, call: Callable[[], Awaitable[object]]) -> None:
    """Await code of the user's to its end, in a task of its own. When this task is cancelled, that
    one is once, as asyncio does it, so that it can await the end of what it has open, as of a
    transaction. The scope that this task is in would cancel it again at each of these steps.

    Raises:
        Exception: what it raised.
    """

    async def work() -> None:
        with awaiting_only_exceptions(name):
            await call()

    task = asyncio.get_running_loop().create_task(work(), name=f"riverpy {name}")
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        if not task.cancelled():
            _expect_result(name, task)
        raise
    if task.cancelled():
        raise RuntimeError(f"{name} cancelled itself")
    _expect_result(name, task)


async def finish(step: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await a step of ours to its end, which has a bound of its own. A cancellation that comes
    meanwhile is raised then. A shielded scope alone keeps only those of other scopes away, and jobs
    are cancelled as tasks, as is whatever `asyncio.timeout` ends.

    Raises:
        Exception: what it raised, unless this task was cancelled.
    """

    async def work() -> ResultT:
        return await step()

    task = asyncio.get_running_loop().create_task(work())
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
                task.exception()  # is asked for: the loop need not tell of it
            raise cancellation
        return task.result()
    finally:
        cancellation = None  # it holds this frame


def _expect_result(name: str, task: asyncio.Task[None]) -> None:
    """A task that has ended was not closed: a GeneratorExit in it is the code's own."""
    with only_exceptions(name):
        task.result()


def single_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error inside nested groups where there is but one: nobody handles a group of one with
    pleasure."""
    inner = list(group.exceptions)
    if len(inner) > 1:
        return group
    error = inner[0]
    if isinstance(error, BaseExceptionGroup):
        return single_error(cast("BaseExceptionGroup[BaseException]", error))
    return error


class TestSignal:
    """Something that a test waits for instead of time. Without `init`, `emit` does nothing."""

    __test__ = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: list[anyio.Event] | None = None
        self._seen = 0
        self._taken = 0

    def init(self) -> None:
        """Start counting, from nothing."""
        self._events = []
        self._seen = self._taken = 0

    def emit(self) -> None:
        """Say that it happened."""
        if self._events is None:
            return
        self._seen += 1
        for event in self._events:
            event.set()

    async def wait(self) -> None:
        """Wait until it has happened once more than it was waited for.

        Raises:
            TimeoutError: it did not happen within 30 s; the text has the signal's name.
        """
        if self._events is None:
            raise RuntimeError(f"signal {self._name!r} was not initialised by the test")
        with anyio.move_on_after(SIGNAL_TIMEOUT):
            while self._seen <= self._taken:
                event = anyio.Event()
                self._events.append(event)
                try:
                    await event.wait()
                finally:
                    self._events.remove(event)
            self._taken += 1
            return
        raise TimeoutError(f"signal {self._name!r} did not come within {SIGNAL_TIMEOUT:g} s")
