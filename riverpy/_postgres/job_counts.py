"""The statements on job counts: how many attempts ended in each queue and minute. One typed
function per SQL statement in `sql/queries/riverpy_job_count.sql`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from riverpy._postgres.sql_files import get_query, lists_by_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "riverpy_job_count"

ALL_QUEUES_NAME = ""
"""The queue name in the rows that have the sums over all queues. No real queue has this name."""
OTHER_QUEUES_NAME = "*"
"""The queue name in the rows that have the sums over the less busy queues. In each period, only the
busiest queues have rows of their own. No real queue has this name."""
QUEUES_PER_PERIOD_MAX = 200
"""The maximum number of queues with a row of their own in each minute or hour."""
MINUTE_COUNTS_RETENTION = timedelta(hours=25)
"""How long the counts of each minute are kept. After that, they are added to the counts of their
hour."""
HOUR_COUNTS_RETENTION = timedelta(days=8)
"""How long the counts of each hour are kept."""
WAIT_BOUNDS_SECONDS = (0.1, 1.0, 10.0, 60.0, 300.0)
"""The limits of the five fields `JobCounts.waits_over_…`, in seconds. Each field counts the
attempts whose wait was longer than its limit."""

PeriodAction: TypeAlias = Literal["delete", "add to hour", "limit queues"]


class JobCounts(NamedTuple):
    """Counts of the attempts of a queue that ended in some period. The wait of an attempt is the
    time from when its job was due until the attempt started."""

    queue: str
    attempts: int
    """The number of ended attempts, with any outcome."""
    completed: int
    failed: int
    """The number of failed attempts, including those after which the job was discarded."""
    discarded: int
    wait_seconds: float
    """The sum of the waits of the counted attempts, in seconds."""
    wait_max: float
    """The longest wait of a counted attempt, in seconds."""
    waits_over_100ms: int
    """The number of attempts whose wait was longer than 100 ms. The next four fields count waits
    longer than 1 s, 10 s, 1 min and 5 min. `WAIT_BOUNDS_SECONDS` has these five limits."""
    waits_over_1s: int
    waits_over_10s: int
    waits_over_1m: int
    waits_over_5m: int

    @property
    def mean_wait(self) -> float:
        """The mean wait of the counted attempts, in seconds."""
        return self.wait_seconds / max(self.attempts, 1)


def sum_counts(queue: str, counts: Sequence[JobCounts]) -> JobCounts:
    """Return the sum of `counts`, which must not be empty, as the counts of `queue`."""
    if len(counts) == 1:
        return counts[0]._replace(queue=queue)
    sums: list[Any] = [sum(values) for values in list(zip(*counts, strict=True))[1:]]
    longest = max(one.wait_max for one in counts)
    return JobCounts(queue, *sums)._replace(wait_max=longest)


class PeriodCleanup(NamedTuple):
    """A change that the leader has to make to the counts of a minute or an hour."""

    seconds: int
    """The length of the period in seconds."""
    started_at_text: str
    """The start of the period, as text from the server."""
    action: PeriodAction


class TimeStepCounts(NamedTuple):
    """The counts of one step. A step is one of the equal parts of a time range."""

    started_at: int
    """The start of the step, in seconds since 1970."""
    counted_since: int | None
    """The start of the oldest period in the table, in seconds since 1970. None: the table is
    empty."""
    counts: JobCounts


class QueueTimeStepCounts(NamedTuple):
    """The counts of a queue in one step of the last hour."""

    queue: str
    started_at: int
    attempts: int
    failed: int


async def job_count_write(
    connection: Transaction,
    schema: str | None,
    *,
    counts: Sequence[JobCounts],
    age_seconds: float,
    lock_timeout: timedelta,
) -> None:
    """Add counts to the minute that was `age_seconds` ago by the server's clock. Call this in a
    transaction of its own. The call fails if it waits for a lock for longer than `lock_timeout`."""
    await get_query(_SQL_FILE, "job_count_set_limits", None).execute(
        connection, lock_timeout=f"{round(lock_timeout.total_seconds() * 1000)}ms"
    )
    await get_query(_SQL_FILE, "job_count_write", schema).execute(
        connection, age=age_seconds, **lists_by_field(counts)
    )


async def job_count_table_exists(connection: Transaction, schema: str | None) -> bool:
    """Whether the table of counts exists."""
    return await get_query(_SQL_FILE, "job_count_exists", None).fetchval(connection, schema=schema)


async def job_count_list_period_cleanups(
    connection: Transaction, schema: str | None, *, after: PeriodCleanup | None, limit: int
) -> list[PeriodCleanup]:
    """Return up to `limit` changes that the leader has to make, sorted by the length and the start
    of their periods. The list starts after the change `after`. None: it starts with the first
    change."""
    rows = await get_query(_SQL_FILE, "job_count_old_periods", schema).fetch(
        connection,
        minutes_kept=MINUTE_COUNTS_RETENTION,
        hours_kept=HOUR_COUNTS_RETENTION,
        queues_max=QUEUES_PER_PERIOD_MAX,
        after_seconds=after.seconds if after else 0,
        after_time=after.started_at_text if after else "-infinity",
        limit=limit,
    )
    return [PeriodCleanup(*row) for row in rows]


async def job_count_clean_periods(
    connection: Transaction, schema: str | None, *, changes: Sequence[PeriodCleanup]
) -> None:
    """Make these changes: delete the counts of a period, add the counts of a minute to its hour, or
    reduce the number of queues with rows of their own. A repeated call changes nothing."""
    seconds = [change.seconds for change in changes]
    times = [change.started_at_text for change in changes]
    lock = get_query(_SQL_FILE, "job_count_lock_periods", schema)
    await lock.execute(connection, seconds=seconds, started_at=times)
    deleted = [change for change in changes if change.action == "delete"]
    if deleted:
        await get_query(_SQL_FILE, "job_count_delete", schema).execute(
            connection,
            seconds=[change.seconds for change in deleted],
            started_at=[change.started_at_text for change in deleted],
        )
    moved = [change.started_at_text for change in changes if change.action == "add to hour"]
    if moved:
        await get_query(_SQL_FILE, "job_count_add_to_hours", schema).execute(
            connection, started_at=moved
        )
    limited = [change for change in changes if change.action == "limit queues"]
    if limited:
        await get_query(_SQL_FILE, "job_count_limit_queues", schema).execute(
            connection,
            seconds=[change.seconds for change in limited],
            started_at=[change.started_at_text for change in limited],
            queues_max=QUEUES_PER_PERIOD_MAX,
        )


async def job_count_read_time_steps(
    connection: Transaction, schema: str | None, *, queue: str, step_seconds: int, steps: int
) -> list[TimeStepCounts]:
    """Return the counts of a queue in the last `steps` steps, oldest first. The last step has not
    ended yet. `step_seconds` is a multiple of 60, and at most 3600."""
    rows = await get_query(_SQL_FILE, "job_count_read", schema).fetch(
        connection, queue=queue, step_seconds=step_seconds, steps=steps
    )
    return [
        TimeStepCounts(row[0], row[1], JobCounts(queue, *(value or 0 for value in tuple(row)[2:])))
        for row in rows
    ]


async def job_count_read_queue_time_steps(
    connection: Transaction,
    schema: str | None,
    *,
    queues: Sequence[str],
    step_seconds: int,
    rows_max: int,
) -> list[QueueTimeStepCounts]:
    """Return the number of ended attempts, and of failed attempts, for each of these queues and
    each step of the last hour. A step is a part of the hour, `step_seconds` long.

    The result is sorted by queue and time. Steps without attempts are left out. The statement reads
    at most `rows_max` rows of all queues, newest first."""
    rows = await get_query(_SQL_FILE, "job_count_read_queues", schema).fetch(
        connection, queues=queues, step_seconds=step_seconds, rows_max=rows_max
    )
    return [QueueTimeStepCounts(*row) for row in rows]
