"""Jobs and queues as each language reads them and as they are stored, in one form."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy.job import UNIQUE_STATE_BY_BIT, AttemptError

if TYPE_CHECKING:
    from riverpy import JobRow
    from riverpy.queue import Queue
    from tests._database import Schema
    from tests.interop.river_go import Row

TIMES = ("attempted_at", "created_at", "finalized_at", "scheduled_at")
QUEUE_TIMES = ("created_at", "paused_at", "updated_at")
STORED = """
SELECT id, state::text, attempt, max_attempts, attempted_at, created_at, finalized_at, scheduled_at,
    priority, args::text, attempted_by, errors, kind, metadata::text, queue, tags,
    encode(unique_key, 'hex') AS unique_key, unique_states::int
FROM river_job WHERE id = $1
"""


def read_by_python(job: JobRow) -> Row:
    """Convert a row that Python read."""
    columns = job.get_encoded_values()
    states = job.unique_states
    return {
        "id": job.id,
        "state": job.state.value,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "attempted_at": job.attempted_at,
        "created_at": job.created_at,
        "finalized_at": job.finalized_at,
        "scheduled_at": job.scheduled_at,
        "priority": job.priority,
        "args": job.encoded_args,
        "attempted_by": job.attempted_by,
        "errors": job.errors,
        "kind": job.kind,
        "metadata": columns[10],
        "queue": job.queue,
        "tags": job.tags,
        "unique_key": job.unique_key and job.unique_key.hex(),
        "unique_states": states and sum(1 << UNIQUE_STATE_BY_BIT.index(state) for state in states),
    }


def read_by_go(row: Row) -> Row:
    """Convert a row that Go printed to Python's types."""
    return row | {
        **{name: msgspec.convert(row[name], datetime | None) for name in TIMES},
        "attempted_by": row["attempted_by"] or [],
        "errors": _errors(row["errors"] or []),
    }


async def stored(schema: Schema, job_id: int) -> Row:
    """Return a row as it is in the table."""
    found = await schema.fetchrow(STORED, job_id)
    assert found is not None, f"there is no job {job_id}"
    row: dict[str, Any] = dict(found)
    errors = [json.loads(text) for text in row["errors"] or ()]
    return row | {
        "attempted_by": row["attempted_by"] or [],
        "errors": _errors(errors),
    }


def _errors(entries: list[dict[str, Any]]) -> list[AttemptError]:
    return [AttemptError(**entry | {"at": _time(entry["at"])}) for entry in entries]


def _time(text: str) -> datetime:
    """Convert a time with nanoseconds. PostgreSQL rounds half a microsecond to the even one, and
    msgspec rounds it up."""
    at = datetime.fromisoformat(text).replace(microsecond=0)
    fraction = re.search(r"\.\d+", text)
    return at + timedelta(microseconds=round(float(fraction[0] if fraction else 0) * 1_000_000))


def queue_read_by_python(queue: Queue) -> Row:
    """Convert a queue that Python read."""
    return msgspec.structs.asdict(queue)


def queue_read_by_go(row: Row) -> Row:
    """Convert a queue that Go printed."""
    return row | {
        **{name: msgspec.convert(row[name], datetime | None) for name in QUEUE_TIMES},
        "metadata": json.loads(row["metadata"]),
    }
