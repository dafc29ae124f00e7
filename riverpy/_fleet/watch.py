"""JobWatch: an async iterator over the changes of one job."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from riverpy._postgres.jobs import FINAL_STATES
from riverpy.errors import ClientStateError, NotFoundError
from riverpy.events import JobChange, JobChangeKind
from riverpy.job import OUTPUT_METADATA_KEY, JobColumn, JobRow
from riverpy.progress import PROGRESS_METADATA_KEY

if TYPE_CHECKING:
    from types import TracebackType


class WatchOwner(Protocol):
    """Reads the rows of watched jobs."""

    def add_watch(self, watch: JobWatch) -> None:
        """Read the row of a job for this watch from now on."""

    def remove_watch(self, watch: JobWatch) -> None:
        """Read it no longer."""


class WatchClosedError(ClientStateError):
    """The client of a watch was closed."""

    def __init__(self) -> None:
        super().__init__("the client was closed while a job was watched")


class JobWatch:
    """An async iterator over the changes of one job, until its final state.

    The first item is the job as it is. If the reader is slow, it gets the newest row, and no rows
    between.
    """

    def __init__(self, owner: WatchOwner, job_id: int) -> None:
        self.job_id = job_id
        self._owner = owner
        self._is_open = self._is_ended = False
        self._unread_row: JobRow | None = None
        """The newest row, if the reader has not read it."""
        self._version = ""
        """The version of the newest row."""
        self.read_version = ""
        """The version of the row that the reader has read last."""
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._is_being_read = False
        self._last_row: JobRow | None = None
        """The row that the reader has read last."""
        self._changes: deque[JobChange] = deque()

    # -- called by the owner

    def set_row(self, version: str, row: JobRow | None) -> None:
        """Receive the newest row; None: the job does not exist."""
        if row is None:
            self.fail(NotFoundError(f"there is no job {self.job_id}"))
        elif version != self._version:
            self._version, self._unread_row = version, row
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the watch with an error."""
        self._error = error
        self._ready.set()

    # -- reading

    async def read_row(self) -> JobRow:
        """Return the next version of the row.

        Raises:
            StopAsyncIteration: the last row had a final state, or the watch was closed.
            NotFoundError: the job does not exist.
            ClientStateError: the client is not open, or was closed, or another task reads this
                watch.
            Exception: the database refuses to read the row.
        """
        if self._is_being_read:  # each of two readers would miss what the other reads
            raise ClientStateError(
                "another task reads this watch: call client.watch(job_id) once for each reader"
            )
        self._is_being_read = True
        try:
            return await self._wait_for_row()
        finally:
            self._is_being_read = False

    async def _wait_for_row(self) -> JobRow:
        if self._is_ended:
            raise StopAsyncIteration
        if not self._is_open:
            self._owner.add_watch(self)
            self._is_open = True
        while self._unread_row is None:
            if self._error is not None:
                self.close()
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        row, self._unread_row = self._unread_row, None
        self.read_version = self._version
        if row.state in FINAL_STATES:
            self.close()
        return row

    def close(self) -> None:
        """End the watch. A task that waits for a change gets no more."""
        self._is_ended = True
        if self._is_open:
            self._is_open = False
            self._owner.remove_watch(self)
        self._ready.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobChange:
        """Return the next change.

        Raises:
            Exception: as `read_row`.
        """
        while not self._changes:
            row = await self.read_row()
            self._changes.extend(find_changes(self._last_row, row))
            self._last_row = row
        return self._changes.popleft()

    async def aclose(self) -> None:
        """End the watch."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def find_changes(before: JobRow | None, row: JobRow) -> list[JobChange]:
    """Return the changes from one row of a job to a later one, the change of the state last."""
    if before is None:
        return [_make_change(JobChangeKind.PRESENT, row)]
    old, new = _decode_members(before), _decode_members(row)
    kinds = [
        kind
        for kind, key in (
            (JobChangeKind.PROGRESS, PROGRESS_METADATA_KEY),
            (JobChangeKind.OUTPUT, OUTPUT_METADATA_KEY),
        )
        if old.get(key) != new.get(key)
    ]
    if before.state != row.state:
        kinds.append(JobChangeKind.STATE)
    elif before.attempt != row.attempt or before.attempted_at != row.attempted_at:
        kinds.append(JobChangeKind.ATTEMPT)
    return [_make_change(kind, row) for kind in kinds]


def _make_change(kind: JobChangeKind, row: JobRow) -> JobChange:
    return JobChange(kind, row, row.last_progress, row.output)


def _decode_members(row: JobRow) -> dict[str, Any]:
    """Return the metadata of a row with its values as JSON texts."""
    text: str = row.columns()[JobColumn.METADATA]
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
