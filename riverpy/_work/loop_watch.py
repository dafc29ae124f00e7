"""EventLoopWatch: detects that the event loop is blocked, and names the job that blocks it.

A job that computes or waits without `await` blocks everything in its process: other jobs, the
heartbeat, the leases. The blocked event loop cannot log this, so a thread checks the event loop.
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
from riverpy._work.failure import FILES_THAT_CALL_JOB_CODE
from riverpy.context import running_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.running_attempts import RunningAttempts
    from riverpy.job import Job

LOOP_CHECK_INTERVAL = 0.5
"""Seconds between two timestamps that the event loop records. The thread that checks the
timestamps uses the same interval."""
LOOP_BLOCKED_THRESHOLD = 1.0
"""If a timestamp is late by more than this many seconds, the event loop counts as blocked."""
LOGGED_CODE_POSITIONS_MAX = 4
"""The maximum number of code positions in a log event, starting with the innermost."""
_FILES_AROUND_JOB_CODE = FILES_THAT_CALL_JOB_CODE | {
    asyncio.events.__file__,
    asyncio.runners.__file__,
}
"""The files of riverpy and Python that call the code of a job. The logged code positions of
a job end before the frames of these files."""


class EventLoopWatch:
    """Watches the event loop in which `run` runs. It logs once when the event loop is blocked.
    Afterwards it logs how long the event loop was blocked."""

    name = "loop watch"

    def __init__(self, running: RunningAttempts, record_lag: Callable[[float], None]) -> None:
        """`running` contains the jobs that may block the event loop. `record_lag` is called with
        the delay of each timestamp, in seconds."""
        self._running_attempts, self._record_lag = running, record_lag
        self._last_loop_timestamp = 0.0
        """The last timestamp that the event loop recorded, in monotonic seconds."""
        self._last_warning_timestamp = 0.0
        """The value of `_last_loop_timestamp` when a blocked event loop was last logged."""
        self._blocking_job_fields: dict[str, object] = {}
        self._log = get_logger()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Watch until stopped."""
        self._last_loop_timestamp = time.monotonic()
        ended = threading.Event()
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(
            target=self._check_loop_in_thread,
            args=(loop, thread_id, ended),
            name="riverpy loop watch",
            daemon=True,
        ).start()
        task_status.started()
        try:
            while True:
                await anyio.sleep(LOOP_CHECK_INTERVAL)
                self._record_loop_timestamp()
        finally:
            ended.set()

    def _record_loop_timestamp(self) -> None:
        """Record a timestamp in the event loop. If the event loop was blocked, log for how long.
        The thread cannot log this, because the thread may have been blocked too."""
        now = time.monotonic()
        blocked = now - self._last_loop_timestamp - LOOP_CHECK_INTERVAL
        self._last_loop_timestamp = now
        self._record_lag(max(blocked, 0.0))
        if blocked > LOOP_BLOCKED_THRESHOLD:
            self._log.warning(
                EVENT_LOOP_RESUMED, seconds=round(blocked, 3), **self._blocking_job_fields
            )
        self._blocking_job_fields = {}

    def _check_loop_in_thread(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, watch_ended: threading.Event
    ) -> None:
        """Check in a thread whether the event loop is blocked.

        If the thread itself was late, and the process used little processor time, the whole process
        was suspended. Then nothing is logged.
        """
        checked_at, used = time.monotonic(), time.process_time()
        while not watch_ended.wait(LOOP_CHECK_INTERVAL):
            now, use = time.monotonic(), time.process_time()
            waited, used_time = now - checked_at, use - used
            checked_at, used = now, use
            was_suspended = (
                waited > LOOP_CHECK_INTERVAL + LOOP_BLOCKED_THRESHOLD and used_time < waited / 2
            )
            timestamp = self._last_loop_timestamp
            blocked = now - timestamp - LOOP_CHECK_INTERVAL
            is_logged = timestamp == self._last_warning_timestamp
            if blocked > LOOP_BLOCKED_THRESHOLD and not was_suspended and not is_logged:
                blocking_job = self._describe_blocking_job(loop, thread_id)
                # A new timestamp: the loop runs again, so `blocking_job` may be another job.
                if timestamp != self._last_loop_timestamp:
                    continue
                self._last_warning_timestamp, self._blocking_job_fields = timestamp, blocking_job
                self._log.warning(
                    EVENT_LOOP_BLOCKED,
                    effect="nothing else runs in this process",
                    seconds=round(blocked, 3),
                    **blocking_job,
                )

    def _describe_blocking_job(
        self, loop: asyncio.AbstractEventLoop, thread_id: int
    ) -> dict[str, object]:
        """Return log fields that describe the job that runs in the event loop now, and its code
        position."""
        found: dict[str, object] = {}
        job = self._find_job_of_task(asyncio.current_task(loop))
        if job is not None:
            found = {"kind": job.kind, "job_id": job.id, "queue": job.queue}
        frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] (its documented name)
        positions = _list_code_positions(frames.get(thread_id))
        return found | {"at": " < ".join(positions)}

    def _find_job_of_task(self, task: asyncio.Task[Any] | None) -> Job[Any] | None:
        """Return the job whose attempt runs in the task, or the job whose code has started the
        task. Before Python 3.12, a task that a job's code has started cannot be recognized, so None
        is returned."""
        if task is None:  # the event loop runs a callback, not a task
            return None
        for attempt in self._running_attempts:
            if attempt.task is task:
                return attempt
        context = getattr(task, "get_context", None)
        return None if context is None else context().get(running_job)


def _list_code_positions(frame: FrameType | None) -> list[str]:
    """Return the code positions of the job, the innermost first."""
    positions: list[str] = []
    while frame is not None and frame.f_code.co_filename not in _FILES_AROUND_JOB_CODE:
        code = frame.f_code
        positions.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    if len(positions) > LOGGED_CODE_POSITIONS_MAX:
        positions[LOGGED_CODE_POSITIONS_MAX:] = ["…"]
    return positions
