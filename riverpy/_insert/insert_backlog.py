"""InsertBacklog: the queue of calls whose jobs will be inserted by a shared statement. Such a
statement inserts the jobs of several calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from riverpy._insert.json_text import utf8_size

if TYPE_CHECKING:
    from riverpy._postgres.inserts import InsertRow
    from riverpy.insert_opts import InsertResult

STATEMENT_JOBS_MAX = 1_000
"""The maximum number of jobs in one shared statement."""
STATEMENT_BYTES_MAX = 8 * 1024 * 1024
"""The maximum size of the args and metadata in one shared statement, in bytes."""
BACKLOG_JOBS_MAX = 10_000
BACKLOG_BYTES_MAX = 64 * 1024 * 1024
"""The maximum size of the args and metadata of all waiting jobs, in bytes. If this limit or
`BACKLOG_JOBS_MAX` is reached, further calls wait for room."""


class InsertCall:
    """One call of `insert` or `insert_many`: its jobs and its result. One statement inserts all
    jobs of the call."""

    __slots__ = ("give_up_at", "result", "rows", "size")

    def __init__(
        self,
        rows: list[InsertRow],
        size: int,
        result: asyncio.Future[list[InsertResult]],
        give_up_at: float,
    ) -> None:
        """Create the call. If the call still waits at `give_up_at`, a time of the event loop's
        clock, the call fails."""
        self.rows, self.size, self.result, self.give_up_at = rows, size, result, give_up_at

    def fail(self, error: Exception) -> None:
        """End the call with this error if it has not ended yet."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # prevents a log message of asyncio if the caller was cancelled


def count_row_bytes(rows: list[InsertRow]) -> int:
    """Return the size of the args and metadata of these jobs in bytes."""
    return sum(utf8_size(row.args) + utf8_size(row.metadata) for row in rows)


class InsertBacklog:
    """The queue of calls whose jobs wait to be inserted, the oldest first."""

    def __init__(self) -> None:
        self._calls: dict[InsertCall, None] = {}
        self._job_count = self._byte_count = 0
        self._room_available: asyncio.Event | None = None
        """Set when the backlog has room again. None: no call waits for room."""
        self._room_lock = anyio.Lock()
        """Held by the call that waits for room. Later calls wait for this lock, so that calls
        continue in the order of their arrival."""
        self._calls_without_room_count = 0

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether the next call must wait for room. This is the case if the backlog has no room, or
        if other calls already wait for room."""
        return self._calls_without_room_count > 0 or not self._has_room

    @property
    def _has_room(self) -> bool:
        return self._job_count < BACKLOG_JOBS_MAX and self._byte_count < BACKLOG_BYTES_MAX

    async def wait_for_room(self) -> None:
        """Wait until the backlog has room. Calls continue in the order of their arrival. After
        this method, the caller must add its call at once, without another `await`."""
        self._calls_without_room_count += 1
        try:
            async with self._room_lock:
                while not self._has_room:
                    self._room_available = asyncio.Event()
                    await self._room_available.wait()
        finally:
            self._calls_without_room_count -= 1

    def add_call(self, call: InsertCall) -> None:
        """Add a call at the end of the queue."""
        self._calls[call] = None
        self._job_count += len(call.rows)
        self._byte_count += call.size

    def discard_call(self, call: InsertCall) -> None:
        """Remove a call if it still waits."""
        if call in self._calls:
            self._remove_call(call)

    def take_batch(self) -> list[InsertCall]:
        """Remove and return the oldest calls whose jobs together fit into one statement."""
        batch: list[InsertCall] = []
        job_count = byte_count = 0
        for call in self._calls:
            job_count += len(call.rows)
            byte_count += call.size
            if batch and (job_count > STATEMENT_JOBS_MAX or byte_count > STATEMENT_BYTES_MAX):
                break
            batch.append(call)
        for call in batch:
            self._remove_call(call)
        return batch

    def take_expired_calls(self, now: float) -> list[InsertCall]:
        """Remove and return the calls whose time `give_up_at` has passed."""
        expired: list[InsertCall] = []
        for call in self._calls:
            if call.give_up_at > now:
                break
            expired.append(call)
        for call in expired:
            self._remove_call(call)
        return expired

    def take_all_calls(self) -> list[InsertCall]:
        """Remove and return all calls."""
        calls = list(self._calls)
        for call in calls:
            self._remove_call(call)
        return calls

    @property
    def next_expiry(self) -> float | None:
        """The time at which the oldest call expires. None: no call waits."""
        return next((call.give_up_at for call in self._calls), None)

    def _remove_call(self, call: InsertCall) -> None:
        del self._calls[call]
        self._job_count -= len(call.rows)
        self._byte_count -= call.size
        if self._room_available is not None and self._has_room:
            self._room_available.set()
            self._room_available = None
