"""InsertBacklog: the calls whose jobs wait to be inserted by a shared statement."""

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
"""The maximum number of bytes of args and metadata in one shared statement."""
BACKLOG_JOBS_MAX = 10_000
BACKLOG_BYTES_MAX = 64 * 1024 * 1024
"""The limits of the waiting jobs: their number, and the bytes of their args and metadata. At a
limit, further calls wait."""


class InsertCall:
    """The jobs of one call, and its result. One statement inserts all of these jobs."""

    __slots__ = ("give_up_at", "result", "rows", "size")

    def __init__(
        self,
        rows: list[InsertRow],
        size: int,
        result: asyncio.Future[list[InsertResult]],
        give_up_at: float,
    ) -> None:
        """If the call still waits at `give_up_at`, a time of the event loop, it fails."""
        self.rows, self.size, self.result, self.give_up_at = rows, size, result, give_up_at

    def fail(self, error: Exception) -> None:
        """End the call with this error, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # so that asyncio does not log it if the caller was cancelled


def count_row_bytes(rows: list[InsertRow]) -> int:
    """Return the number of bytes of the args and metadata of these jobs."""
    return sum(utf8_size(row.args) + utf8_size(row.metadata) for row in rows)


class InsertBacklog:
    """The calls whose jobs wait to be inserted, in the order in which they came."""

    def __init__(self) -> None:
        self._calls: dict[InsertCall, None] = {}
        self._job_count = self._byte_count = 0
        self._room_available: asyncio.Event | None = None
        """An event that is set when the backlog has room again. None: no call waits for room."""
        self._room_lock = anyio.Lock()
        """Calls that wait for room acquire it in the order of their arrival."""
        self._calls_without_room_count = 0

    def __len__(self) -> int:
        """Count the waiting calls."""
        return len(self._calls)

    @property
    def is_full(self) -> bool:
        """Whether the next call has to wait: there is no room, or other calls wait for room."""
        return self._calls_without_room_count > 0 or not self._has_room

    @property
    def _has_room(self) -> bool:
        return self._job_count < BACKLOG_JOBS_MAX and self._byte_count < BACKLOG_BYTES_MAX

    async def wait_for_room(self) -> None:
        """Wait until the backlog has room for this call and for those that waited before it. Then
        the caller must add the call at once."""
        self._calls_without_room_count += 1
        try:
            async with self._room_lock:
                while not self._has_room:
                    self._room_available = asyncio.Event()
                    await self._room_available.wait()
        finally:
            self._calls_without_room_count -= 1

    def add_call(self, call: InsertCall) -> None:
        """Add a call after the waiting calls."""
        self._calls[call] = None
        self._job_count += len(call.rows)
        self._byte_count += call.size

    def discard_call(self, call: InsertCall) -> None:
        """Remove a call, if it still waits."""
        if call in self._calls:
            self._remove_call(call)

    def take_batch(self) -> list[InsertCall]:
        """Remove and return the oldest calls whose jobs fit into one statement."""
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
        """Remove and return the calls that have waited for too long."""
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
        """The time at which the oldest call stops waiting. None: no call waits."""
        return next((call.give_up_at for call in self._calls), None)

    def _remove_call(self, call: InsertCall) -> None:
        del self._calls[call]
        self._job_count -= len(call.rows)
        self._byte_count -= call.size
        if self._room_available is not None and self._has_room:
            self._room_available.set()
            self._room_available = None
