"""BackgroundTask: an asyncio task that its owner can start and cancel many times."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BACKGROUND_TASK_END_TIMEOUT = 2.0
"""The longest time for which `close` waits until the task has ended, in seconds."""


class BackgroundTask:
    """A task that its owner can start and cancel many times. After `cancel`, the owner may call
    `start` at once: the new task runs while the cancelled task still cleans up."""

    def __init__(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Create the task object without starting the task.

        Args:
            run: the code of the task.
            on_failure: called with the error if `run` raises one, or with a ClientStateError if
                code other than the owner cancels the task, even before its first step.
        """
        self._name, self._run, self._on_failure = name, run, on_failure
        self._task: asyncio.Task[None] | None = None
        self._ending_tasks: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        """Whether the task runs, and was not cancelled."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Start the task if it is not running. The task does not inherit the caller's context
        variables."""
        if not self.is_running:
            self._task = asyncio.get_running_loop().create_task(
                self._run_task_code(), name=f"riverpy {self._name}", context=contextvars.Context()
            )
            self._task.add_done_callback(self._report_failure)

    async def _run_task_code(self) -> None:
        await self._run()

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task is not self._task:  # its owner has cancelled it
            return
        if task.cancelled():
            self._on_failure(ClientStateError(f"a task of the client was cancelled: {self._name}"))
        elif isinstance(error, Exception):
            self._on_failure(error)

    def cancel(self) -> None:
        """Cancel the task, if it runs."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            self._ending_tasks.add(task)
            task.add_done_callback(self._ending_tasks.discard)

    async def close(self) -> None:
        """Cancel the task. Wait up to `BACKGROUND_TASK_END_TIMEOUT` seconds until it has ended."""
        self.cancel()
        if self._ending_tasks:
            await asyncio.wait(self._ending_tasks, timeout=BACKGROUND_TASK_END_TIMEOUT)
