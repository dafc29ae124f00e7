"""JobWatch: an async iterator over the changes of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from riverpy.events import JobChange, JobChangeKind
from riverpy.job import OUTPUT_METADATA_KEY, JobColumn, JobRow
from riverpy.progress import PROGRESS_METADATA_KEY

if TYPE_CHECKING:
    from types import TracebackType

    from riverpy._fleet.row_reader import RowReader


class JobWatch:
    """An async iterator over the changes of one job, until its final state.

    The first item describes the current row. If the row changes several times in a short time, or
    while the task handles an item, the task may receive only the newest row, as one change. Only
    one task may read a watch; another task needs its own watch.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._last_row: JobRow | None = None
        """The last row that was read. None: no row was read yet."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobChange:
        """Return the next change.

        Raises:
            NotFoundError: the job does not exist, or was deleted.
            ClientStateError: the client is not open or was closed, or another task reads this
                watch.
            Exception: the database cannot read the row.
        """
        while True:
            row = await self._reader.receive_row()
            kind = find_change_kind(self._last_row, row)
            self._last_row = row
            if kind is not None:
                return JobChange(kind, row, row.last_progress, row.output)

    async def aclose(self) -> None:
        """Close the watch. If another task iterates over it, the iteration ends."""
        self._reader.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._reader.close()


def get_row_reader(watch: JobWatch) -> RowReader:
    """Return the RowReader of a watch, for code that also needs the changes of the row that a watch
    does not report."""
    return watch._reader  # noqa: SLF001 (own class)  # pyright: ignore[reportPrivateUsage]


def find_change_kind(before: JobRow | None, row: JobRow) -> JobChangeKind | None:
    """Return the most important difference between two rows of the same job. Return None if a watch
    does not report any of the differences."""
    if before is None:
        return JobChangeKind.PRESENT
    if before.state != row.state:
        return JobChangeKind.STATE
    if before.attempt != row.attempt or before.attempted_at != row.attempted_at:
        return JobChangeKind.ATTEMPT
    old, new = (
        _decode_metadata_keeping_json_values(before),
        _decode_metadata_keeping_json_values(row),
    )
    for kind, key in (
        (JobChangeKind.OUTPUT, OUTPUT_METADATA_KEY),
        (JobChangeKind.PROGRESS, PROGRESS_METADATA_KEY),
    ):
        if old.get(key) != new.get(key):
            return kind
    return None


def _decode_metadata_keeping_json_values(row: JobRow) -> dict[str, Any]:
    """Return the metadata of a row as a dict. Its values are not decoded (`msgspec.Raw`)."""
    text: str = row.get_encoded_values()[JobColumn.METADATA]
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
