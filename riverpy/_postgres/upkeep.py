"""One typed function per block of `sql/queries/river_job_upkeep.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.queue_filter import filtered
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.queue_filter import QueueFilter

DUE_ACTION = "due"

_FILE = "river_job_upkeep"


class JobScope(NamedTuple):
    """Which jobs are meant: those of these queues or all but those, and of them those of these
    kinds or all but those."""

    queues: tuple[str, ...] = ()
    only_queues: bool = False
    kinds: tuple[str, ...] = ()
    only_kinds: bool = False


class EndedMark(NamedTuple):
    """The place of a job among those that ended in one state."""

    ended_at: str
    """As the server wrote it."""
    id: int


class EndedJob(NamedTuple):
    """A job that ended longer ago than a retention."""

    mark: EndedMark
    is_meant: bool
    """Whether it is one of the scope."""


class Scheduled(NamedTuple):
    """What became of due jobs."""

    available: int
    discarded: int
    """For another job that has their unique key."""
    left: list[int]
    """Ids of those that stay as they are: locked, changed meanwhile, or unable to give up a key."""


async def job_states_to_clean(
    connection: Transaction, schema: str | None, retentions: Mapping[str, timedelta]
) -> set[str]:
    """In which of these states there is a job that ended longer ago than the retention."""
    statement = query(_FILE, "job_states_to_clean", schema)
    values: dict[str, object] = {
        "states": list(retentions),
        "retentions": list(retentions.values()),
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def job_ended(
    connection: Transaction,
    schema: str | None,
    *,
    state: str,
    retention: timedelta,
    scope: JobScope,
    after: EndedMark | None,
    limit: int,
) -> list[EndedJob]:
    """Read up to `limit` jobs that ended longer ago than the retention, from behind the mark on."""
    statement = query(_FILE, "job_ended", schema)
    values: dict[str, object] = {
        "state": state,
        "retention": retention,
        **scope._asdict(),
        "after_time": after and after.ended_at,
        "after_id": after and after.id,
        "limit": limit,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [EndedJob(EndedMark(row[1], row[0]), row[2]) for row in rows]


async def job_delete_ended(
    connection: Transaction,
    schema: str | None,
    *,
    ids: Sequence[int],
    state: str,
    retention: timedelta,
) -> set[int]:
    """Delete those of the jobs that ended longer ago than their retention and are not locked;
    return their ids."""
    statement = query(_FILE, "job_delete_ended", schema)
    values: dict[str, object] = {"ids": ids, "state": state, "retention": retention}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def job_due(
    connection: Transaction,
    schema: str | None,
    *,
    within: QueueFilter | None,
    ahead: timedelta,
    skipped: Sequence[int],
    limit: int,
) -> list[int]:
    """The first scheduled and retryable jobs that are due within `ahead`, but for the skipped
    ones; in the order in which they are to run."""
    values: dict[str, object] = {"ahead": ahead, "skipped": skipped, "limit": limit}
    text, arguments = filtered(_FILE, "job_due", schema, within, values)
    rows = await connection.fetch(text, *arguments)
    return [row[0] for row in rows]


async def job_schedule(
    connection: Transaction, schema: str | None, *, ids: Sequence[int], ahead: timedelta
) -> Scheduled:
    """Make due jobs available; notify the queues of those that can be worked at once, and tell
    riverpy's clients when the others can."""
    statement = query(_FILE, "job_schedule", schema)
    values: dict[str, object] = {"ids": ids, "ahead": ahead}
    row = await connection.fetchrow(statement.text, *statement.arguments(values))
    return Scheduled(0, 0, list(ids)) if row is None else Scheduled(*row)


async def job_lock_limit(connection: Transaction, limit: timedelta) -> None:
    """Let no statement of the open transaction wait longer for a lock."""
    statement = query(_FILE, "job_lock_limit", None)
    values: dict[str, object] = {"milliseconds": round(limit.total_seconds() * 1000)}
    await connection.execute(statement.text, *statement.arguments(values))
