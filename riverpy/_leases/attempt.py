"""AcquireAttempt: one attempt to acquire a lease. The attempt is finished even if the caller is
cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._postgres.leases import LeaseAnswer

CANCELLED_ATTEMPT_TIMEOUT = 1.0
"""The timeout of an attempt after the caller was cancelled, in seconds."""


class AcquireAttempt:
    """Runs the statement of the attempt in a separate task. A cancelled statement may still have
    acquired the lease, and its answer is needed to release the lease."""

    def __init__(self, ask: Callable[[], Awaitable[LeaseAnswer | None]]) -> None:
        """Create the attempt. `ask` runs the statement that acquires the lease."""
        self.answer: LeaseAnswer | None = None
        """The answer to the attempt. None: no answer yet, or another session acquired the lease at
        the same time."""
        self._ask = ask
        self._error: Exception | None = None
        self._scope = anyio.CancelScope(shield=True)
        self._ended = asyncio.Event()

    @property
    def granted(self) -> LeaseAnswer | None:
        """The answer, if the lease was acquired. Otherwise None."""
        return self.answer if self.answer is not None and self.answer.is_granted else None

    async def run(self) -> None:
        """Run the statement to its end. After `hurry`, the statement is cancelled when
        `CANCELLED_ATTEMPT_TIMEOUT` expires.

        Raises:
            Exception: one of DATABASE_ERRORS; the result is unknown.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            try:
                await self._ended.wait()
            finally:
                self.hurry()
        if self._error is not None:
            raise self._error

    def hurry(self) -> None:
        """Start the timeout `CANCELLED_ATTEMPT_TIMEOUT`, because no caller waits for the answer."""
        self._scope.deadline = anyio.current_time() + CANCELLED_ATTEMPT_TIMEOUT

    async def _run(self) -> None:
        with self._scope:
            try:
                self.answer = await self._ask()
            except Exception as error:  # `run` raises it
                self._error = error
        if self._scope.cancelled_caught:
            self._error = TimeoutError("the leases were closed before the answer came")
        self._ended.set()
