"""CancelAtLeaseEnd: cancels a block of code when the block's lease ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from riverpy._leases.lease import Lease


class CancelAtLeaseEnd:
    """Cancels the task in its block when a lease ends.

    The task is cancelled once, as asyncio does it, so that the block can still await its cleanup,
    such as the end of a transaction. A cancel scope would cancel each of these awaits.

    Raises:
        LeaseLostError: the lease ended before the block.
    """

    def __init__(self, lease: Lease) -> None:
        """Watch the lease under which the block runs."""
        self._lease = lease
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._is_sent = False

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        self._cancelling = 0 if task is None else task.cancelling()
        loop = asyncio.get_running_loop()
        # Cancel later: if the block itself ends the lease, it may leave before the next await.
        self._lease.when_ended(lambda: loop.call_soon(self._cancel))

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_sent = True
            self._task.cancel(f"lease {self._lease.name!r} has ended")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if task is not None and self._is_sent:
            is_ours = task.uncancel() <= self._cancelling  # other code has not cancelled the task
            if is_ours and isinstance(exc, asyncio.CancelledError):
                raise self._lease.lost_error() from exc
        if exc is None and self._lease.cause is not None:
            raise self._lease.lost_error()
