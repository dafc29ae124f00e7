"""The COPY of `insert_many_fast`, in its text form, which no codec of a connection touches."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from riverpy._insert.errors import translated
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.sql_files import query
from riverpy._postgres.transactions import savepoint
from riverpy.errors import UniqueConflictError
from riverpy.job import timestamp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from riverpy._insert.row import InsertRow
    from riverpy._postgres.driver import Transaction

_FILE = "river_job_insert"
_ROWS = 500
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})
_UNIQUE_INDEX = "river_job_unique_idx"
_COLUMNS = (
    "args",
    "unique_key",
    "kind",
    "max_attempts",
    "metadata",
    "priority",
    "queue",
    "state",
    "tags",
    "unique_states",
)


async def copy_rows(
    connection: Transaction,
    rows: list[InsertRow],
    queues: list[str],
    *,
    schema: str | None,
    timeout: float,
    notified: Callable[[list[str], int], None],
) -> int:
    """Insert all rows or none, and return their number.

    Args:
        connection: in a transaction or not.
        rows: the jobs.
        queues: which are notified.
        schema: where River's tables are. None: the search path decides.
        timeout: seconds within which the server must have stored what was sent.
        notified: called with `queues` and how many of them were notified.

    Raises:
        UniqueConflictError: a job exists, or is twice among them; the transaction lives.
        Exception: one of DATABASE_ERRORS.
    """
    rows = sorted(rows, key=attrgetter("lock_order"))
    is_given = connection.is_in_transaction()
    with translated(connection if is_given else None, in_savepoint=True):
        try:
            async with savepoint(connection) if is_given else connection.transaction():
                await _copy(connection, rows, schema=schema, timeout=timeout)
                if queues:
                    notify = query(_FILE, "insert_notify", schema)
                    notified(queues, len(await connection.fetch(notify.text, queues)))
        except DATABASE_ERRORS as error:
            if getattr(error, "constraint_name", None) != _UNIQUE_INDEX:
                raise
            raise UniqueConflictError(
                "a job with the same unique key exists, or is twice in the batch; nothing of it "
                f"was inserted ({getattr(error, 'detail', None)}); insert_many skips duplicates"
            ) from error
    return len(rows)


async def _copy(
    connection: Transaction,
    rows: list[InsertRow],
    *,
    schema: str | None,
    timeout: float,
) -> None:
    columns: list[str] = list(_COLUMNS)
    now: str | None = None
    if any(row.scheduled_at for row in rows):
        columns.append("scheduled_at")
        digits = await connection.fetchval(query(_FILE, "insert_now", schema).text)
        now = str(timestamp(bytes.fromhex(digits)))
    await connection.copy_to_table(
        "river_job",
        schema_name=schema,
        columns=columns,
        source=_chunks(rows, now),
        format="text",
        timeout=timeout,
    )


async def _chunks(rows: Sequence[InsertRow], now: str | None) -> AsyncGenerator[bytes]:
    ends: dict[tuple[object, ...], str] = {}
    for start in range(0, len(rows), _ROWS):
        lines = [_line(row, now, ends) for row in rows[start : start + _ROWS]]
        yield "".join(lines).encode()


def _line(row: InsertRow, now: str | None, ends: dict[tuple[object, ...], str]) -> str:
    """One line of the COPY.

    Args:
        row: the job.
        now: when a job without a time is due, where the line has it.
        ends: how lines end whose jobs share all but args and key.
    """
    shared = row.shared()
    if (end := ends.get(shared)) is None:
        end = ends[shared] = _end(row, now)
    key = r"\N" if row.unique_key is None else rf"\\x{row.unique_key}"
    return f"{row.args.translate(_ESCAPES)}\t{key}\t{end}"


def _end(row: InsertRow, now: str | None) -> str:
    fields = [
        row.kind.translate(_ESCAPES),
        row.max_attempts,
        row.metadata.translate(_ESCAPES),
        row.priority,
        row.queue,
        row.state,
        "{" + ",".join(f'"{tag}"' for tag in row.tags.split(",") if tag) + "}",
        row.unique_states or r"\N",
    ]
    if now is not None:
        fields.append(row.scheduled_at or now)
    return "\t".join(fields) + "\n"
