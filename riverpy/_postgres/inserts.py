"""The statements that insert jobs: one typed function per SQL statement in
`sql/queries/river_job_insert.sql`."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._names import EXPIRES_AT_METADATA_KEY
from riverpy._postgres.driver import PostgresError
from riverpy._postgres.sql_files import get_query, lists_by_field
from riverpy._timestamps import PG_EPOCH, decode_wire_microseconds, format_raw_timestamp
from riverpy.errors import InsertError
from riverpy.insert_opts import InsertResult
from riverpy.job import JobColumn, JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from asyncpg import Record

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy._postgres.sql_files import Query

_SQL_FILE = "river_job_insert"
_INTEGER_COLUMNS = (JobColumn.ID, JobColumn.ATTEMPT, JobColumn.MAX_ATTEMPTS, JobColumn.PRIORITY)
_HEX_TEXT_COLUMNS = (
    JobColumn.ATTEMPTED_AT,
    JobColumn.CREATED_AT,
    JobColumn.FINALIZED_AT,
    JobColumn.SCHEDULED_AT,
    JobColumn.UNIQUE_KEY,
)
_DUPLICATE_COLUMN = JobColumn.UNIQUE_STATES + 1
_NOTIFIED_COUNT_COLUMN = JobColumn.UNIQUE_STATES + 2
_NOTIFIED_COUNT_COLUMN_WITHOUT_DUPLICATE = JobColumn.UNIQUE_STATES + 1
_JOB_LEFT_OUT_ERROR_TEXT = "riverpy: jobs left out by a trigger"
"""The text in the error of the statement `job_insert_shared` if a trigger prevents the insert of a
job."""
_WAITING_STATES = (
    JobState.AVAILABLE,
    JobState.PENDING,
    JobState.RETRYABLE,
    JobState.SCHEDULED,
)
_COPY_BATCH_ROW_COUNT = 500
"""The number of jobs that are encoded for COPY at a time."""
_COPY_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})


class InsertPreventedByTriggerError(InsertError):
    """A trigger of the user has prevented the insert of a job. No job of the statement was
    stored."""

    def __init__(self) -> None:
        super().__init__(
            "a trigger of river_job has left out a job, so no job of this call was inserted: let "
            "the trigger return the row or raise an error"
        )


class InsertRow(NamedTuple):
    """The values of one job to insert. All values are texts, because a connection of the caller may
    have its own codecs for other types."""

    args: str
    unique_key: str | None
    """The unique key in hexadecimal digits. None: the job is not unique."""
    expires_in: str | None
    """The microseconds from the insert until the job expires, as text. None: it does not expire."""
    replace: str | None
    """The fields to replace in an existing job that has the same unique key, as a JSON object. Each
    field to replace has the value true. The object may also have `max_wait`: the value of
    `ReplaceOpts.max_wait` in microseconds. None: nothing is replaced."""
    kind: str
    metadata: str
    queue: str
    priority: str
    max_attempts: str
    state: str
    tags: str
    """The tags, joined by commas. A tag has no comma."""
    unique_states: str | None
    """The states in which jobs must not have the same unique key, as the eight bits of the column
    `unique_states`. None: the job is not unique."""
    scheduled_at: str | None
    """When the job is due, as text. None: now. This is the last field, because COPY may omit it."""

    def is_plain(self) -> bool:
        """Whether the job has no unique key, does not expire and replaces no job."""
        return self.unique_key is None and self.expires_in is None and self.replace is None

    def values_except_args_and_unique_key(self) -> tuple[object, ...]:
        """Return all values except args and unique key. These values are often equal for all jobs
        of a batch."""
        return self[2:]


class QueuesToNotify(NamedTuple):
    """The queues whose clients an insert notifies."""

    queues: list[str]
    interval_ms: int = 0
    """For this many milliseconds after the notification, the sender may insert more jobs into these
    queues without another notification; see `NotificationMessage.notify_interval_ms`."""

    def make_statement_arguments(self) -> dict[str, object]:
        """Return the queues and the interval as arguments of a statement that notifies."""
        return {"notify": self.queues, "notify_interval": str(self.interval_ms)}


def list_queues_with_due_jobs(rows: Iterable[InsertRow]) -> list[str]:
    """Return the queues in which a job may be due after the insert of these rows. This includes the
    queue of a row whose `replace` is set: the row may change an existing job so that it becomes
    due."""
    return list(
        dict.fromkeys(
            [
                row.queue
                for row in rows
                if row.state == JobState.AVAILABLE or row.replace is not None
            ]
        )
    )


async def job_insert(
    connection: Transaction,
    schema: str | None,
    rows: Sequence[InsertRow],
    *,
    to_notify: QueuesToNotify,
) -> tuple[list[InsertResult], int]:
    """Insert jobs in one statement that also notifies the clients of `to_notify`. Return the
    results in the order of the rows, and the number of notified queues."""
    if len(rows) == 1 and rows[0].is_plain():
        return await _insert_plain_job(connection, schema, rows[0], to_notify)
    shared_values = rows[0].values_except_args_and_unique_key()
    if all(row.values_except_args_and_unique_key() == shared_values for row in rows[1:]):
        name, values = "job_insert", rows[0]._asdict()
        is_general = rows[0].expires_in is not None or rows[0].replace is not None
    else:
        columns: map[Any] = map(list, zip(*rows, strict=True))
        name, values = "job_insert_mixed", dict(zip(InsertRow._fields, columns, strict=True))
        is_general = any(values["expires_in"]) or any(values["replace"])
    if is_general:
        return await _insert_with_general_statement(connection, schema, rows, to_notify)
    del values["expires_in"], values["replace"]
    values["args"] = [row.args for row in rows]
    values["unique_key"] = [row.unique_key for row in rows]
    records = await get_query(_SQL_FILE, name, schema).fetch(
        connection, **values, **to_notify.make_statement_arguments()
    )
    results = [
        InsertResult(_job_from_record(record), record[_DUPLICATE_COLUMN] == "t")
        for record in records
    ]
    return results, int(records[0][_NOTIFIED_COUNT_COLUMN])


async def _insert_plain_job(
    connection: Transaction, schema: str | None, row: InsertRow, to_notify: QueuesToNotify
) -> tuple[list[InsertResult], int]:
    """Insert one job for which `is_plain` is true; see `job_insert`."""
    query = get_query(_SQL_FILE, "job_insert_plain", schema)
    record = await connection.fetchrow(
        query.text, *_list_plain_job_arguments(query, row, to_notify)
    )
    if record is None:
        raise InsertPreventedByTriggerError
    result = InsertResult(_job_from_record(record), False)
    return [result], int(record[_NOTIFIED_COUNT_COLUMN_WITHOUT_DUPLICATE])


def _list_plain_job_arguments(
    query: Query, row: InsertRow, to_notify: QueuesToNotify
) -> tuple[object, ...]:
    """Return the arguments of a statement that inserts one job. `row.is_plain()` must be true: the
    job has no unique key, does not expire and replaces no job."""
    read_values = _make_row_values_reader(query.parameters)
    return (*read_values(row), to_notify.queues, str(to_notify.interval_ms))


@cache
def _make_row_values_reader(
    parameters: tuple[str, ...],
) -> Callable[[InsertRow], tuple[object, ...]]:
    """Return a function that reads the values for these parameters from a row. This is faster than
    making a dict of the row. The last two parameters are for the notification, and are not read
    from the row."""
    return attrgetter(*parameters[:-2])


async def job_insert_for_several_calls(
    connection: Connection,
    schema: str | None,
    rows: Sequence[InsertRow],
    *,
    to_notify: QueuesToNotify,
    timeout: float,
) -> tuple[list[InsertResult], int]:
    """Insert jobs of one or more calls in one statement that also notifies the clients of
    `to_notify`. The jobs have no unique keys. `connection` is a connection of riverpy, which reads
    timestamps as integers. Return the results in the order of the rows, and the number of notified
    queues.

    Raises:
        InsertPreventedByTriggerError: a trigger of the table has prevented the insert of a
            job. No job was inserted.
    """
    if len(rows) == 1 and rows[0].is_plain() and to_notify.queues in ([], [rows[0].queue]):
        query = get_query(_SQL_FILE, "job_insert_one", schema)  # faster than with arrays
        arguments = _list_plain_job_arguments(query, rows[0], to_notify)
    else:
        query = get_query(_SQL_FILE, "job_insert_shared", schema)
        values = lists_by_field(rows) | to_notify.make_statement_arguments()
        arguments = tuple(values[name] for name in query.parameters)
    try:
        records = await connection.fetch(query.text, *arguments, timeout=timeout)
    except PostgresError as error:
        if _JOB_LEFT_OUT_ERROR_TEXT in str(error):
            raise InsertPreventedByTriggerError from error
        raise
    if not records:
        raise InsertPreventedByTriggerError
    return [
        InsertResult(JobRow(record[:_NOTIFIED_COUNT_COLUMN_WITHOUT_DUPLICATE]), False)
        for record in records
    ], int(records[0][_NOTIFIED_COUNT_COLUMN_WITHOUT_DUPLICATE])


async def _insert_with_general_statement(
    connection: Transaction,
    schema: str | None,
    rows: Sequence[InsertRow],
    to_notify: QueuesToNotify,
) -> tuple[list[InsertResult], int]:
    """Insert jobs with the slower statement that supports `expires_in` and `replace`; see
    `job_insert`."""
    columns: map[Any] = map(list, zip(*rows, strict=True))
    values: dict[str, Any] = dict(zip(InsertRow._fields, columns, strict=True))
    members = [f'"{row.unique_key}":{row.replace}' for row in rows if row.replace is not None]
    values["replace"] = f"{{{','.join(members)}}}"
    records = await get_query(_SQL_FILE, "job_insert_general", schema).fetch(
        connection, **values, **to_notify.make_statement_arguments()
    )
    results: list[InsertResult] = []
    for row, record in zip(rows, records, strict=True):
        job, is_duplicate = _job_from_record(record), record[_DUPLICATE_COLUMN] == "t"
        # The statement replaces values only of a waiting job, and the job still waits afterwards.
        is_replaced = is_duplicate and row.replace is not None and job.state in _WAITING_STATES
        results.append(InsertResult(job, is_duplicate, is_replaced))
    return results, int(records[0][_NOTIFIED_COUNT_COLUMN])


def _job_from_record(record: Record) -> JobRow:
    """Return a job from a record whose values are text."""
    row = [*record[:_DUPLICATE_COLUMN]]
    for column in _INTEGER_COLUMNS:
        row[column] = int(row[column])
    for column in _HEX_TEXT_COLUMNS:
        if row[column] is not None:
            row[column] = bytes.fromhex(row[column])
    mask = row[JobColumn.UNIQUE_STATES]
    if mask is not None:
        row[JobColumn.UNIQUE_STATES] = int(mask, 2)
    return JobRow(row)


async def notify_queues_of_inserts(
    connection: Transaction, schema: str | None, to_notify: QueuesToNotify
) -> int:
    """Notify the clients of these queues that jobs were inserted. Return the number of notified
    queues."""
    notify = get_query("river_notification", "insert_notify", schema)
    return len(await notify.fetch(connection, **to_notify.make_statement_arguments()))


async def job_insert_with_copy(
    connection: Transaction, schema: str | None, rows: Sequence[InsertRow], *, timeout: float
) -> None:
    """Insert jobs with COPY in text format, which does not depend on the connection's codecs."""
    columns = [name for name in InsertRow._fields if name not in ("expires_in", "replace")]
    now = None
    if any(row.scheduled_at or row.expires_in for row in rows):
        digits = await get_query(_SQL_FILE, "insert_now", None).fetchval(connection)
        now = decode_wire_microseconds(bytes.fromhex(digits))
    else:
        columns = columns[:-1]
    await connection.copy_to_table(
        "river_job",
        schema_name=schema,
        columns=columns,
        source=_iterate_copy_lines(rows, now),
        format="text",
        timeout=timeout,
    )


