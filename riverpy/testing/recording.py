"""recording: keeps inserted jobs in memory instead of the database, for tests without a
database."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from riverpy._insert.recorder import recording_with
from riverpy._insert.replacement import merge_replacing_row
from riverpy._postgres.inserts import add_expiry_to_metadata
from riverpy._timestamps import encode_timestamp
from riverpy.errors import UniqueConflictError
from riverpy.insert_opts import InsertResult
from riverpy.job import JobColumn, JobRow, JobState
from riverpy.testing.expected_job import check_expected_is_list, expect_job
from riverpy.testing.matching import (
    find_job_sequence,
    find_matching_jobs,
    find_single_job,
    format_job_list,
    require_no_job,
)
from riverpy.testing.rows import make_inserted_row

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from riverpy._postgres.inserts import InsertRow
    from riverpy.job import JobArgs, RawArgs
    from riverpy.testing.expected_job import ExpectedJob
    from riverpy.testing.made_job import MadeJob

ArgsT = TypeVar("ArgsT", bound="JobArgs | RawArgs")


class _RecordedJob(NamedTuple):
    """A recorded job: the values of its insert, and its row."""

    insert_row: InsertRow
    job: JobRow


class RecordedJobs:
    """The jobs that were inserted during a recording, with methods that check them. Any thread may
    use this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_RecordedJob] = []
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__}\n{format_job_list(self.jobs)}>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def jobs(self) -> list[JobRow]:
        """All recorded jobs, in the order of the inserts. Their args are not decoded: `inserted`
        returns jobs with decoded args."""
        return [entry.job for entry in self._entries]

    def clear(self) -> None:
        """Remove all recorded jobs. Later jobs get new ids."""
        with self._lock:
            self._entries.clear()

    # -- assertions

    def require_inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> MadeJob[ArgsT]:
        """Check that exactly one recorded job matches `expected`, and return it; see
        `riverpy.testing.require_inserted`."""
        wanted = expect_job(
            expected,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )
        return find_single_job(self.jobs, wanted)

    def require_not_inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> None:
        """Check that no recorded job matches `expected`; see
        `riverpy.testing.require_not_inserted`."""
        wanted = expect_job(
            expected,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )
        require_no_job(self.jobs, wanted)

    def require_many_inserted(self, expected: Sequence[object]) -> list[MadeJob[Any]]:
        """Check that exactly the expected jobs were recorded, in the order of the list; see
        `riverpy.testing.require_many_inserted`."""
        check_expected_is_list(expected)
        return find_job_sequence(self.jobs, [expect_job(one) for one in expected])

    def inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> list[MadeJob[ArgsT]]:
        """Return the recorded jobs that match `expected`; see `riverpy.testing.inserted`."""
        wanted = expect_job(
            expected,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )
        return find_matching_jobs(self.jobs, wanted)

    # -- called by inserts

    def record_rows(
        self, rows: Sequence[InsertRow], *, now: datetime, refuses_duplicates: bool
    ) -> list[InsertResult]:
        """Record the jobs of an insert, and return the results of the insert. A job is a duplicate
        if a recorded job has the same unique key. `now` is the time of the insert.

        Raises:
            UniqueConflictError: `refuses_duplicates` is True, and a job is a duplicate. No job was
                recorded.
        """
        with self._lock:
            if refuses_duplicates:
                self._require_no_duplicate(rows)
            places = [self._record_row(row, now) for row in rows]
            return [
                InsertResult(self._entries[index].job, is_duplicate, is_duplicate and has_replaced)
                for index, is_duplicate, has_replaced in places
            ]

    def _require_no_duplicate(self, rows: Sequence[InsertRow]) -> None:
        keys = {entry.insert_row.unique_key for entry in self._entries}
        for row in rows:
            if row.unique_key is not None and row.unique_key in keys:
                raise UniqueConflictError(
                    f"a recorded job has the same unique key as a job of kind {row.kind!r}: no job "
                    "was recorded"
                )
            keys.add(row.unique_key)

    def _record_row(self, row: InsertRow, now: datetime) -> tuple[int, bool, bool]:
        """Record one job. If a recorded job has the same unique key, record no new job. If the
        insert also has `replace` set, change the recorded job.

        Return three values: the index in `_entries` of the new job or of the recorded job with the
        same key; whether the job is a duplicate; and whether the recorded job was changed."""
        if row.unique_key is not None:
            for index, entry in enumerate(self._entries):
                if entry.insert_row.unique_key == row.unique_key:
                    if row.replace is not None:
                        self._entries[index] = _apply_replacing_insert(entry, row, now)
                    return index, True, row.replace is not None
        self._last_id += 1
        self._entries.append(_make_recorded_job(row, self._last_id, now))
        return len(self._entries) - 1, False, False


def _make_recorded_job(row: InsertRow, job_id: int, now: datetime) -> _RecordedJob:
    values = make_inserted_row(row, job_id=job_id, now=now)
    if row.expires_in is not None:
        expires_at = encode_timestamp(now) + int(row.expires_in)
        values[JobColumn.METADATA] = add_expiry_to_metadata(row.metadata, expires_at)
    return _RecordedJob(row, JobRow(values))


def _apply_replacing_insert(entry: _RecordedJob, row: InsertRow, now: datetime) -> _RecordedJob:
    """Return the recorded job `entry` after an insert of `row` has replaced values of it."""
    merged = merge_replacing_row(entry.insert_row, row)
    options = msgspec.json.decode(row.replace or "{}", type=dict[str, Any])
    if "scheduled_at" in options:
        due_at = now if row.scheduled_at is None else datetime.fromisoformat(row.scheduled_at)
        if "max_wait" in options:
            due_at = min(due_at, entry.job.created_at + timedelta(microseconds=options["max_wait"]))
        merged = merged._replace(scheduled_at=due_at.isoformat())
        if merged.state != JobState.PENDING:
            state = JobState.AVAILABLE if due_at <= now else JobState.SCHEDULED
            merged = merged._replace(state=state)
    values = [*_make_recorded_job(merged, entry.job.id, now).job.get_encoded_values()]
    values[JobColumn.CREATED_AT] = entry.job.get_encoded_values()[JobColumn.CREATED_AT]
    return _RecordedJob(merged, JobRow(values))


@contextmanager
def recording() -> Generator[RecordedJobs]:
    """Record the jobs that are inserted in the `with` block, instead of storing them. No database
    is used, and clients need not be open.

        with recording() as recorded:
            await sign_up("ada@example.com")

        recorded.require_inserted(Welcome, email="ada@example.com")

    The inserts check args, options, kinds and unique keys as usual, and call hooks and middleware.
    They ignore `tx`. A job is a duplicate if a recorded job has the same unique key.

    The inserts of all clients in the process are recorded: in this task or thread, in tasks that
    it starts, and in other tasks and threads that have no recording of their own. If recordings are
    nested, the inner recording receives the jobs.
    """
    recorded = RecordedJobs()
    with recording_with(recorded):
        yield recorded
