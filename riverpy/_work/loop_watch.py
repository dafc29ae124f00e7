"""LoopWatch: detects that the event loop is blocked, and names the job that blocks it.

A job that computes or waits without `await` blocks everything in its process: other jobs, the
heartbeat, the lease. The blocked loop cannot log this, so a thread checks whether it still runs.
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
"""Seconds between two turns of the watch in the loop, and between two checks of the thread."""
BLOCKED_AFTER = 1.0
"""Seconds that a turn may be late before the loop counts as blocked."""
FRAMES_MAX = 4
"""Code positions that are logged, starting with the innermost."""
_OUTER_FILES = OWN_FILES | {asyncio.events.__file__, asyncio.runners.__file__}
"""The files around the code of a job."""


class LoopWatch:
    """Watches the loop in which it runs. It logs once that the loop is blocked, and once for how
    long it was."""

    name = "loop watch"

    def __init__(self, running: RunningAttempts, record_lag: Callable[[float], None]) -> None:
        """Make it.

        Args:
            running: the jobs that may block the loop.
            record_lag: called at each turn with the seconds that it is late.
        """
        self._running, self._record_lag = running, record_lag
        self._turned = 0.0
        """The time of the last turn; monotonic seconds."""
        self._logged_turn = 0.0
        """The turn before the last blocking that was logged."""
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
        """Record a turn of the loop. The end of a blocking is logged here, since the thread may not
        have run either."""
        now = time.monotonic()
        blocked = now - self._turned - CHECK_INTERVAL
        self._turned = now
        self._record_lag(max(blocked, 0.0))
        if blocked > BLOCKED_AFTER:
            self._log.warning(EVENT_LOOP_RESUMED, seconds=round(blocked, 3), **self._blocking_job)
        self._blocking_job = {}

    def _watch(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, ended: threading.Event
    ) -> None:
        """Check the loop, in a thread.

        If the whole process was frozen, it used no processor time, and nothing is logged. If C code
        held the interpreter lock, the process used its processor.
        """
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
                if turned != self._turned:  # the loop runs again, so this was not the reason
                    continue
                self._logged_turn, self._blocking_job = turned, blocking_job
                self._log.warning(
                    EVENT_LOOP_BLOCKED,
                    effect="nothing else runs in this process",
                    seconds=round(blocked, 3),
                    **blocking_job,
                )

    def _describe_loop(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> dict[str, object]:
        """Return what runs in the loop now: the job and its code position."""
        found: dict[str, object] = {}
        job = self._job(asyncio.current_task(loop))
        if job is not None:
            found = {"kind": job.kind, "job_id": job.id, "queue": job.queue}
        frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] (its documented name)
        places = _places(frames.get(thread_id))
        return found | {"at": " < ".join(places)}

    def _job(self, task: asyncio.Task[Any] | None) -> Job[Any] | None:
        """Return the job of a task: the job's own task or, from Python 3.12 on, a task that the job
        made."""
        if task is None:  # a callback runs
            return None
        for attempt in self._running:
            if attempt.task is task:
                return attempt
        context = getattr(task, "get_context", None)
        return None if context is None else context().get(running_job)


def _places(frame: FrameType | None) -> list[str]:
    """Return the code positions of the job, the innermost first."""
    places: list[str] = []
    while frame is not None and frame.f_code.co_filename not in _OUTER_FILES:
        code = frame.f_code
        places.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    if len(places) > FRAMES_MAX:
        places[FRAMES_MAX:] = ["…"]
    return places
