"""One typed function per block of `sql/queries/riverpy_periodic.sql`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from riverpy._postgres.driver import UndefinedTableError
from riverpy._postgres.sql_files import query
from riverpy.errors import NotFoundError, SchemaMissingError
from riverpy.periodic import PeriodicJobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction

ResultT = TypeVar("ResultT")

EVENT_TOPIC = "riverpy_event"
CHANGED_ACTION = "periodic_changed"
MISSING = (
    "the database lacks the table of periodic jobs: run `riverpy migrate up --line riverpy` on it"
)

_FILE = "riverpy_periodic"


class Registration(NamedTuple):
    """A periodic job of this client."""

    id: str
    schedule: str
    next_run_at: datetime | None
    """Its next slot, if the row is new or had another schedule."""


class Look(NamedTuple):
    """How a row stands."""

    id: str
    next_run_at: datetime | None
    run_requested_at: datetime | None
    is_paused: bool
    resumed_at: datetime | None
    """Up to when its slots passed without a job."""
    looked_at: datetime
    """By the server's clock."""
    due_in: float | None
    """Seconds until `next_run_at`."""


class Advance(NamedTuple):
    """From where to where a row is moved."""

    id: str
    slot: datetime | None
    requested_at: datetime | None
    is_paused: bool
    next_run_at: datetime | None


async def periodic_is_there(connection: Transaction, schema: str | None) -> bool:
    """Whether the table exists."""
    statement = query(_FILE, "periodic_is_there", schema)
    found: bool = await connection.fetchval(
        statement.text, *statement.arguments({"schema": schema})
    )
    return found


async def periodic_now(connection: Transaction) -> datetime:
    """The server's time."""
    now: datetime = await connection.fetchval(query(_FILE, "periodic_now", None).text)
    return now


async def periodic_list(connection: Transaction, schema: str | None) -> list[PeriodicJobState]:
    """All that is known, by id.

    Raises:
        SchemaMissingError: the table is missing.
    """
    rows = await _expecting_table(connection.fetch(query(_FILE, "periodic_list", schema).text))
    return [PeriodicJobState(**row) for row in rows]


async def periodic_get(
    connection: Transaction, schema: str | None, job_id: str
) -> PeriodicJobState:
    """One row.

    Raises:
        NotFoundError: there is none; the text names ids that are alike.
        SchemaMissingError: the table is missing.
    """
    statement = query(_FILE, "periodic_get", schema)
    row = await _expecting_table(connection.fetchrow(statement.text, job_id))
    if row is None:
        raise await _not_found(connection, schema, job_id)
    return PeriodicJobState(**row)


async def periodic_register(
    connection: Transaction,
    schema: str | None,
    registrations: Sequence[Registration],
    *,
    first: Sequence[str],
    each: Sequence[str],
) -> set[str]:
    """Make or update rows; returns those that were not locked.

    Args:
        connection: in a fenced transaction.
        schema: that of River's tables.
        registrations: what this client has.
        first: ids that are to run when their row is made.
        each: ids that are to run now.
    """
    statement = query(_FILE, "periodic_register", schema)
    values = {**_columns(Registration._fields, registrations), "first": first, "each": each}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def periodic_look(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> list[Look]:
    """How these stand, the first due first; those with nothing to come are left out."""
    rows = await connection.fetch(query(_FILE, "periodic_look", schema).text, ids)
    return [Look(*row) for row in rows]


async def periodic_advance(
    connection: Transaction, schema: str | None, advances: Sequence[Advance]
) -> set[str]:
    """Move rows on, in the fenced transaction that inserts their jobs; returns those that were as
    they were seen."""
    statement = query(_FILE, "periodic_advance", schema)
    values = _columns(Advance._fields, advances)
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0] for row in rows}


async def periodic_ran(
    connection: Transaction, schema: str | None, ran: Mapping[str, datetime]
) -> None:
    """Store, in the transaction of `periodic_advance`, the slot of the newest job that was inserted
    for each id."""
    statement = query(_FILE, "periodic_ran", schema)
    values: dict[str, object] = {"id": list(ran), "ran_at": list(ran.values())}
    await connection.execute(statement.text, *statement.arguments(values))


async def periodic_keep(connection: Transaction, schema: str | None, ids: Sequence[str]) -> None:
    """Note, in a fenced transaction, that these are in use."""
    await connection.execute(query(_FILE, "periodic_keep", schema).text, ids)


async def periodic_unused(
    connection: Transaction,
    schema: str | None,
    *,
    used: Sequence[str],
    age: timedelta,
    after: str,
    limit: int,
) -> list[str]:
    """Up to `limit` ids behind `after`, but for the `used` ones, that no client has used for
    `age`."""
    statement = query(_FILE, "periodic_unused", schema)
    values: dict[str, object] = {"used": used, "age": age, "after": after, "limit": limit}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [row[0] for row in rows]


async def periodic_forget(
    connection: Transaction, schema: str | None, *, ids: Sequence[str], age: timedelta
) -> set[str]:
    """Delete, in a fenced transaction, those that are still unused and not locked; return their
    ids."""
    statement = query(_FILE, "periodic_forget", schema)
    rows = await connection.fetch(statement.text, *statement.arguments({"age": age, "id": ids}))
    return {row[0] for row in rows}


async def periodic_pause(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Let no job be inserted.

    Raises:
        NotFoundError: no leader has registered the id; the text names ids that are alike.
        SchemaMissingError: the table is missing.
    """
    await _change(connection, schema, "periodic_pause", job_id)


async def periodic_resume(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Undo `periodic_pause`; raises as it does."""
    await _change(connection, schema, "periodic_resume", job_id)


async def periodic_run(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Ask the leader for one run now; raises as `periodic_pause`."""
    await _change(connection, schema, "periodic_run", job_id)


async def _change(connection: Transaction, schema: str | None, block: str, job_id: str) -> None:
    statement = query(_FILE, block, schema)
    found = await _expecting_table(connection.fetch(statement.text, job_id))
    if not found:
        raise await _not_found(connection, schema, job_id)
    notify = query(_FILE, "periodic_notify", schema)
    await connection.execute(notify.text, job_id)


async def _not_found(connection: Transaction, schema: str | None, job_id: str) -> NotFoundError:
    rows = await connection.fetch(query(_FILE, "periodic_ids", schema).text)
    near = get_close_matches(job_id, [row[0] for row in rows], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "a leader registers them"
    return NotFoundError(f"there is no periodic job {job_id!r}: {hint}")


async def _expecting_table(answer: Awaitable[ResultT]) -> ResultT:
    try:
        return await answer
    except UndefinedTableError:
        raise SchemaMissingError(MISSING) from None


def _columns(names: Sequence[str], rows: Sequence[tuple[object, ...]]) -> dict[str, object]:
    columns = zip(*rows, strict=True)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
