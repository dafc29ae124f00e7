"""CancelWhenOver: ends the block that runs under a lease when that is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from riverpy._lease.lease import Lease


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
