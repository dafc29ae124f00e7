"""ProcessSlot: keeps one worker process running, and starts the next one when it ends."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._clock import Backoff
from riverpy._error_text import format_error_with_type
from riverpy._log import get_logger
from riverpy._log_events import (
    WORKER_PROCESS_ENDED,
    WORKER_PROCESS_KILLED,
    WORKER_PROCESS_START_FAILED,
    WORKER_PROCESS_STARTED,
)
from riverpy._tools.processes.worker_process import WorkerProcess

if TYPE_CHECKING:
    from riverpy._tools.processes.worker_process import WorkerStartCommand

RESTART_DELAY_MIN, RESTART_DELAY_MAX = timedelta(milliseconds=500), timedelta(seconds=30)
RESTART_DELAY_RESET_AFTER = 60.0
"""If a process ran for at least this many seconds before it failed, the next restart delay is
`RESTART_DELAY_MIN` again."""
START_STATUS_POLL_INTERVAL = 0.1
"""Seconds between two requests for the status of a starting worker."""
WATCHDOG_POLLS_PER_TIMEOUT = 6
"""How many times the supervisor reads the status of a worker within one watchdog timeout."""
ABORT_TIMEOUT = 3.0
"""Seconds from SIGABRT until the worker is killed. In this time, the worker prints its
tracebacks."""


class RestartRules(NamedTuple):
    """What the supervisor does when a worker ends or makes no progress."""

    limit_exit_code: int
    """The exit code of a worker that ended because it reached one of its limits (`--max-jobs`,
    `--max-age` or `--max-rss`). The supervisor starts the next worker without a delay."""
    should_drain: bool
    """Whether the workers end when the queues are empty. If so, the supervisor does not replace a
    worker that ended with exit code 0."""
    watchdog_timeout: float
    """Seconds after which the supervisor kills and replaces a worker that no longer answers or that
    reports a stuck service; 0: no watchdog."""


class RestartCounts(NamedTuple):
    """The number of times that a process was replaced, for each reason."""

    limit: int = 0
    """The number of restarts after a process reached one of its limits."""
    failure: int = 0
    """The number of restarts after a process ended for another reason."""


class SharedProcessSlotState:
    """The state that all slots of a supervisor share."""

    def __init__(self) -> None:
        self.stop_requested, self.hard_stop_requested = anyio.Event(), anyio.Event()
        self.has_drained = False
        """Whether a worker has found the queues empty."""


class ProcessSlot:
    """Runs one worker process at a time. When the process ends, the slot starts the next one.

    A supervisor of n worker processes has n slots. `number` is the number of this slot, from 1.
    """

    def __init__(
        self,
        number: int,
        command: WorkerStartCommand,
        rules: RestartRules,
        shared: SharedProcessSlotState,
    ) -> None:
        self.number = number
        self._command, self._rules, self._shared = command, rules, shared
        self._backoff = Backoff(RESTART_DELAY_MIN, RESTART_DELAY_MAX)
        self._log = get_logger()
        self.process: WorkerProcess | None = None
        """The running process; None: no process runs now."""
        self._kill_reason: str | None = None
        """Why the supervisor killed the process; None: the supervisor did not kill it."""
        self.exit_code: int | None = None
        """The exit code of the last process that ended; 128 + n if signal n killed it. None: no
        process has ended."""
        self.restart_counts = RestartCounts()
        self.has_worked_event = anyio.Event()
        """Set when the client of a process of this slot reaches the state `working` for the first
        time."""

    @property
    def has_ended_cleanly(self) -> bool:
        """Whether the slot's last ended process stopped cleanly, i.e. had stored the results of all
        its jobs. True if no process has ended."""
        return self.exit_code in {None, 0, self._rules.limit_exit_code}

    def describe_missing_process(self) -> str:
        """Return why no process runs now."""
        if self.exit_code is None:
            return "not started yet: the first process starts alone"
        is_final = self._shared.stop_requested.is_set() or self._shared.has_drained
        effect = "" if is_final else ", and is started again"
        return f"ended with exit code {self.exit_code}{effect}"

    async def run(self, *, must_work_once: bool = False) -> None:
        """Run one process after another, until a stop is requested or the queues are drained. With
        `must_work_once`, return if the first process ends before its client has reached the state
        `working`."""
        while not self._shared.stop_requested.is_set():
            seconds = await self._run_process()
            delay: float | None = None
            if self.has_worked_event.is_set() or not must_work_once:
                delay = self._count_restart_and_choose_delay(seconds)
            self._log_process_end(delay)
            if delay is None:
                return
            with anyio.move_on_after(delay):
                await self._shared.stop_requested.wait()

    async def _run_process(self) -> float:
        """Run one process to its end. Return how long it ran, in seconds."""
        try:
            process = await WorkerProcess.start(self._command, self.number)
        except OSError as error:
            self.exit_code = 1
            self._log.error(
                WORKER_PROCESS_START_FAILED,
                error=format_error_with_type(error),
                process=self.number,
            )
            return 0.0
        self.process, self._kill_reason = process, None
        self._log.info(WORKER_PROCESS_STARTED, pid=process.pid, process=self.number)
        code = 0
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_start_and_progress, process)
                tasks.start_soon(self._stop_when_requested, process)
                code = await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            self.process = None
        is_stopping = self._shared.stop_requested.is_set()
        if code == -signal.SIGTERM and is_stopping and not process.has_reported_status:
            code = 0  # it was stopped before the worker could handle signals
        self.exit_code = 128 - code if code < 0 else code
        if self.exit_code == self._rules.limit_exit_code:
            self.has_worked_event.set()  # it may have worked between two polls
        if self.exit_code == 0 and self._rules.should_drain:
            self._shared.has_drained = True
        return process.age

    async def _watch_start_and_progress(self, process: WorkerProcess) -> None:
        """Poll the status of the worker until its client is `working`. If there is a watchdog,
        continue to poll, and kill the worker if its services or its event loop make no progress."""
        timeout, interval = self._rules.watchdog_timeout, START_STATUS_POLL_INTERVAL
        last_alive = anyio.current_time()
        while True:
            status = await process.read_status()
            if status is not None and status.state == "working":
                self.has_worked_event.set()
                if not timeout:
                    return
                interval = timeout / WATCHDOG_POLLS_PER_TIMEOUT
            now = anyio.current_time()
            if status.is_alive if status is not None else not process.has_reported_status:
                last_alive = now
            elif timeout and now - last_alive >= timeout:
                self._log_kill(process, f"it was not alive for {timeout:g} s")
                process.abort()
                await anyio.sleep(ABORT_TIMEOUT)
                process.kill()
            await anyio.sleep(interval)

    async def _stop_when_requested(self, process: WorkerProcess) -> None:
        await self._shared.stop_requested.wait()
        process.request_stop()
        timeout = process.exit_timeout
        with anyio.move_on_after(timeout):
            await self._shared.hard_stop_requested.wait()
            process.request_hard_stop()
            timeout = process.hard_stop_exit_timeout
            await anyio.sleep(timeout)
        self._log_kill(process, f"it did not end within {timeout:g} s")
        process.kill()

    def kill(self, reason: str) -> None:
        """Kill the process, if one runs."""
        if self.process is not None:
            self._kill_reason = reason
            self.process.kill()

    def _log_kill(self, process: WorkerProcess, reason: str) -> None:
        self._kill_reason = reason
        self._log.warning(
            WORKER_PROCESS_KILLED,
            effect="its running jobs are rescued",
            pid=process.pid,
            process=self.number,
            reason=reason,
        )

    def _count_restart_and_choose_delay(self, run_seconds: float) -> float | None:
        """Count the restart, and return the delay before it in seconds. Return None if the slot
        starts no further process. `run_seconds` is how long the last process ran."""
        has_reached_limit = self.exit_code == self._rules.limit_exit_code
        if self._shared.stop_requested.is_set():
            return None
        if self._shared.has_drained and not has_reached_limit:
            return None
        limit, failure = self.restart_counts
        if has_reached_limit:
            self.restart_counts = RestartCounts(limit + 1, failure)
            return 0.0
        self.restart_counts = RestartCounts(limit, failure + 1)
        if run_seconds >= RESTART_DELAY_RESET_AFTER:
            self._backoff.reset()
        return self._backoff.next_delay()

    def _log_process_end(self, delay: float | None) -> None:
        restart_in = None if delay is None else round(delay, 1)
        keys: dict[str, object] = {
            "exit_code": self.exit_code,
            "process": self.number,
            "restart_in": restart_in,
        }
        if self._kill_reason is not None:
            keys["reason"] = f"killed by the supervisor: {self._kill_reason}"
        if self.has_ended_cleanly and not delay:
            self._log.info(WORKER_PROCESS_ENDED, **keys)
        else:
            self._log.warning(WORKER_PROCESS_ENDED, **keys)
