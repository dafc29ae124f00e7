"""The statements on periodic jobs: one typed function per SQL statement in
`sql/queries/riverpy_periodic.sql`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from riverpy._names import PERIODIC_RUN_METADATA_KEY
from riverpy._postgres.driver import UndefinedTableError
from riverpy._postgres.sql_files import get_query, lists_by_field
from riverpy.errors import NotFoundError, SchemaMissingError
from riverpy.periodic import PeriodicJobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from datetime import timedelta

    from riverpy._postgres.driver import Transaction

ResultT = TypeVar("ResultT")
RunCause: TypeAlias = Literal["schedule", "request", "start"]
"""Why the leader inserted a job. `schedule`: a time of the schedule was due. `request`: a caller
requested the run. `start`: the periodic job has `run_on_start`."""

RIVERPY_EVENT_TOPIC = "riverpy_event"
"""The topic of these notifications of riverpy: jobs become due, a periodic job has changed, or
queues belong to another leader domain."""
PERIODIC_CHANGED_ACTION = "periodic_changed"
PERIODIC_TABLE_MISSING_MESSAGE = (
    "the database lacks the table of periodic jobs: run `riverpy migrate up --line riverpy` on it"
)

_SQL_FILE = "riverpy_periodic"


class PeriodicInsertReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the leader inserted a job for a periodic job. The leader stores this reason as JSON in
    the metadata of the inserted job."""

    cause: RunCause
    due_at: datetime
    """The time of the schedule, or the time of the request."""
    user: str | None = None
    """The user who requested the run. None: not known."""


class RunRequest(msgspec.Struct, frozen=True):
    """Who or what requested a run of a periodic job. It is stored as JSON in the column
    `run_request` of the periodic job's row."""

    cause: Literal["request", "start"]
    at: datetime
    user: str | None = None


class PeriodicRegistration(NamedTuple):
    """A periodic job of this client, whose row is to be inserted or updated."""

    id: str
    schedule: str
    next_run_at: datetime | None
    """The next time of the schedule. It is stored only if the row is new or its schedule
    has changed."""


class PeriodicRow(NamedTuple):
    """The row of a periodic job. A due time is a time of its schedule."""

    id: str
    next_run_at: datetime | None
    run_requested_at: datetime | None
    is_paused: bool
    resumed_at: datetime | None
    """When the periodic job was last resumed. No job is inserted for earlier due times."""
    read_at: datetime
    """The server's time when the row was read."""
    seconds_until_next_run: float | None
    """Seconds until `next_run_at`."""
    run_request_json: str | None
    """The last stored `RunRequest` as JSON. It may belong to an earlier run. None: not known."""

    def find_reason_of_requested_run(self, requested_at: datetime) -> PeriodicInsertReason | None:
        """Return why, and by which user, the run at `requested_at` was requested. Return None if
        this is not known: the column is missing, or the client that requested the run stored no
        reason."""
        if self.run_request_json is None:
            return None
        try:
            request = msgspec.json.decode(self.run_request_json, type=RunRequest)
            if request.at < requested_at:
                return None
        except (msgspec.MsgspecError, TypeError):  # a time without a zone cannot be compared
            return None
        return PeriodicInsertReason(request.cause, requested_at, request.user)


class NextRunUpdate(NamedTuple):
    """An update that stores the next time of the schedule in a periodic job's row. The update is
    skipped if the row no longer has the values of the three fields `expected_…`."""

    id: str
    expected_next_run_at: datetime | None
    expected_run_requested_at: datetime | None
    expected_is_paused: bool
    new_next_run_at: datetime | None
    """The next time of the schedule, which is stored as `next_run_at`."""


class _MetadataWithInsertReason(msgspec.Struct):
    """The part of a job's metadata that contains the PeriodicInsertReason."""

    run: PeriodicInsertReason | None = msgspec.field(name=PERIODIC_RUN_METADATA_KEY, default=None)


