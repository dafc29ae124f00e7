"""The statements on periodic jobs: one typed function per SQL statement in
`sql/queries/riverpy_periodic.sql`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from riverpy._postgres.driver import UndefinedTableError
from riverpy._postgres.sql_files import query, values_by_field
from riverpy.errors import NotFoundError, SchemaMissingError
from riverpy.periodic import PeriodicJobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction

ResultT = TypeVar("ResultT")

EVENT_TOPIC = "riverpy_event"
CHANGED_ACTION = "periodic_changed"
TABLE_MISSING = (
    "the database lacks the table of periodic jobs: run `riverpy migrate up --line riverpy` on it"
)

_FILE = "riverpy_periodic"


class PeriodicRegistration(NamedTuple):
    """A periodic job of this client, as it is stored."""

    id: str
    schedule: str
    next_run_at: datetime | None
    """The next time of the schedule. It is stored if the row is new or has another schedule."""


class PeriodicRow(NamedTuple):
    """The row of a periodic job. A slot is one time of its schedule."""

    id: str
    next_run_at: datetime | None
    run_requested_at: datetime | None
    is_paused: bool
    resumed_at: datetime | None
    """When the periodic job was last resumed. Earlier slots get no job."""
    read_at: datetime
    """The server's time when the row was read."""
    due_in: float | None
    """Seconds until `next_run_at`."""


class NextSlotChange(NamedTuple):
    """A change of the next slot in a row. The change is made only if the other fields still match
    the row."""

    id: str
    slot: datetime | None
    requested_at: datetime | None
    is_paused: bool
    next_run_at: datetime | None
    """The new time of the next slot."""


async def periodic_exists(connection: Transaction, schema: str | None) -> bool:
    """Whether the table of periodic jobs exists."""
    return await query(_FILE, "periodic_exists", schema).fetchval(connection, schema=schema)


async def periodic_now(connection: Transaction) -> datetime:
    """Return the server's time."""
    return await query(_FILE, "periodic_now", None).fetchval(connection)


async def periodic_list(connection: Transaction, schema: str | None) -> list[PeriodicJobState]:
    """Return all rows, by id. Raise SchemaMissingError if the table is missing."""
    rows = await _require_table(query(_FILE, "periodic_list", schema).fetch(connection))
    return [PeriodicJobState(**row) for row in rows]


async def periodic_get(
    connection: Transaction, schema: str | None, job_id: str
) -> PeriodicJobState:
    """Return one row.

    Raises:
        NotFoundError: no row has this id; the text has similar ids.
        SchemaMissingError: the table is missing.
    """
    statement = query(_FILE, "periodic_get", schema)
    row = await _require_table(statement.fetchrow(connection, id=job_id))
    if row is None:
        raise await _not_found_error(connection, schema, job_id)
    return PeriodicJobState(**row)


async def periodic_register(
    connection: Transaction,
    schema: str | None,
    registrations: Sequence[PeriodicRegistration],
    *,
    first: Sequence[str],
    each: Sequence[str],
) -> set[str]:
    """Insert or update rows. Jobs in `first` run at once if their row is new. Jobs in `each` run at
    once unless they are paused. Return the ids of the rows that were not locked."""
    rows = await query(_FILE, "periodic_register", schema).fetch(
        connection, **values_by_field(registrations), first=first, each=each
    )
    return {row[0] for row in rows}


async def periodic_due(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> list[PeriodicRow]:
    """Return the given rows that have a next slot or a requested run, earliest first."""
    rows = await query(_FILE, "periodic_due", schema).fetch(connection, id=ids)
    return [PeriodicRow(*row) for row in rows]


async def periodic_store_next_slots(
    connection: Transaction, schema: str | None, advances: Sequence[NextSlotChange]
) -> set[str]:
    """Store the new next slots, in the transaction that inserts the jobs. Return the ids of the
    changed rows. Rows that another session has changed since the read are left out."""
    statement = query(_FILE, "periodic_store_next_slots", schema)
    rows = await statement.fetch(connection, **values_by_field(advances))
    return {row[0] for row in rows}


async def periodic_store_last_runs(
    connection: Transaction, schema: str | None, ran: Mapping[str, datetime]
) -> None:
    """Store the slot of the newest inserted job of each id, in the transaction of
    `periodic_store_next_slots`."""
    await query(_FILE, "periodic_store_last_runs", schema).execute(
        connection, id=list(ran), ran_at=list(ran.values())
    )


async def periodic_mark_used(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> None:
    """Store that these rows are in use now."""
    await query(_FILE, "periodic_mark_used", schema).execute(connection, id=ids)


async def periodic_unused(
    connection: Transaction,
    schema: str | None,
    *,
    used: Sequence[str],
    age: timedelta,
    after: str,
    limit: int,
) -> list[str]:
    """Return up to `limit` ids after `after` that no client has used for `age`. Ids in `used` are
    left out."""
    rows = await query(_FILE, "periodic_unused", schema).fetch(
        connection, used=used, age=age, after=after, limit=limit
    )
    return [row[0] for row in rows]


async def periodic_delete_unused(
    connection: Transaction, schema: str | None, *, ids: Sequence[str], age: timedelta
) -> set[str]:
    """Delete the given rows, except rows that are locked or were used within `age`. Return the ids
    of the deleted rows."""
    rows = await query(_FILE, "periodic_delete_unused", schema).fetch(connection, age=age, id=ids)
    return {row[0] for row in rows}


async def periodic_pause(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Pause a periodic job: no job is inserted for its slots.

    Raises:
        NotFoundError: no leader has registered the id; the text has similar ids.
        SchemaMissingError: the table is missing.
    """
    await _change_row(connection, schema, "periodic_pause", job_id)


async def periodic_resume(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Undo `periodic_pause`. Raises the same errors."""
    await _change_row(connection, schema, "periodic_resume", job_id)


async def periodic_run(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Request that the leader inserts a job now. Raises the same errors as `periodic_pause`."""
    await _change_row(connection, schema, "periodic_run", job_id)


async def _change_row(connection: Transaction, schema: str | None, block: str, job_id: str) -> None:
    statement = query(_FILE, block, schema)
    if not await _require_table(statement.fetch(connection, id=job_id)):
        raise await _not_found_error(connection, schema, job_id)
    await query(_FILE, "periodic_notify", schema).execute(connection, id=job_id)


async def _not_found_error(
    connection: Transaction, schema: str | None, job_id: str
) -> NotFoundError:
    rows = await query(_FILE, "periodic_ids", schema).fetch(connection)
    near = get_close_matches(job_id, [row[0] for row in rows], n=3, cutoff=0.5)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else "`riverpy periodic list` shows those that leaders have registered"
    )
    return NotFoundError(f"there is no periodic job {job_id!r}: {hint}")


async def _require_table(answer: Awaitable[ResultT]) -> ResultT:
    """Await a statement. Raise SchemaMissingError if the table is missing."""
    try:
        return await answer
    except UndefinedTableError:
        raise SchemaMissingError(TABLE_MISSING) from None
