"""LoopWatch: sees that the event loop is blocked, and tells which job does it.

A job that computes or waits without `await` stops all else in its process: other jobs, signs of
life, the lease. The loop cannot tell of that itself, so a thread looks whether it still turns.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._log import get_logger
from riverpy._log_events import EVENT_LOOP_BLOCKED, EVENT_LOOP_RESUMED
from riverpy._work.failure import OWN_FILES
from riverpy.context import running_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.job import Job

CHECK_INTERVAL = 0.5
"""Seconds between two signs of the loop, and between two looks of the thread."""
BLOCKED_AFTER = 1.0
"""Seconds that a sign may be late until the loop counts as blocked."""
FRAMES_MAX = 4
"""Places in the code that are named, from the innermost on."""
_OUTER_FILES = OWN_FILES | {asyncio.events.__file__, asyncio.runners.__file__}
"""What stands around a job's code."""


class LoopWatch:
    """Watches the loop that it runs in. It logs once when the loop is blocked, and once, with the
    length, when it runs again."""

    name = "loop watch"

    def __init__(self, running: RunningAttempts, turned: Callable[[float], None]) -> None:
        """Make it.

        Args:
            running: whose jobs may be what blocks the loop.
            turned: told at each turn how many seconds late it is.
        """
        self._running, self._late = running, turned
        self._turned = 0.0
        """When the loop gave its last sign; monotonic seconds."""
        self._logged_turn = 0.0
        """The last sign before the stall that the log has a line about."""
        self._blocking_job: dict[str, object] = {}
        self._log = get_logger()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Watch until stopped."""
        self._turned = time.monotonic()
        ended = threading.Event()
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(
            target=self._watch,
            args=(loop, thread_id, ended),
            name="riverpy loop watch",
            daemon=True,
        ).start()
        task_status.started()
        try:
            while True:
                await anyio.sleep(CHECK_INTERVAL)
                self._turn()
        finally:
            ended.set()

    def _turn(self) -> None:
        """The loop runs. This is told from here: the thread may not have run meanwhile either."""
        now = time.monotonic()
        blocked = now - self._turned - CHECK_INTERVAL
        self._turned = now
        self._late(max(blocked, 0.0))
        if blocked > BLOCKED_AFTER:
            self._log.warning(EVENT_LOOP_RESUMED, seconds=round(blocked, 3), **self._blocking_job)
        self._blocking_job = {}

    def _watch(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, ended: threading.Event
    ) -> None:
        """The thread. A process that stood still as a whole, as when it is frozen, has nobody to
        blame; one in which C code kept the interpreter for itself has used its processor."""
        checked_at, used = time.monotonic(), time.process_time()
        while not ended.wait(CHECK_INTERVAL):
            now, use = time.monotonic(), time.process_time()
            slept, worked = now - checked_at, use - used
            checked_at, used = now, use
            stood_still = slept > CHECK_INTERVAL + BLOCKED_AFTER and worked < slept / 2
            turned = self._turned
            blocked = now - turned - CHECK_INTERVAL
            if blocked > BLOCKED_AFTER and not stood_still and turned != self._logged_turn:
                blocking_job = self._describe_loop(loop, thread_id)
                if turned != self._turned:  # it was not that
                    continue
                self._logged_turn, self._blocking_job = turned, blocking_job
                self._log.warning(
                    EVENT_LOOP_BLOCKED,
                    effect="nothing else runs in this process",
                    seconds=round(blocked, 3),
                    **blocking_job,
                )

    def _describe_loop(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> dict[str, object]:
        """What runs in the loop now: the job, and where its code is."""
        found: dict[str, object] = {}
        job = self._job(asyncio.current_task(loop))
        if job is not None:
            found = {"kind": job.kind, "job_id": job.id, "queue": job.queue}
        frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] (its documented name)
        places = _places(frames.get(thread_id))
        return found | {"at": " < ".join(places)}

    def _job(self, task: asyncio.Task[Any] | None) -> Job[Any] | None:
        """The job that the task is of: its own task or, where Python tells (from 3.12 on), one that
        it has made."""
        if task is None:  # a callback
            return None
        for attempt in self._running:
            if attempt.task is task:
                return attempt
        context = getattr(task, "get_context", None)
        return None if context is None else context().get(running_job)


def _places(frame: FrameType | None) -> list[str]:
    """Where the code is, the innermost place first, as far as it is the job's."""
    places: list[str] = []
    while frame is not None and frame.f_code.co_filename not in _OUTER_FILES:
        code = frame.f_code
        places.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    if len(places) > FRAMES_MAX:
        places[FRAMES_MAX:] = ["…"]
    return places