def decode_periodic_insert_reason(json_text: str) -> PeriodicInsertReason | None:
    """Decode a PeriodicInsertReason from JSON text. Return None if the text is not valid."""
    try:
        return msgspec.json.decode(json_text, type=PeriodicInsertReason)
    except msgspec.MsgspecError:
        return None


def find_periodic_insert_reason(metadata_json: str) -> PeriodicInsertReason | None:
    """Read from a job's metadata why the leader inserted the job for a periodic job. Return None if
    the metadata contain no valid reason."""
    try:
        return msgspec.json.decode(metadata_json, type=_MetadataWithInsertReason).run
    except (msgspec.MsgspecError, RecursionError):
        return None


async def periodic_table_exists(connection: Transaction, schema: str | None) -> bool:
    """Whether the table of periodic jobs exists."""
    return await get_query(_SQL_FILE, "periodic_exists", schema).fetchval(connection, schema=schema)


async def periodic_list(connection: Transaction, schema: str | None) -> list[PeriodicJobState]:
    """Return all periodic jobs, sorted by id. Raise SchemaMissingError if their table is
    missing."""
    rows = await _await_and_translate_missing_table(
        get_query(_SQL_FILE, "periodic_list", schema).fetch(connection)
    )
    return [PeriodicJobState(**row) for row in rows]


async def periodic_get(
    connection: Transaction, schema: str | None, job_id: str
) -> PeriodicJobState:
    """Return the periodic job with this id.

    Raises:
        NotFoundError: no row has this id. The text of the error lists similar ids.
        SchemaMissingError: the table of periodic jobs is missing.
    """
    statement = get_query(_SQL_FILE, "periodic_get", schema)
    row = await _await_and_translate_missing_table(statement.fetchrow(connection, id=job_id))
    if row is None:
        raise await _make_not_found_error(connection, schema, job_id)
    return PeriodicJobState(**row)


async def periodic_register(
    connection: Transaction,
    schema: str | None,
    registrations: Sequence[PeriodicRegistration],
    *,
    run_if_new_ids: Sequence[str],
    run_now_ids: Sequence[str],
) -> set[str]:
    """Insert or update the rows of periodic jobs. Jobs in `run_if_new_ids` run at once if their row
    is new. Jobs in `run_now_ids` run at once unless they are paused. Return the ids of the written
    rows. Locked rows are left out. Call this in a transaction."""
    rows = await get_query(_SQL_FILE, "periodic_register", schema).fetch(
        connection, **lists_by_field(registrations), first=run_if_new_ids, each=run_now_ids
    )
    if ids := [*run_if_new_ids, *run_now_ids]:
        await _store_run_requesters(connection, schema, ids, "start", None)
    return {row[0] for row in rows}


