"""InsertRecorder: gets the jobs of inserts in place of the database, in a test.

`riverpy.testing.recording` sets it. It applies to the code of its context: to its task or thread,
and to tasks that start there.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from datetime import datetime

    from riverpy._postgres.inserts import InsertRow
    from riverpy.insert_opts import InsertResult


class InsertRecorder(Protocol):
    """Gets the jobs of inserts in place of the database."""

    def record_rows(
        self, rows: Sequence[InsertRow], *, now: datetime, refuses_duplicates: bool
    ) -> list[InsertResult]:
        """Keep jobs, all or none, and return the results that the database would return. `now` is
        the time of the insert.

        Raises:
            UniqueConflictError: `refuses_duplicates` is True, and a job is a duplicate.
        """
        ...


current_recorder: ContextVar[InsertRecorder | None] = ContextVar(
    "riverpy_insert_recorder", default=None
)
"""The recorder of the calling code. None: jobs are inserted into the database."""


@contextmanager
def without_recorder() -> Generator[None]:
    """Let inserts of the `with` block go to the database."""
    token = current_recorder.set(None)
    try:
        yield
    finally:
        current_recorder.reset(token)
