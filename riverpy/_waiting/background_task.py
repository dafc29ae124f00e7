"""BackgroundTask: an asyncio task that its owner can start and cancel many times."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BACKGROUND_TASK_END_TIMEOUT = 2.0
"""Seconds that `close` waits for the end of the task."""


class BackgroundTask:
    """A task that its owner starts and cancels, possibly many times. Only one runs at a time, but a
    cancelled task may still clean up while the next one runs."""

    def __init__(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """`run` is the code of the task. It must catch its own errors."""
        self._name, self._run = name, run
        self._task: asyncio.Task[None] | None = None
        self._ending_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        """Whether the task runs, and was not cancelled."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start the task, unless it runs. It gets none of the caller's context variables."""
        if not self.is_running:
            self._task = asyncio.get_running_loop().create_task(
                self._await_run(), name=f"riverpy {self._name}", context=contextvars.Context()
            )

    async def _await_run(self) -> None:
        await self._run()

    def cancel(self) -> None:
        """Cancel the task, if it runs."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            self._ending_tasks.add(task)
            task.add_done_callback(self._ending_tasks.discard)

    async def close(self) -> None:
        """Cancel the task, and wait until it has ended, for a limited time."""
        self.cancel()
        if self._ending_tasks:
            await asyncio.wait(self._ending_tasks, timeout=BACKGROUND_TASK_END_TIMEOUT)