async def periodic_list_scheduled(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> list[PeriodicRow]:
    """Return the rows with these ids that have a next due time or a requested run, ordered by the
    next due time."""
    rows = await get_query(_SQL_FILE, "periodic_due", schema).fetch(connection, id=ids)
    return [PeriodicRow(*row) for row in rows]


async def periodic_store_next_runs(
    connection: Transaction, schema: str | None, updates: Sequence[NextRunUpdate]
) -> set[str]:
    """Store the next times of the schedules. Return the ids of the changed rows. Rows that another
    session has changed since they were read are left out. Call this in the transaction that inserts
    the jobs."""
    statement = get_query(_SQL_FILE, "periodic_store_next_due_times", schema)
    rows = await statement.fetch(connection, **lists_by_field(updates))
    return {row[0] for row in rows}


async def periodic_store_last_runs(
    connection: Transaction, schema: str | None, last_runs: Mapping[str, datetime]
) -> None:
    """For each id, store the time of the schedule for which the last job was inserted. Call this in
    the transaction of `periodic_store_next_runs`."""
    await get_query(_SQL_FILE, "periodic_store_last_runs", schema).execute(
        connection, id=list(last_runs), ran_at=list(last_runs.values())
    )


async def periodic_mark_used(
    connection: Transaction, schema: str | None, ids: Sequence[str]
) -> None:
    """Store that the rows with these ids are in use now. Unused rows are deleted later."""
    await get_query(_SQL_FILE, "periodic_mark_used", schema).execute(connection, id=ids)


async def periodic_list_unused(
    connection: Transaction,
    schema: str | None,
    *,
    used_ids: Sequence[str],
    unused_for: timedelta,
    after_id: str,
    limit: int,
) -> list[str]:
    """Return up to `limit` ids of periodic jobs that no client has used for `unused_for`, sorted.
    The list starts after `after_id`. Paused periodic jobs and ids in `used_ids` are left out."""
    rows = await get_query(_SQL_FILE, "periodic_unused", schema).fetch(
        connection, used=used_ids, age=unused_for, after=after_id, limit=limit
    )
    return [row[0] for row in rows]


async def periodic_delete_unused(
    connection: Transaction, schema: str | None, *, ids: Sequence[str], unused_for: timedelta
) -> set[str]:
    """Delete the rows with these ids that no client has used for `unused_for`. Paused and locked
    rows are left out. Return the ids of the deleted rows."""
    rows = await get_query(_SQL_FILE, "periodic_delete_unused", schema).fetch(
        connection, age=unused_for, id=ids
    )
    return {row[0] for row in rows}


async def periodic_pause(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Pause a periodic job. While it is paused, no job is inserted for its due times.

    Raises:
        NotFoundError: no leader has registered the id. The text of the error lists similar ids.
        SchemaMissingError: the table of periodic jobs is missing.
    """
    await _change_periodic_job(connection, schema, "periodic_pause", job_id)


async def periodic_resume(connection: Transaction, schema: str | None, job_id: str) -> None:
    """Resume a paused periodic job. This raises the same errors as `periodic_pause`."""
    await _change_periodic_job(connection, schema, "periodic_resume", job_id)


async def periodic_request_run(
    connection: Transaction, schema: str | None, job_id: str, *, user: str | None = None
) -> None:
    """Request that the leader inserts a job for this periodic job now. `user` is the name of the
    user who requests the run. None: not known. Call this in a transaction. This raises the same
    errors as `periodic_pause`."""
    await _change_periodic_job(connection, schema, "periodic_run", job_id)
    await _store_run_requesters(connection, schema, [job_id], "request", user)


async def _store_run_requesters(
    connection: Transaction,
    schema: str | None,
    ids: Sequence[str],
    cause: Literal["request", "start"],
    user: str | None,
) -> None:
    """Store the cause and the user of the runs that this transaction has requested for these
    periodic jobs. Runs that were requested before keep what is stored for them. If
    RUN_REQUESTS_MIGRATION is missing, do nothing."""
    has_column = get_query(_SQL_FILE, "periodic_has_run_requests", None)
    if await has_column.fetchval(connection, schema=schema):
        await get_query(_SQL_FILE, "periodic_note_run_requests", schema).execute(
            connection, id=ids, cause=cause, user=user
        )


async def _change_periodic_job(
    connection: Transaction, schema: str | None, statement_name: str, job_id: str
) -> None:
    statement = get_query(_SQL_FILE, statement_name, schema)
    if not await _await_and_translate_missing_table(statement.fetch(connection, id=job_id)):
        raise await _make_not_found_error(connection, schema, job_id)
    await get_query(_SQL_FILE, "periodic_notify", schema).execute(connection, id=job_id)


async def _make_not_found_error(
    connection: Transaction, schema: str | None, job_id: str
) -> NotFoundError:
    from difflib import get_close_matches

    rows = await get_query(_SQL_FILE, "periodic_ids", schema).fetch(connection)
    near = get_close_matches(job_id, [row[0] for row in rows], n=3, cutoff=0.5)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else "`riverpy periodic list` shows those that leaders have registered"
    )
    return NotFoundError(f"there is no periodic job {job_id!r}: {hint}")


async def _await_and_translate_missing_table(statement_result: Awaitable[ResultT]) -> ResultT:
    """Await a statement and return its result. Raise SchemaMissingError if the table is missing."""
    try:
        return await statement_result
    except UndefinedTableError:
        raise SchemaMissingError(PERIODIC_TABLE_MISSING_MESSAGE) from None
