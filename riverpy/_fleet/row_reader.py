"""RowReader: passes the newest row of one watched job to one task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from riverpy._postgres.jobs import FINAL_STATES
from riverpy._waiting.job_wait import make_missing_job_error
from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from riverpy.job import JobRow


class RowReaderOwner(Protocol):
    """The object that reads the rows of watched jobs from the database."""

    def add_row_reader(self, reader: RowReader) -> None:
        """Start passing the row of the job `reader.job_id` to the reader."""

    def remove_row_reader(self, reader: RowReader) -> None:
        """Stop passing the row of the job `reader.job_id` to the reader. Other readers of the same
        job still receive the row."""


class WatchClosedError(ClientStateError):
    """Raised if the client was closed while a job was watched."""

    def __init__(self) -> None:
        super().__init__("the client was closed while a job was watched")


class RowReader:
    """Passes the row of one job to one task: first the current row, then the row after each change,
    until the job has a final state. If the row changes several times before the task reads it, the
    task receives only the newest row."""

    def __init__(self, owner: RowReaderOwner, job_id: int) -> None:
        self.job_id = job_id
        self._owner = owner
        self._is_open = self._is_ended = self._is_being_read = False
        self._unread_row: JobRow | None = None
        """The newest row. None: the task has already read it."""
        self._version = ""
        """The version (`xmin`) of the newest row."""
        self.read_version = ""
        """The version of the last row that the task has read."""
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    # -- called by the owner

    def set_row(self, version: str, row: JobRow | None) -> None:
        """Store the newest row of the job. `row` is None if the job does not exist.

        The owner may pass the same row twice: when another reader of the job is added, the owner
        passes the current row to all readers of this job."""
        if row is None:
            self.set_error(make_missing_job_error(self.job_id))
        else:
            self._version, self._unread_row = version, row
            self._ready.set()

    def set_error(self, error: Exception) -> None:
        """Store an error that the next read raises."""
        self._error = error
        self._ready.set()

    # -- called by the task that receives the rows

    async def receive_row(self) -> JobRow:
        """Wait for a row that this method has not returned yet, and return it: first the current
        row, then the newest row after each change. If another reader of the job is added, the same
        row may be returned again.

        Raises:
            StopAsyncIteration: the last row had a final state, or the reader was closed.
            NotFoundError: the job does not exist.
            ClientStateError: the client is not open or was closed, or another task reads from this
                reader.
            Exception: the database cannot read the row.
        """
        if self._is_being_read:  # two tasks would take rows from each other
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
            self._owner.add_row_reader(self)
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
        """Close the reader. A waiting `receive_row` raises StopAsyncIteration."""
        self._is_ended = True
        if self._is_open:
            self._is_open = False
            self._owner.remove_row_reader(self)
        self._ready.set()
