"""One typed function per block of `sql/queries/top.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class Moment(NamedTuple):
    """The time of a read, and the size of the table of jobs."""

    at: datetime
    about: int | None
    """Jobs in the table, as of its last ANALYZE. None: there was none."""


class ClientRow(NamedTuple):
    """A registered riverpy client."""

    client_id: str
    version: str
    queues: list[str]
    candidate: bool
    """Whether it takes part in leader election, and is not stopping."""
    started_at: datetime
    silent_for: float
    """Seconds since its last heartbeat, by the server's clock. Negative if that was set back."""
    is_silent: bool
    """Whether that is longer than its `dead_after`."""
    stuck: int
    """How many stuck jobs it reports."""
    slots: list[int] | None
    """In the order of its queues. None: not known."""
    is_stopping: bool
    aside: int
    """How many rows it has set aside."""


class KindRow(NamedTuple):
    """A kind of available jobs that no running client has."""

    kind: str
    jobs: int
    """Jobs of this kind among those that were read."""
    queues: list[str]


class RunningRow(NamedTuple):
    """The running jobs of one client."""

    jobs: int
    longest: float
    """Seconds that the oldest one runs."""


class QueueRow(NamedTuple):
    """The unfinished jobs of one queue. Counting ends at the cap."""

    name: str
    is_paused: bool
    available: int
    running: int
    scheduled: int
    retryable: int
    late: int
    """Scheduled jobs and retries that did not become available in time."""
    due_at: datetime | None
    """When the oldest due job became due. None: no job is due."""
    started: int
    """Attempts at unfinished jobs that started after the given time."""
    failed: int
    """Attempts at unfinished jobs that failed after the given time."""


class EndedRow(NamedTuple):
    """The jobs of one queue that ended recently."""

    since: datetime
    """The start of the time that is read."""
    seconds: float
    """The length of that time."""
    queue: str | None
    """None: no job ended."""
    completed: int
    started: int
    failed: int
    wait_p95: float | None
    """Seconds from due to started that 95 % of the started jobs did not exceed."""


async def top_limits(connection: Transaction, limit: timedelta) -> None:
    """Set the time limit for each statement of this transaction."""
    await query("top", "top_limits", None).execute(
        connection, milliseconds=round(limit.total_seconds() * 1000)
    )


async def top_moment(connection: Transaction, schema: str | None) -> Moment:
    """Return the server's time and the size of the table of jobs."""
    (row,) = await query("top", "top_moment", schema).fetch(connection, schema=schema)
    return Moment(*row)


async def top_clients(
    connection: Transaction, schema: str | None, *, limit: int
) -> list[ClientRow]:
    """Return up to `limit` registered clients, the silent ones last."""
    return [
        ClientRow(
            *row[:-3],
            slots=_slots(row["slots"]),
            is_stopping=row["is_stopping"],
            aside=row["aside"],
        )
        for row in await query("top", "top_clients", schema).fetch(connection, limit=limit)
    ]


async def top_kinds(
    connection: Transaction, schema: str | None, *, names: Sequence[str], limit: int, kinds: int
) -> list[KindRow]:
    """Return up to `kinds` kinds that no running client has, among the first `limit` available jobs
    of each of these queues."""
    rows = await query("top", "top_kinds", schema).fetch(
        connection, names=list(names), limit=limit, kinds=kinds
    )
    return [KindRow(*row) for row in rows]


async def top_running(
    connection: Transaction, schema: str | None, *, cap: int, skipped: Sequence[int]
) -> dict[str, RunningRow]:
    """Return what each client runs, among the first `cap` running jobs. The key "" has the jobs
    without a known client. The clients of the `skipped` jobs are not read."""
    rows = await query("top", "top_running", schema).fetch(connection, cap=cap, skipped=skipped)
    return {row[0]: RunningRow(row[1], row[2]) for row in rows}


async def top_queue_names(connection: Transaction, schema: str | None, *, limit: int) -> list[str]:
    """Return the queues that have a row or unfinished jobs, up to `limit` of each."""
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
    """Return the unfinished jobs of each queue. A job counts as late `late` after it should have
    become available. Errors of the `skipped` jobs are not read."""
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


async def top_ended(
    connection: Transaction,
    schema: str | None,
    *,
    window: timedelta,
    cap: int,
    skipped: Sequence[int],
) -> list[EndedRow]:
    """Return what ended in each queue within `window`. The time is shorter if more than `cap` jobs
    of a state ended. If no job ended there is one row without a queue. Errors of the `skipped` jobs
    are not read."""
    rows = await query("top", "top_ended", schema).fetch(
        connection, window=window.total_seconds(), cap=cap, skipped=skipped
    )
    return [EndedRow(*row) for row in rows]


async def top_totals(connection: Transaction, schema: str | None, *, cap: int) -> dict[str, int]:
    """Return the number of pending and finished jobs, by state."""
    rows = await query("top", "top_totals", schema).fetch(connection, cap=cap)
    return {row[0]: row[1] for row in rows}


def _slots(text: str | None) -> list[int] | None:
    return None if text is None else msgspec.json.decode(text, type=list[int])
