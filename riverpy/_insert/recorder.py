"""InsertRecorder: receives inserted jobs instead of the database, in tests.

`riverpy.testing.recording` starts a recorder. The recorder receives the inserts of the task or
thread that started it, and of all tasks which that task or thread starts. Other threads, and tasks
that were started before, use the newest active recorder, unless they have one of their own.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET, UnsetType

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from datetime import datetime

    from riverpy._postgres.inserts import InsertRow
    from riverpy.insert_opts import InsertResult


class InsertRecorder(Protocol):
    """Receives the inserted jobs instead of the database."""

    def record_rows(
        self, rows: Sequence[InsertRow], *, now: datetime, refuses_duplicates: bool
    ) -> list[InsertResult]:
        """Keep all of these jobs, or none of them if one is refused. Return the results that the
        database would return. `now` is the time of the insert.

        Raises:
            UniqueConflictError: `refuses_duplicates` is True, and a job is a duplicate.
        """
        ...


_context_recorder: ContextVar[InsertRecorder | UnsetType | None] = ContextVar(
    "riverpy_insert_recorder", default=UNSET
)
"""The recorder of the current context. None: jobs are inserted into the database. UNSET: the newest
of `_active_recorders` is used, if there is one."""
_active_recorders: list[InsertRecorder] = []
"""The recorders of this process, the newest last."""


def get_recorder() -> InsertRecorder | None:
    """Return the recorder of the calling code. None: jobs are inserted into the database."""
    if not _active_recorders:
        return None
    active = tuple(_active_recorders)  # another thread may end its recording at the same time
    recorder = _context_recorder.get()
    if recorder is None or (recorder is not UNSET and recorder in active):
        return recorder
    return active[-1] if active else None  # the context has no recorder, or one that has ended


def require_no_recorder(method_name: str) -> None:
    """Raise ClientStateError if a recorder receives the inserts of the calling code."""
    if get_recorder() is not None:
        raise ClientStateError(
            f"{method_name} needs a job in the database, and this recording keeps jobs in a list: "
            "replace the call in this test, or test it with a database and a worker"
        )


@contextmanager
def recording_with(recorder: InsertRecorder) -> Generator[None]:
    """Send the jobs that the `with` block inserts to this recorder instead of the database."""
    _active_recorders.append(recorder)
    token = _context_recorder.set(recorder)
    try:
        yield
    finally:
        _active_recorders.remove(recorder)
        with suppress(ValueError):  # the end of a fixture may run in another context
            _context_recorder.reset(token)


@contextmanager
def without_recorder() -> Generator[None]:
    """Insert the jobs of the `with` block into the database, even if a recorder is active."""
    token = _context_recorder.set(None)
    try:
        yield
    finally:
        _context_recorder.reset(token)
