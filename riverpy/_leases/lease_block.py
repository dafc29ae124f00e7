"""Blocks of code that run under leases: each is ended when its lease is over."""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from riverpy._log_events import BLOCK_RAN_PAST_ITS_LEASE

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from riverpy._clock import Timer
    from riverpy._leases.lease import Lease

REPORT_INTERVAL = 10.0
"""Seconds between two warnings about a block that goes on after its lease."""


class Blocks:
    """Those of one process, with a report of what does not end."""

    def __init__(self, grace: float, timer: Timer, log: Any) -> None:
        """Make it.

        Args:
            grace: seconds that a block may take to end.
            timer: what they are measured by.
            log: where it is told.
        """
        self._grace, self._timer, self._log = grace, timer, log
        self._running: dict[Lease, tuple[float, float]] = {}
        """When the lease of each was over, and when to tell that it goes on."""

    @contextmanager
    def running(self, lease: Lease) -> Generator[None]:
        """Run the block under a lease, and cancel it when that is over.

        Raises:
            LeaseLostError: it was over before the block had ended.
        """
        self._running[lease] = (math.inf, math.inf)
        lease.when_over(lambda: self._expect_end(lease))
        try:
            with CancelWhenOver(lease):
                yield
            if lease.cause is not None:
                raise lease.lost_error()
        finally:
            del self._running[lease]

    def _expect_end(self, lease: Lease) -> None:
        if lease in self._running:
            now = self._timer.boottime()
            self._running[lease] = now, now + self._grace

    def tell(self) -> None:
        """Say of each block that has not ended in time that it goes on."""
        now = self._timer.boottime()
        for lease, (over_at, due) in self._running.items():
            if now >= due:
                self._running[lease] = over_at, now + REPORT_INTERVAL
                self._log.warning(
                    BLOCK_RAN_PAST_ITS_LEASE,
                    effect="its fenced transactions fail, and this process does not acquire the "
                    "lease until the block ends",
                    lease=lease.name,
                    epoch=lease.epoch,
                    seconds=round(now - over_at, 1),
                )


class CancelWhenOver:
    """Cancels the task that is in its block when a lease is over: once, as asyncio does, so that
    the block can await the end of what it has open, as of a transaction. A cancel scope would go on
    cancelling.

    Raises:
        LeaseLostError: the block was cancelled for that.
    """

    def __init__(self, lease: Lease) -> None:
        """Make it, of the lease that the block runs under."""
        self._lease = lease
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._is_sent = False

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        self._cancelling = 0 if task is None else task.cancelling()
        loop = asyncio.get_running_loop()
        # Later, when the task waits: it may be the one that ends the lease, and leaves the block.
        self._lease.when_over(lambda: loop.call_soon(self._cancel))

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_sent = True
            self._task.cancel(f"lease {self._lease.name!r} is over")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is None or not self._is_sent:
            return
        is_ours = task.uncancel() <= self._cancelling  # nobody else has cancelled it besides
        if is_ours and isinstance(exc, asyncio.CancelledError):
            raise self._lease.lost_error() from exc
