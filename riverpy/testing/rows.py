"""Creates rows of jobs without a database, for jobs of `make_job` and of recordings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from riverpy._timestamps import encode_timestamp
from riverpy.job import JobColumn, JobState

if TYPE_CHECKING:
    from riverpy._postgres.inserts import InsertRow

COLUMN_COUNT = JobColumn.UNIQUE_STATES + 1


def make_inserted_row(row: InsertRow, *, job_id: int, now: datetime) -> list[Any]:
    """Return the columns that a job has after the insert of `row`, in the order of `JobColumn`.
    `now` is the time of the insert."""
    values: list[Any] = [None] * COLUMN_COUNT
    scheduled_at = now if row.scheduled_at is None else datetime.fromisoformat(row.scheduled_at)
    for column, value in (
        (JobColumn.ID, job_id),
        (JobColumn.ARGS, row.args),
        (JobColumn.ATTEMPT, 0),
        (JobColumn.CREATED_AT, encode_time(now)),
        (JobColumn.KIND, row.kind),
        (JobColumn.MAX_ATTEMPTS, int(row.max_attempts)),
        (JobColumn.METADATA, row.metadata),
        (JobColumn.PRIORITY, int(row.priority)),
        (JobColumn.QUEUE, row.queue),
        (JobColumn.STATE, str(row.state)),
        (JobColumn.SCHEDULED_AT, encode_time(scheduled_at)),
        (JobColumn.TAGS, row.tags.split(",") if row.tags else []),
        (JobColumn.UNIQUE_KEY, None if row.unique_key is None else bytes.fromhex(row.unique_key)),
        (JobColumn.UNIQUE_STATES, None if row.unique_states is None else int(row.unique_states, 2)),
    ):
        values[column] = value
    return values


def parse_state(state: JobState | str) -> JobState:
    """Return the state with this name.

    Raises:
        ValueError: there is no state with this name.
    """
    try:
        return JobState(state)
    except ValueError:
        raise ValueError(f"state is one of {', '.join(JobState)}, got {state!r}") from None


def encode_time(time: datetime) -> int:
    """Return a time as microseconds since 2000.

    Raises:
        ValueError: the time has no time zone.
    """
    if time.utcoffset() is None:
        raise ValueError(f"the time {time.isoformat()} has no time zone: use datetime.now(UTC)")
    return encode_timestamp(time.astimezone(UTC))
