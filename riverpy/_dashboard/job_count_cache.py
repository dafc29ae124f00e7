"""JobCountCache: a cache for the counts of jobs by queue and minute. All users of the dashboard
share it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio

from riverpy._dashboard.database import open_read_transaction
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.job_counts import (
    job_count_read_queue_time_steps,
    job_count_read_time_steps,
    job_count_table_exists,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_counts import QueueTimeStepCounts, TimeStepCounts
    from riverpy.client import Client

COUNTS_AGE_MAX = 10.0
"""How long the cache keeps the result of a read, or the error of a failed read, in seconds. Workers
write new counts only once a minute."""
CACHED_READS_MAX = 200
"""The maximum number of cached results. If there are more, the least recently used one is
dropped."""
SPARKLINE_ROWS_MAX = 20_000
"""The maximum number of rows that are read to draw the sparklines, i.e. the small plots of the last
hour beside each queue."""
SPARKLINE_STEP_SECONDS = 300
TABLE_MISSING_TEXT = (
    "The plots need the table riverpy_job_count: run `riverpy migrate up`, and restart the workers."
)

CountsT = TypeVar("CountsT")


class TimeRange(NamedTuple):
    """A time range of a plot. It ends now and has steps of equal length."""

    name: str
    title: str
    step_seconds: int
    steps: int
    unit: str
    """The length of a step in words."""
    time_format: str
    """The `strftime` format for the start of a step."""


TIME_RANGES = (
    TimeRange("hour", "Last hour", 60, 60, "a minute", "%H:%M"),
    TimeRange("day", "Last day", 900, 96, "15 minutes", "%d %b %H:%M"),
    TimeRange("week", "Last week", 3600, 168, "an hour", "%d %b %H:%M"),
)


class CountsResult(NamedTuple, Generic[CountsT]):
    """The counts that were read. If they could not be read, `problem` is the reason."""

    counts: Sequence[CountsT]
    problem: str | None = None


class _CountsReadCache(Generic[CountsT]):
    """Caches the results of one kind of read. A request that arrives during a read waits until the
    read has ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = anyio.Lock()
        self._reads: dict[Hashable, tuple[float, CountsResult[CountsT]]] = {}
        """The expiry time and the result of each read, by key."""

    async def read(
        self, key: Hashable, read: Callable[[Transaction], Awaitable[Sequence[CountsT]]]
    ) -> CountsResult[CountsT]:
        """Return the cached result for `key`. If the cache has no result, or the result has
        expired, read the counts with the function `read` and cache the new result."""
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
        except DATABASE_ERRORS as error:  # show the page without plots
            return CountsResult((), f"The counts cannot be read: {describe_error(error)}.")


class JobCountCache:
    """Caches the counts of jobs by queue and minute, for the plots of the dashboard."""

    def __init__(self, client: Client) -> None:
        self._schema = client.config.schema
        self._ranges = _CountsReadCache["TimeStepCounts"](client)
        self._queues = _CountsReadCache["QueueTimeStepCounts"](client)

    async def read_queue_counts(
        self, queue: str, time_range: TimeRange
    ) -> CountsResult[TimeStepCounts]:
        """Return the counts of a queue in each step of a time range, the oldest first."""

        async def read(tx: Transaction) -> Sequence[TimeStepCounts]:
            # Workers write the counts of a minute after its end. So leave out the current minute.
            is_by_minute = time_range.step_seconds == 60
            steps = await job_count_read_time_steps(
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
    ) -> Mapping[str, list[QueueTimeStepCounts]]:
        """Return the counts of each queue in the last hour, in steps of `SPARKLINE_STEP_SECONDS`.
        Steps and queues without attempts are left out. After a database error, the result is
        empty."""

        async def read(tx: Transaction) -> Sequence[QueueTimeStepCounts]:
            return await job_count_read_queue_time_steps(
                tx,
                self._schema,
                queues=queues,
                step_seconds=SPARKLINE_STEP_SECONDS,
                rows_max=SPARKLINE_ROWS_MAX,
            )

        by_queue: dict[str, list[QueueTimeStepCounts]] = {}
        for step in (await self._queues.read(tuple(sorted(queues)), read)).counts:
            by_queue.setdefault(step.queue, []).append(step)
        return by_queue
