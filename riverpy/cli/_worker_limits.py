"""WorkerLimits: stops a worker after a number of attempts, at an age, or above a memory size.

When a worker reaches a limit, it stops in the same way as after SIGTERM. The service manager then
starts a new process.
"""

from __future__ import annotations

import mmap
import random
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._duration import format_duration
from riverpy._lifecycle import unwrap_single_error
from riverpy._log import get_logger
from riverpy._log_events import WORKER_LIMIT_REACHED
from riverpy.cli._settings import SettingsError
from riverpy.cli._types import format_size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy.cli._settings import SettingValue
    from riverpy.client import Client
    from riverpy.stats import ClientStats

JITTER_FRACTION = 0.1
"""The maximum random change of a limit, as a fraction of its setting: a limit of 1,000 attempts
becomes a value between 900 and 1,100. Each process chooses its own values."""
LIMIT_CHECK_INTERVAL = 0.5
"""Seconds between two checks of the limits."""
MEMORY_FILE = Path("/proc/self/statm")
"""A file in which Linux reports the memory use of this process, in pages. The second number is the
resident memory."""
_SIZE_ROUNDING_BYTES = 1024**2
"""Memory sizes in the log are rounded to multiples of this number of bytes."""


class _ProcessLimit(NamedTuple):
    """One limit of this process."""

    name: str
    """The name of the setting."""
    maximum: float
    """The value at which the worker stops: a number of attempts, seconds or bytes."""
    read_value: Callable[[ClientStats], float]
    """Returns the current value, in the same unit as `maximum`."""
    format_value: Callable[[float], str]


class WorkerLimits:
    """Stops the worker when this process reaches one of its limits. The age of the process counts
    from the creation of this object.

    Args:
        max_jobs: the maximum number of ended attempts.
        max_age: the maximum age of the process.
        max_rss: the maximum resident memory in bytes.

    Raises:
        SettingsError: `max_rss` has a value, but this system has no file with the memory use.
    """

    def __init__(
        self,
        max_jobs: SettingValue[int],
        max_age: SettingValue[timedelta],
        max_rss: SettingValue[int],
    ) -> None:
        self._started_at = time.monotonic()
        self._max_rss = max_rss
        self._limits: list[_ProcessLimit] = []
        self.is_reached = False
        """Whether the worker stops because it has reached a limit."""
        if (jobs := max_jobs.or_none()) is not None:
            maximum = max(round(add_jitter(jobs)), 1)
            self._limits.append(
                _ProcessLimit("max-jobs", maximum, _count_ended_attempts, _format_count)
            )
        if (age := max_age.or_none()) is not None:
            maximum = add_jitter(age.total_seconds())
            self._limits.append(
                _ProcessLimit("max-age", maximum, self._read_process_age, _format_seconds)
            )
        if (size := max_rss.or_none()) is not None:
            if not MEMORY_FILE.exists():
                raise SettingsError(
                    f"{max_rss.source}: this limit needs the file {MEMORY_FILE} of Linux, which "
                    "this system does not have; use max-jobs or max-age"
                )
            maximum = add_jitter(size)
            self._limits.append(
                _ProcessLimit("max-rss", maximum, _read_memory_bytes, _format_bytes)
            )

    def check_memory_before_start(self) -> None:
        """Check, before the process works on jobs, that its memory use is below the limit. With a
        limit that is too low, each new process would stop before it works on a job.

        Raises:
            SettingsError: the limit is too low.
        """
        limit = self._max_rss.or_none()
        if limit is None:
            return
        used = _read_memory_bytes()
        if used >= limit * (1 - JITTER_FRACTION):
            raise SettingsError(
                f"{self._max_rss.source}: the limit {format_size(limit)} is too low, because the "
                f"worker uses {_format_bytes(used)} before it works on jobs"
            )

    @asynccontextmanager
    async def watch(self, client: Client, stop: Callable[[], object]) -> AsyncGenerator[None]:
        """Check the limits in a task during the `async with` block. When a limit is reached while
        the client works, call `stop` once."""
        if not self._limits:
            yield
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._wait_for_limit, client, stop, name="riverpy worker limits")
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from None

    async def _wait_for_limit(self, client: Client, stop: Callable[[], object]) -> None:
        while True:
            await anyio.sleep(LIMIT_CHECK_INTERVAL)
            if self._check_limits(client.stats()):
                self.is_reached = True
                stop()
                return

    def _check_limits(self, stats: ClientStats) -> bool:
        """Return whether a limit is reached, and log that limit. If the client is not working, for
        example because it already stops, return False."""
        if stats.state != "working":
            return False
        for limit in self._limits:
            value = limit.read_value(stats)
            if value >= limit.maximum:
                get_logger().info(
                    WORKER_LIMIT_REACHED,
                    limit=limit.name,
                    value=limit.format_value(value),
                    maximum=limit.format_value(limit.maximum),
                    effect="running jobs may finish, then the worker exits",
                )
                return True
        return False

    def _read_process_age(self, _stats: ClientStats) -> float:
        return time.monotonic() - self._started_at


def add_jitter(maximum: float) -> float:
    """Return a random number near `maximum`, so that workers that started at the same time do not
    stop at the same time."""
    # Do not use `random.uniform`: user code may call `random.seed` with the same value in each
    # process.
    return maximum * random.SystemRandom().uniform(1 - JITTER_FRACTION, 1 + JITTER_FRACTION)


def _count_ended_attempts(stats: ClientStats) -> float:
    """Return the number of attempts that have ended and whose results are stored."""
    return sum(
        kind.completed + kind.failed + kind.snoozed + kind.cancelled + kind.interrupted
        for kind in stats.kinds.values()
    )


def _read_memory_bytes(_stats: ClientStats | None = None) -> int:
    """Return the resident memory of this process in bytes. The argument is not used."""
    return int(MEMORY_FILE.read_bytes().split()[1]) * mmap.PAGESIZE


def _format_count(count: float) -> str:
    return f"{count:.0f}"


def _format_seconds(seconds: float) -> str:
    return format_duration(timedelta(seconds=round(seconds, 1)))


def _format_bytes(size: float) -> str:
    return format_size(round(size / _SIZE_ROUNDING_BYTES) * _SIZE_ROUNDING_BYTES)