async def _iterate_copy_lines(rows: Sequence[InsertRow], now: int | None) -> AsyncGenerator[bytes]:
    ends: dict[tuple[object, ...], str] = {}
    """A cache of encoded line ends. The end of a COPY line has all values except args and unique
    key. If these values are equal for several jobs, the end is encoded only once."""
    for start in range(0, len(rows), _COPY_BATCH_ROW_COUNT):
        lines: list[str] = []
        for row in rows[start : start + _COPY_BATCH_ROW_COUNT]:
            shared_values = row.values_except_args_and_unique_key()
            if (end := ends.get(shared_values)) is None:
                end = ends[shared_values] = _encode_values_after_unique_key(row, now)
            key = r"\N" if row.unique_key is None else rf"\\x{row.unique_key}"
            lines.append(f"{row.args.translate(_COPY_ESCAPES)}\t{key}\t{end}\n")
        yield "".join(lines).encode()


def _encode_values_after_unique_key(row: InsertRow, now: int | None) -> str:
    """Encode the end of a COPY line: all values after the args and the unique key. `now` is the
    server's time in microseconds since 2000. None: omit the column `scheduled_at`, because no job
    of the COPY sets `scheduled_at` or expires."""
    tags = ",".join(f'"{tag}"' for tag in row.tags.split(",") if tag)
    row = row._replace(tags=f"{{{tags}}}")
    if now is not None:
        time = str(PG_EPOCH + timedelta(microseconds=now))
        row = row._replace(scheduled_at=row.scheduled_at or time)
        if row.expires_in is not None:
            row = row._replace(
                metadata=add_expiry_to_metadata(row.metadata, now + int(row.expires_in))
            )
    values = row[4:] if now is not None else row[4:-1]
    return "\t".join(r"\N" if value is None else value.translate(_COPY_ESCAPES) for value in values)


def add_expiry_to_metadata(metadata: str, expires_at: int) -> str:
    """Return the metadata, a JSON object as text, with the time at which the job expires."""
    separator = "" if metadata == "{}" else ","
    member = f'"{EXPIRES_AT_METADATA_KEY}":"{format_raw_timestamp(expires_at)}"'
    return f"{metadata[:-1]}{separator}{member}}}"
