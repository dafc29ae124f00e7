"""LeaseTask: runs work under one lease, and releases the lease after the work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._lifecycle import StopCause, StopScope
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.lease import Lease


class LeaseTask:
    """Runs work under a lease, stops the work when the lease ends, and then releases the lease.

    The work runs in a plain asyncio task, because a task group would wait for work that ignores its
    cancellation. Each term (from the acquisition of a lease to its end) has its own objects, so
    that work of an earlier term cannot affect work of a later one.
    """

    def __init__(
        self,
        lease: Lease,
        engine: LeaseEngine,
        work: Callable[[StopScope], Awaitable[None]],
        *,
        loss_cause: StopCause = StopCause.LEASE_LOST,
    ) -> None:
        """Create the task for a lease that is held. `work` must stop when the `StopScope` that it
        receives is stopped. If the lease is lost, the scope is stopped with the cause
        `loss_cause`."""
        self.lease = lease
        self.error: Exception | None = None
        """The error that the work raised."""
        self.was_stopped = False
        """Whether a stop was requested before the work ended."""
        self.was_lease_lost = False
        """Whether the lease was not held any more when the work ended."""
        self.work_seconds = 0.0
        """The duration of the work, in seconds."""
        self.work_ended, self.lease_released = asyncio.Event(), asyncio.Event()
        self._engine, self._work, self._loss_cause = engine, work, loss_cause
        self._work_scope = StopScope()
        self._task: asyncio.Task[None] | None = None

    def start(self, task_name: str) -> None:
        """Start the work in a new task. The task gets the name `riverpy <task_name>`."""
        self._task = asyncio.get_running_loop().create_task(
            self._run_work(), name=f"riverpy {task_name}"
        )

    def stop_work(self, cause: StopCause) -> None:
        """Stop the work, and end the lease. This does not wait for the work."""
        self._work_scope.stop(cause)
        self.lease.end("this client is stopping", cause=cause)

    async def stop_and_wait(self, cause: StopCause) -> bool:
        """Stop the work, and wait until it has ended, for at most the grace period of the lease.
        Return whether the work has ended and the lease is released."""
        self.stop_work(cause)
        engine = self._engine
        with anyio.CancelScope(shield=True):
            if not await engine.timer.wait_for_event(self.work_ended, engine.timing.grace_seconds):
                return False
            await self.lease_released.wait()  # this wait is short: the release has a timeout
        return True

    def _stop_work_after_lease_end(self) -> None:
        is_stop = self.lease.cause is StopCause.CLIENT_STOP
        self._work_scope.stop(StopCause.CLIENT_STOP if is_stop else self._loss_cause)

    async def _run_work(self) -> None:
        timer = self._engine.timer
        began_at = timer.seconds_since_boot()
        self.lease.call_at_end(self._stop_work_after_lease_end)
        try:
            with self._work_scope:
                await self._work(self._work_scope)
        except Exception as error:
            self.error = error
            self._engine.events.publish_work_failure(self.lease, error)
        finally:
            self.work_seconds = timer.seconds_since_boot() - began_at
            self.was_stopped = self._work_scope.cause is not None
            self.was_lease_lost = not self.lease.is_held
            self.work_ended.set()
            with anyio.CancelScope(shield=True):
                await self._engine.release(self.lease)
            self.lease_released.set()


def error_log_keys(error: BaseException) -> dict[str, Any]:
    """Return the log keys for an error that work under a lease raised. The keys include a
    traceback, except for an outage of the database and for a lost lease."""
    keys: dict[str, Any] = {"error": describe_error(error)}
    if not isinstance(error, (*DATABASE_ERRORS, FencedOutError)):
        keys["exc_info"] = error
    return keys
