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
    """When a look was taken."""

    at: datetime
    about: int | None
    """Jobs in the table, as of its last analyze; None: it was never analyzed."""


class ClientRow(NamedTuple):
    """A client of riverpy's."""

    client_id: str
    version: str
    queues: list[str]
    candidate: bool
    """Whether it takes part in leader election, and is not stopping."""
    started_at: datetime
    silent_for: float
    """Seconds since its last heartbeat, by the server's clock; below zero if that was set back."""
    is_silent: bool
    """Whether that is longer than its own `dead_after`."""
    stuck: int
    """How many jobs it calls stuck."""
    slots: list[int] | None
    """In the order of its queues. None: not known."""
    is_stopping: bool
    aside: int
    """How many rows it has set aside."""


class KindRow(NamedTuple):
    """A kind of available jobs that no running client has a worker for."""

    kind: str
    jobs: int
    """Of those that were read."""
    queues: list[str]


class RunningRow(NamedTuple):
    """What a client runs."""

    jobs: int
    longest: float
    """Seconds that the longest one runs."""


class QueueRow(NamedTuple):
    """A queue's jobs. Numbers of jobs stop at the cap."""

    name: str
    is_paused: bool
    available: int
    running: int
    scheduled: int
    retryable: int
    late: int
    """Scheduled ones and retries that nobody made available in time."""
    due_at: datetime | None
    """Since when the oldest due job waits; None: none is due."""
    started: int
    """Attempts at jobs that are not at their end, since the time asked for."""
    failed: int
    """Of those that are not at their end, since the time asked for."""


class EndedRow(NamedTuple):
    """What ended in a queue, of late."""

    since: datetime
    seconds: float
    """How long ago that is."""
    queue: str | None
    """None: nothing ended anywhere."""
    completed: int
    started: int
    failed: int
    wait_p95: float | None
    """Seconds between due and started that 95 % of those that started did not exceed."""


async def top_limits(connection: Transaction, limit: timedelta) -> None:
    """Let the server end each statement of this transaction after `limit`."""
    statement = query("top", "top_limits", None)
    await connection.execute(
        statement.text, *statement.arguments({"milliseconds": round(limit.total_seconds() * 1000)})
    )


async def top_moment(connection: Transaction, schema: str | None) -> Moment:
    """The server's time, and the size of the table."""
    statement = query("top", "top_moment", schema)
    (row,) = await connection.fetch(statement.text, *statement.arguments({"schema": schema}))
    return Moment(*row)


async def top_clients(
    connection: Transaction, schema: str | None, *, limit: int
) -> list[ClientRow]:
    """Up to `limit` clients of riverpy's, the silent ones last."""
    statement = query("top", "top_clients", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"limit": limit}))
    return [
        ClientRow(
            *row[:-3],
            slots=_slots(row["slots"]),
            is_stopping=row["is_stopping"],
            aside=row["aside"],
        )
        for row in rows
    ]


async def top_kinds(
    connection: Transaction, schema: str | None, *, names: Sequence[str], limit: int, kinds: int
) -> list[KindRow]:
    """Up to `kinds` kinds without a running client, among the first `limit` available jobs of each
    of these queues."""
    statement = query("top", "top_kinds", schema)
    values: dict[str, object] = {"names": list(names), "limit": limit, "kinds": kinds}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [KindRow(*row) for row in rows]


async def top_running(
    connection: Transaction, schema: str | None, *, cap: int, skipped: Sequence[int]
) -> dict[str, RunningRow]:
    """What each client runs, among the first `cap` running jobs; "" for those that tell no client.
    The clients of the `skipped` jobs are not read."""
    statement = query("top", "top_running", schema)
    values: dict[str, object] = {"cap": cap, "skipped": skipped}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: RunningRow(row[1], row[2]) for row in rows}


async def top_queue_names(connection: Transaction, schema: str | None, *, limit: int) -> list[str]:
    """The queues that have a row, or jobs that are not at their end, up to `limit` of each."""
    statement = query("top", "top_queue_names", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"limit": limit}))
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
    """The jobs of each of the queues that are not at their end. What should have been made
    available `late` ago counts as late. Errors of the `skipped` jobs are not read."""
    statement = query("top", "top_queues", schema)
    values: dict[str, object] = {
        "name": names,
        "since": since,
        "since_text": since.isoformat()[:19],
        "late": late.total_seconds(),
        "cap": cap,
        "skipped": skipped,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [QueueRow(*row) for row in rows]


async def top_ended(
    connection: Transaction,
    schema: str | None,
    *,
    window: timedelta,
    cap: int,
    skipped: Sequence[int],
) -> list[EndedRow]:
    """What ended in each queue within `window`, or in that part of it of which `cap` jobs of a
    state are the newest; one row without a queue if nothing did. Errors of the `skipped` jobs are
    not read."""
    statement = query("top", "top_ended", schema)
    values: dict[str, object] = {
        "window": window.total_seconds(),
        "cap": cap,
        "skipped": skipped,
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [EndedRow(*row) for row in rows]


async def top_totals(connection: Transaction, schema: str | None, *, cap: int) -> dict[str, int]:
    """How many jobs are pending or at their end, by state."""
    statement = query("top", "top_totals", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"cap": cap}))
    return {row[0]: row[1] for row in rows}


def _slots(text: str | None) -> list[int] | None:
    return None if text is None else msgspec.json.decode(text, type=list[int])
