"""JobCountCache: the counts of jobs by queue and minute, which all viewers share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from riverpy._dashboard.database import open_read_transaction
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.job_counts import (
    job_count_read_queue_steps,
    job_count_read_steps,
    job_count_table_exists,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_counts import QueueStepCounts, StepCounts
    from riverpy.client import Client

COUNTS_AGE_MAX = 10.0
"""Seconds for which counts, or the error of a read, are used again. Workers write once a minute."""
CACHED_READS_MAX = 200
"""The maximum number of cached reads. The oldest one is dropped."""
SPARKLINE_ROWS_MAX = 20_000
"""The maximum number of rows of the last hour that are read to show the queues side by side."""
SPARKLINE_STEP_SECONDS = 300
TABLE_MISSING_TEXT = (
    "The plots need the table riverpy_job_count: run `riverpy migrate up`, and restart the workers."
)

CountsT = TypeVar("CountsT")


class TimeRange(NamedTuple):
    """A range of time, up to now, in steps of the same length."""

    name: str
    title: str
    step_seconds: int
    steps: int
    unit: str
    """The length of a step, in words."""
    time_format: str
    """How the start of a step is shown."""


TIME_RANGES = (
    TimeRange("hour", "Last hour", 60, 60, "a minute", "%H:%M"),
    TimeRange("day", "Last day", 900, 96, "15 minutes", "%d %b %H:%M"),
    TimeRange("week", "Last week", 3600, 168, "an hour", "%d %b %H:%M"),
)


class CountsResult(NamedTuple, Generic[CountsT]):
    """What was read, or why nothing could be read."""

    counts: Sequence[CountsT]
    problem: str | None = None


class _CountsReadCache(Generic[CountsT]):
    """Caches the results of one kind of read. Requests that arrive during a read wait for its
    result."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = anyio.Lock()
        self._reads: dict[Hashable, tuple[float, CountsResult[CountsT]]] = {}
        """By key: when the result expires, and the result."""

    async def read(
        self, key: Hashable, read: Callable[[Transaction], Awaitable[Sequence[CountsT]]]
    ) -> CountsResult[CountsT]:
        """Return what `read` returns, or what it has returned for this key a moment ago."""
        async with self._lock:
            expires_at, known = self._reads.pop(key, (0.0, None))
            if known is None or time.monotonic() >= expires_at:
                known = await self._read_uncached(read)
                expires_at = time.monotonic() + COUNTS_AGE_MAX
            self._reads[key] = expires_at, known
            if len(self._reads) > CACHED_READS_MAX:
                del self._reads[next(iter(self._reads))]
            return known

    async def _read_uncached(
        self, read: Callable[[Transaction], Awaitable[Sequence[CountsT]]]
    ) -> CountsResult[CountsT]:
        try:
            async with open_read_transaction(self._client) as tx:
                if not await job_count_table_exists(tx, self._client.config.schema):
                    return CountsResult((), TABLE_MISSING_TEXT)
                return CountsResult(await read(tx))
        except DATABASE_ERRORS as error:  # the page is useful without plots
            return CountsResult((), f"The counts cannot be read: {describe_error(error)}.")


class JobCountCache:
    """Caches counts of jobs."""

    def __init__(self, client: Client) -> None:
        self._schema = client.config.schema
        self._ranges = _CountsReadCache["StepCounts"](client)
        self._queues = _CountsReadCache["QueueStepCounts"](client)

    async def read_queue_counts(
        self, queue: str, time_range: TimeRange
    ) -> CountsResult[StepCounts]:
        """Return the counts of a queue in each step of a range, oldest first."""

        async def read(tx: Transaction) -> Sequence[StepCounts]:
            # Workers add the counts of a minute after its end, so the current minute is left out.
            is_by_minute = time_range.step_seconds == 60
            steps = await job_count_read_steps(
                tx,
                self._schema,
                queue=queue,
                step_seconds=time_range.step_seconds,
                steps=time_range.steps + is_by_minute,
            )
            return steps[: time_range.steps]

        return await self._ranges.read((queue, time_range.name), read)

    async def read_last_hour_counts(
        self, queues: Sequence[str]
    ) -> Mapping[str, list[QueueStepCounts]]:
        """Return the counts of queues in the last hour, in steps of `SPARKLINE_STEP_SECONDS`. Steps
        and queues without attempts are left out. After an error, all are left out."""

        async def read(tx: Transaction) -> Sequence[QueueStepCounts]:
            return await job_count_read_queue_steps(
                tx,
                self._schema,
                queues=queues,
                step_seconds=SPARKLINE_STEP_SECONDS,
                rows_max=SPARKLINE_ROWS_MAX,
            )

        by_queue: dict[str, list[QueueStepCounts]] = {}
        for step in (await self._queues.read(tuple(sorted(queues)), read)).counts:
            by_queue.setdefault(step.queue, []).append(step)
        return by_queue
