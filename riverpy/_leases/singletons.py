"""SingletonRunner: waits for the lease of one singleton, and runs the singleton's function while
the lease is held."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio

from riverpy._clock import Backoff
from riverpy._leases.lease import RELEASE_REQUESTED_REASON
from riverpy._leases.lease_task import LeaseTask, error_log_keys
from riverpy._lifecycle import StopCause, StopScope, await_in_separate_task, convert_base_exceptions
from riverpy._log import get_logger
from riverpy._log_events import (
    SINGLETON_ENDED,
    SINGLETON_FAILED,
    SINGLETON_FAILED_FOR_GOOD,
    SINGLETON_FAILED_WHILE_STOPPING,
    SINGLETON_HANDED_OVER,
    SINGLETON_LOST_ITS_LEASE,
)
from riverpy.errors import FencedOutError
from riverpy.events import LeaseUse
from riverpy.stats import SingletonStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._leases.client_leases import ClientLeaseEngine
    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.lease import Lease
    from riverpy._lifecycle import Service
    from riverpy.singletons import Singleton, SingletonRegistry

FUNCTION_RETRY_DELAY_MIN = timedelta(seconds=1)
FUNCTION_RETRY_DELAY_MAX = timedelta(seconds=30)
"""The longest delay before the function runs again after a failure. The first delay is
`FUNCTION_RETRY_DELAY_MIN`. During the delay, another process may run the function."""
FAILURE_COUNT_RESET_AFTER = 60.0
"""If the function ran for this number of seconds before it failed, the delay starts at
`FUNCTION_RETRY_DELAY_MIN` again."""


class SingletonRunner:
    """A service of a client that runs the function of one singleton each time that this process
    acquires the lease of the singleton."""

    def __init__(self, singleton: Singleton, engine: LeaseEngine) -> None:
        """Create the singleton runner. It starts no task."""
        self.name = f"singleton {singleton.name}"
        self.singleton = singleton
        self._engine = engine
        self._retry_backoff = Backoff(FUNCTION_RETRY_DELAY_MIN, FUNCTION_RETRY_DELAY_MAX)
        self._lease_task: LeaseTask | None = None
        self._term_count = self._failure_count = self._lease_loss_count = 0
        self._seconds_waited_for_lease: float | None = None
        self._log = get_logger(singleton=singleton.name)

    @property
    def stats(self) -> SingletonStats:
        """The state of the singleton in this client, and its counts since the client started."""
        task = self._lease_task
        lease = None if task is None or task.lease_released.is_set() else task.lease
        held = lease if lease is not None and lease.is_held else None
        return SingletonStats(
            held=held is not None,
            running=lease is not None,
            epoch=None if lease is None else lease.epoch,
            terms=self._term_count,
            failures=self._failure_count,
            losses=self._lease_loss_count,
            waited=self._seconds_waited_for_lease,
            standby=self._engine.is_standby_for(self.singleton.name),
            valid_for=None if held is None else held.valid_for,
            lag=None if held is None else held.lag,
        )

    @property
    def lease(self) -> Lease | None:
        """The lease under which the function runs now. None: the function does not run, or is
        stopping."""
        task = self._lease_task
        if task is None or task.work_ended.is_set() or not task.lease.is_held:
            return None
        return task.lease

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Wait for the lease, and run the function while the lease is held. Repeat this until the
        client stops this service. Return earlier if the function has returned, or has failed and
        its restart policy is `never`."""
        task_status.started()
        while True:
            lease = await self._engine.acquire(self.singleton.name, use=LeaseUse.SINGLETON)
            self._term_count += 1
            self._seconds_waited_for_lease = lease.waited
            task = self._lease_task = LeaseTask(
                lease, self._engine, partial(self._run_function, lease)
            )
            task.start(self.name)
            try:
                await task.lease_released.wait()
            except BaseException:
                if task.error is not None and not task.was_stopped:  # it failed before the stop
                    self._log_failure_at_stop(task.error)
                await task.stop_and_wait(scope.cause or StopCause.CLIENT_STOP)
                raise
            if not await self._log_end_and_wait_before_retry(task):
                return

    async def close(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds for a function that ignored its cancellation. Return
        True if the function does not run any more."""
        task = self._lease_task
        return task is None or await self._engine.timer.wait_for_event(task.lease_released, timeout)

    async def _run_function(self, lease: Lease, scope: StopScope) -> None:
        try:
            await self._call_in_thread_or_task(lease)
        except Exception as error:
            if scope.cause is not None:
                self._log_failure_at_stop(error)
            raise

    async def _call_in_thread_or_task(self, lease: Lease) -> None:
        singleton = self.singleton
        name, call = f"singleton {singleton.name!r}", partial(cast("Any", singleton.fn), lease)
        if singleton.runs_in_thread:
            result = await _run_in_thread(name, call, lease)
        else:
            result = await await_in_separate_task(name, call)
        singleton.check_not_awaitable(result)

    def _log_failure_at_stop(self, error: Exception) -> None:
        if not isinstance(error, FencedOutError):
            self._log.error(SINGLETON_FAILED_WHILE_STOPPING, **error_log_keys(error))

    async def _log_end_and_wait_before_retry(self, task: LeaseTask) -> bool:
        """Log how the function ended, and wait after a failure. Return whether this process must
        wait for the lease and run the function again."""
        error, lease = task.error, task.lease
        if task.was_stopped and lease.cause is StopCause.LEASE_HANDED_OVER:
            self._log.info(SINGLETON_HANDED_OVER, epoch=lease.epoch)
            return True
        if task.was_stopped or (task.was_lease_lost and isinstance(error, FencedOutError)):
            self._lease_loss_count += 1
            if lease.end_reason == RELEASE_REQUESTED_REASON:
                self._log.info(SINGLETON_LOST_ITS_LEASE, epoch=lease.epoch)
            else:
                self._log.warning(SINGLETON_LOST_ITS_LEASE, epoch=lease.epoch)
            return True
        if error is None:
            self._log.info(SINGLETON_ENDED, epoch=lease.epoch)
            return False
        self._failure_count += 1
        if self.singleton.restart_policy == "never":
            self._log.error(SINGLETON_FAILED_FOR_GOOD, **error_log_keys(error))
            return False
        if task.work_seconds >= FAILURE_COUNT_RESET_AFTER:
            self._retry_backoff.reset()
        delay = self._retry_backoff.next_delay()
        self._log.error(SINGLETON_FAILED, seconds=round(delay, 1), **error_log_keys(error))
        await self._engine.timer.sleep(delay)
        return True


class SingletonRunnerGroup:
    """The singleton runners of a client, from its start to its stop: one for each singleton with
    `candidate=True`."""

    def __init__(
        self,
        singletons: SingletonRegistry,
        leases: ClientLeaseEngine,
        timer: Timer,
        make_spreader: Callable[[Sequence[SingletonRunner], LeaseEngine], Service | None],
    ) -> None:
        """Create the group. This opens no connection. `make_spreader` returns the service that
        hands singletons over to other clients, or None if this client hands none over."""
        self._singletons, self._leases, self._timer = singletons, leases, timer
        self._make_spreader = make_spreader
        self._runners: list[SingletonRunner] = []
        self._spreader: Service | None = None

    def __iter__(self) -> Iterator[Service]:
        return iter(self._runners if self._spreader is None else [*self._runners, self._spreader])

    @property
    def stats(self) -> dict[str, SingletonStats]:
        """The state of each singleton, by name."""
        return {runner.singleton.name: runner.stats for runner in self._runners}

    async def create_runners(self) -> None:
        """Open the client's lease engine and create the runners, if there is a singleton to run.

        Raises:
            SchemaMissingError: the migration line `riverpy` is not applied. The error text contains
                the command that applies it.
            Exception: one of DATABASE_ERRORS.
        """
        candidates = [
            one for one in self._singletons.singletons_by_name.values() if one.is_candidate
        ]
        if candidates:
            engine = await self._leases.open()
            self._runners = [SingletonRunner(one, engine) for one in candidates]
            self._spreader = self._make_spreader(self._runners, engine)

    async def close(self, timeout: float) -> tuple[str, ...]:
        """Wait for at most `timeout` seconds for functions that ignored their cancellation. Return
        the names of the singletons whose functions still run."""
        until = self._timer.seconds_since_boot() + timeout
        return tuple(
            [
                runner.singleton.name
                for runner in self._runners
                if not await runner.close(max(until - self._timer.seconds_since_boot(), 0.0))
            ]
        )


async def _run_in_thread(name: str, function: Callable[[], object], lease: Lease) -> object:
    """Run a function in a thread, and wait for its end. Then mark the lease as not used any more.
    Python cannot stop a thread, so the function must end by itself. The thread is a daemon thread,
    so that it does not keep the process alive.

    Raises:
        Exception: what `function` raised.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    context = contextvars.copy_context()
    results: list[object] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            with convert_base_exceptions(name):
                results.append(context.run(function))
        except Exception as error:
            errors.append(error)
        lease.is_used = False  # also works if the event loop has ended
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name=f"riverpy {name}", daemon=True).start()
    with anyio.CancelScope(shield=True):
        await ended.wait()
    if errors:
        raise errors.pop()
    return results.pop()
