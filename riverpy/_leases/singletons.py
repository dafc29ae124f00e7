"""SingletonRunner: stands by for the lease of one singleton, and runs its function while that is
held.

A tenure is one plain task, held strongly here: a task group could not let go of code that ignores
its cancellation.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio

from riverpy._clock import Backoff
from riverpy._leases.validity import LeaseTiming
from riverpy._lifecycle import StopCause, StopScope, cancelled_once, only_exceptions
from riverpy._log import get_logger
from riverpy._log_events import (
    SINGLETON_ENDED,
    SINGLETON_FAILED,
    SINGLETON_FAILED_FOR_GOOD,
    SINGLETON_FAILED_WHILE_STOPPING,
    SINGLETON_LOST_ITS_LEASE,
    SINGLETON_RAN_PAST_ITS_LEASE,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.errors import FencedOutError
from riverpy.stats import SingletonStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._leases.client_leases import ClientLeases
    from riverpy._leases.lease import Lease
    from riverpy._leases.manager import LeaseManagerService
    from riverpy.config import Config
    from riverpy.singletons import Singleton, Singletons

RETRY_FIRST = timedelta(seconds=1)
RETRY_MOST = timedelta(seconds=30)
"""The delay after a failure doubles up to this; others may run it meanwhile."""
STEADY = 60.0
"""Seconds after which a function has proven itself: a later failure is a first one."""
REPORT_INTERVAL = 10.0
"""Seconds between two warnings about a function that goes on after its lease."""


class SingletonRunner:
    """Stands by for one singleton, again and again, as a service of a run."""

    def __init__(
        self,
        singleton: Singleton,
        keeper: LeaseManagerService,
        *,
        timing: LeaseTiming,
        timer: Timer,
    ) -> None:
        """Make it; nothing runs.

        Args:
            singleton: what runs.
            keeper: of the leases of this process.
            timing: of these.
            timer: by which it measures and waits.
        """
        self.name = f"singleton {singleton.name}"
        self.singleton = singleton
        self._keeper, self._timing, self._timer = keeper, timing, timer
        self._backoff = Backoff(RETRY_FIRST, RETRY_MOST)
        self._tenure: _Tenure | None = None
        self._terms = self._failures = self._losses = 0
        self._waited: float | None = None
        self._log = get_logger(singleton=singleton.name)

    @property
    def stats(self) -> SingletonStats:
        """How it stands."""
        tenure = self._tenure
        lease = None if tenure is None or tenure.ended.is_set() else tenure.lease
        return SingletonStats(
            held=lease is not None and lease.is_held,
            running=lease is not None,
            epoch=None if lease is None else lease.epoch,
            terms=self._terms,
            failures=self._failures,
            losses=self._losses,
            waited=self._waited,
        )

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Stand by and run until stopped, or until the function has had its last run here."""
        task_status.started()
        while True:
            lease = await self._keeper.acquire(self.singleton.name)
            self._terms += 1
            self._waited = lease.waited
            tenure = self._tenure = _Tenure(
                self.singleton, lease, self._keeper, timing=self._timing, timer=self._timer
            )
            tenure.start()
            try:
                await tenure.ended.wait()
            except BaseException:
                await self._stop(tenure, scope.cause or StopCause.CLIENT_STOP)
                raise
            if not await self._goes_on(tenure):
                return

    async def close(self, bound: float) -> bool:
        """Wait for at most `bound` seconds for a function that did not end when it was stopped;
        returns whether none runs."""
        tenure = self._tenure
        return tenure is None or await self._timer.wait(tenure.ended, bound)

    async def _stop(self, tenure: _Tenure, cause: StopCause) -> None:
        tenure.stop(cause)
        tenure.tell_failed()  # it may have failed just before
        with anyio.CancelScope(shield=True):
            await self._timer.wait(tenure.ended, self._timing.grace)

    async def _goes_on(self, tenure: _Tenure) -> bool:
        """After the end of a tenure that nobody stopped: whether to stand by again."""
        error, lease = tenure.error, tenure.lease
        if tenure.was_stopped or (tenure.was_lost and isinstance(error, FencedOutError)):
            self._losses += 1
            self._log.warning(SINGLETON_LOST_ITS_LEASE, epoch=lease.epoch)
            return True
        if error is None:
            self._log.info(SINGLETON_ENDED, epoch=lease.epoch)
            return False
        self._failures += 1
        if self.singleton.restart == "never":
            self._log.error(SINGLETON_FAILED_FOR_GOOD, **_account(error))
            return False
        if tenure.seconds >= STEADY:
            self._backoff.reset()
        delay = self._backoff.next()
        self._log.error(
            SINGLETON_FAILED,
            seconds=round(delay, 1),
            **_account(error),
        )
        await self._timer.sleep(delay)
        return True


