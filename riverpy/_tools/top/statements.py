"""One typed function for each statement in `sql/queries/top.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class ReadTime(NamedTuple):
    """The time of a read, and the size of the table of jobs."""

    read_at: datetime
    estimated_jobs: int | None
    """The number of jobs in the table at the last ANALYZE; None: there was no ANALYZE."""


class UnworkedKind(msgspec.Struct, frozen=True):
    """A kind of available jobs for which no running riverpy client has a worker."""

    kind: str
    jobs: int
    """The number of jobs of this kind among the first available jobs of each queue."""
    queues: list[str]


class RunningRow(NamedTuple):
    """The running jobs of one client."""

    jobs: int
    longest_run: float | None
    """The run time of the longest-running job, in seconds; None: no job runs."""


class QueueRow(NamedTuple):
    """The number of unfinished jobs of one queue. Counting ends at a limit, `cap`."""

    name: str
    is_paused: bool
    available: int
    running: int
    scheduled: int
    retryable: int
    late: int
    """The number of scheduled jobs and retries that did not become available in time."""
    due_at: datetime | None
    """The time at which the oldest due job became due; None: no job is due."""
    started: int
    """For unfinished jobs: the number of attempts that started after `since`, a parameter of
    `top_queues`."""
    failed: int
    """For unfinished jobs: the number of attempts that failed after `since`, a parameter of
    `top_queues`."""


class EndedRow(NamedTuple):
    """The jobs of one queue that ended recently."""

    since: datetime
    """The start of the time for which ended jobs are read."""
    seconds: float
    """The seconds from `since` to the time of the read."""
    queue: str | None
    """The name of the queue; None: no job ended in any queue."""
    completed: int
    started: int
    failed: int
    wait_p95: float | None
    """The 95th percentile of the time from when a job was due to its start, in seconds."""


async def top_set_timeout(connection: Transaction, limit: timedelta) -> None:
    """Set the statement timeout of the open transaction."""
    await query("top", "top_set_timeout", None).execute(
        connection, milliseconds=round(limit.total_seconds() * 1000)
    )


async def top_read_time(connection: Transaction, schema: str | None) -> ReadTime:
    """Return the server's time and the size of the table of jobs."""
    (row,) = await query("top", "top_read_time", schema).fetch(connection, schema=schema)
    return ReadTime(*row)


async def top_kinds(
    connection: Transaction, schema: str | None, *, names: Sequence[str], limit: int, kinds: int
) -> list[UnworkedKind]:
    """Return up to `kinds` kinds for which no running client has a worker. The first `limit`
    available jobs of each queue in `names` are read."""
    rows = await query("top", "top_kinds", schema).fetch(
        connection, names=list(names), limit=limit, kinds=kinds
    )
    return [UnworkedKind(*row) for row in rows]


async def top_running(
    connection: Transaction, schema: str | None, *, cap: int, skipped: Sequence[int]
) -> dict[str, RunningRow]:
    """Return the running jobs of each client, by client id. At most `cap` running jobs are read.
    Jobs whose client is not known have the client id "". `skipped` has the ids of damaged jobs,
    whose client is not read."""
    rows = await query("top", "top_running", schema).fetch(connection, cap=cap, skipped=skipped)
    return {row[0]: RunningRow(row[1], row[2]) for row in rows}


async def top_queue_names(connection: Transaction, schema: str | None, *, limit: int) -> list[str]:
    """Return up to `limit` queues that have a row, and up to `limit` queues that have unfinished
    jobs."""
    rows = await query("top", "top_queue_names", schema).fetch(connection, limit=limit)
    return [row[0] for row in rows]


async def top_queues(
    connection: Transaction,
    schema: str | None,
    *,
    names: Sequence[str],
    since: datetime,
    late: timedelta,
    cap: int,
    skipped: Sequence[int],
) -> list[QueueRow]:
    """Return the numbers of unfinished jobs of each queue. `late` is the time after which a job
    that should be available counts as late. `skipped` has the ids of damaged jobs, whose errors are
    not read."""
    rows = await query("top", "top_queues", schema).fetch(
        connection,
        name=names,
        since=since,
        since_text=since.isoformat()[:19],
        late=late.total_seconds(),
        cap=cap,
        skipped=skipped,
    )
    return [QueueRow(*row) for row in rows]


async def top_ended_jobs(
    connection: Transaction,
    schema: str | None,
    *,
    window: timedelta,
    cap: int,
    skipped: Sequence[int],
) -> list[EndedRow]:
    """Return the jobs of each queue that ended within `window`. If more than `cap` jobs of a state
    ended, the window is shorter. If no job ended, there is one row without a queue. `skipped` has
    the ids of damaged jobs, whose errors are not read."""
    rows = await query("top", "top_ended_jobs", schema).fetch(
        connection, window=window.total_seconds(), cap=cap, skipped=skipped
    )
    return [EndedRow(*row) for row in rows]


async def top_totals(connection: Transaction, schema: str | None, *, cap: int) -> dict[str, int]:
    """Return the number of pending and finished jobs, by state."""
    rows = await query("top", "top_totals", schema).fetch(connection, cap=cap)
    return {row[0]: row[1] for row in rows}