class SingletonRunners:
    """The runners of one run's singletons, but of those that this process is no candidate for."""

    def __init__(
        self, singletons: Singletons, leases: ClientLeases, config: Config, timer: Timer
    ) -> None:
        """Make it of the client's parts; nothing is connected."""
        self._singletons, self._leases = singletons, leases
        self._timing, self._timer = LeaseTiming.of(config), timer
        self._runners: list[SingletonRunner] = []

    def __iter__(self) -> Iterator[SingletonRunner]:
        return iter(self._runners)

    @property
    def stats(self) -> dict[str, SingletonStats]:
        """How they stand, by name."""
        return {runner.singleton.name: runner.stats for runner in self._runners}

    async def prepare(self) -> None:
        """Open the client's leases, if there is anything to run.

        Raises:
            SchemaMissingError: line `riverpy` is not migrated; the text has the command.
            Exception: one of DATABASE_ERRORS.
        """
        candidates = [one for one in self._singletons if one.candidate]
        if candidates:
            keeper = await self._leases.open()
            self._runners = [
                SingletonRunner(one, keeper, timing=self._timing, timer=self._timer)
                for one in candidates
            ]

    async def close(self, bound: float) -> tuple[str, ...]:
        """Wait for at most `bound` seconds for functions that did not end when they were stopped;
        returns the names of those that go on."""
        until = self._timer.boottime() + bound
        left = [
            runner.singleton.name
            for runner in self._runners
            if not await runner.close(max(until - self._timer.boottime(), 0.0))
        ]
        return tuple(left)


class _Tenure:
    """One run of the function, under one term of the lease."""

    def __init__(
        self,
        singleton: Singleton,
        lease: Lease,
        keeper: LeaseManagerService,
        *,
        timing: LeaseTiming,
        timer: Timer,
    ) -> None:
        self.lease = lease
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._untold: Exception | None = None
        self.was_lost = False
        """Whether the lease was not held any more when the function ended."""
        self.seconds = 0.0
        self._singleton, self._keeper = singleton, keeper
        self._timing, self._timer = timing, timer
        self._scope = StopScope()
        self._over = asyncio.Event()
        self._log = get_logger(singleton=singleton.name, epoch=lease.epoch)
        self._task: asyncio.Task[None] | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether the function was told to end."""
        return self._scope.cause is not None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"riverpy singleton {self._singleton.name}"
        )

    def stop(self, cause: StopCause) -> None:
        """Tell the function to end: a coroutine is cancelled, and to a thread the lease is over."""
        self.lease.end("its singleton was stopped", cause=cause)
        self._scope.stop(cause)

    def tell_failed(self) -> None:
        """Say once what it raised, if it has: where it was stopped, by a lost lease or with the
        client, nobody else does."""
        error, self._untold = self._untold, None
        if error is not None and not isinstance(error, FencedOutError):
            self._log.error(SINGLETON_FAILED_WHILE_STOPPING, **_account(error))

    async def _run(self) -> None:
        began_at = self._timer.boottime()
        self.lease.when_over(self._over.set)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                with self._scope:
                    await self._call()
                tasks.cancel_scope.cancel()
        finally:
            self.seconds = self._timer.boottime() - began_at
            self.was_lost = not self.lease.is_held
            if self.was_stopped:
                self.tell_failed()
            with anyio.CancelScope(shield=True):
                await self._keeper.release(self.lease)
            self.ended.set()

    async def _call(self) -> None:
        singleton = self._singleton
        name = f"singleton {singleton.name!r}"
        try:
            if singleton.is_blocking:
                await _in_thread(name, self._call_plain, self._ended_in_thread)
            else:
                await cancelled_once(name, self._call_coroutine)
        except Exception as error:
            self.error = self._untold = error

    def _call_plain(self) -> None:
        function = cast("Callable[[Lease], object]", self._singleton.fn)
        self._singleton.expect_ended(function(self.lease))

    def _ended_in_thread(self) -> None:
        """Also where the event loop has ended before, and nobody else notes it any more."""
        self.lease.is_used = False

    async def _call_coroutine(self) -> None:
        function = cast("Callable[[Lease], Awaitable[object]]", self._singleton.fn)
        self._singleton.expect_ended(await function(self.lease))

    async def _watch(self) -> None:
        """Stop the function when the lease is over, and tell of one that goes on."""
        await self._over.wait()
        self.stop(self.lease.cause or StopCause.LEASE_LOST)
        stopped_at = self._timer.boottime()
        await self._timer.sleep(self._timing.grace)
        while True:
            self._log.warning(
                SINGLETON_RAN_PAST_ITS_LEASE,
                effect="its fenced transactions fail, and it does not start here again until it "
                "ends",
                seconds=round(self._timer.boottime() - stopped_at, 1),
            )
            await self._timer.sleep(REPORT_INTERVAL)


async def _in_thread(
    name: str, function: Callable[[], None], has_ended: Callable[[], None]
) -> None:
    """Run it in a thread, to its end, and call `has_ended` there: a thread cannot be stopped. It
    keeps no process alive.

    Raises:
        Exception: what it raised.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    context = contextvars.copy_context()
    errors: list[Exception] = []

    def work() -> None:
        try:
            with only_exceptions(name):
                context.run(function)
        except Exception as error:
            errors.append(error)
        has_ended()
        with suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, name=f"riverpy {name}", daemon=True).start()
    with anyio.CancelScope(shield=True):
        await ended.wait()
    if errors:
        raise errors.pop()


def _account(error: Exception) -> dict[str, Any]:
    """What a log line says of an error: a fault with its traceback, an outage without."""
    account: dict[str, Any] = {"error": describe(error)}
    if not isinstance(error, DATABASE_ERRORS):
        account["exc_info"] = error
    return account
