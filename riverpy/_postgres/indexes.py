"""The statements of the reindexer, which rebuilds indexes: one typed function per SQL statement in
`sql/queries/river_index.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction

_SQL_FILE = "river_index"


class Index(NamedTuple):
    """An index that may be rebuilt."""

    name: str
    is_owned_by_role: bool
    """Whether the role of this session owns the index. Only the owner may rebuild it."""
    is_table_being_indexed: bool
    """Whether another session is building an index of the same table."""
    read_at: datetime
    """The server's time when the index was read."""
    size_bytes: int
    """The size of the index in bytes."""
    comment: str
    """The comment of the index. Empty: no comment."""
    rebuild_statement: str
    """The statement that rebuilds the index."""


class LeftoverIndex(NamedTuple):
    """An index that an interrupted rebuild may have left behind."""

    name: str
    is_droppable: bool
    """Whether the index may be dropped: it is invalid, the role of this session owns it, and no
    other session builds it."""
    drop_statement: str
    """The statement that drops the index."""


async def index_try_rebuild_lock(connection: Transaction, schema: str | None) -> bool:
    """Try to acquire the lock for rebuilding indexes, which this session holds until the session
    ends. Return False if another session has the lock."""
    return bool(await get_query(_SQL_FILE, "index_lock", schema).fetchval(connection))


async def index_set_timeouts(
    connection: Transaction,
    *,
    statement_timeout: timedelta | None,
    lock_timeout: timedelta | None,
    idle_timeout: timedelta,
) -> None:
    """Set the session's timeouts for a statement, for waiting for a lock, and for being idle. None:
    no timeout."""
    await get_query(_SQL_FILE, "index_set_timeouts", None).execute(
        connection,
        statement=_to_timeout_milliseconds(statement_timeout),
        lock=_to_timeout_milliseconds(lock_timeout),
        idle=_to_timeout_milliseconds(idle_timeout),
    )


async def index_get_server_time(connection: Transaction) -> datetime:
    """Return the server's time."""
    return await get_query(_SQL_FILE, "index_now", None).fetchval(connection)


async def index_list(
    connection: Transaction, schema: str | None, names: Sequence[str]
) -> list[Index]:
    """Return the indexes with these names, in the order of `names`. Indexes that do not exist are
    left out."""
    rows = await get_query(_SQL_FILE, "index_list", schema).fetch(connection, name=list(names))
    return [Index(*row) for row in rows]


async def index_list_leftovers(
    connection: Transaction, schema: str | None, name: str
) -> list[LeftoverIndex]:
    """Return the indexes that an interrupted rebuild of the index `name` may have left behind."""
    rows = await get_query(_SQL_FILE, "index_artifacts", schema).fetch(connection, name=name)
    return [LeftoverIndex(*row) for row in rows]


async def index_set_comment(
    connection: Transaction, schema: str | None, *, name: str, comment: str
) -> None:
    """Set the comment of the index, if the index exists. An empty `comment` removes it."""
    statement = await get_query(_SQL_FILE, "index_comment", schema).fetchval(
        connection, name=name, comment=comment
    )
    if statement is not None:
        await connection.execute(statement)


async def index_rebuild(connection: Transaction, index: Index) -> None:
    """Rebuild the index with REINDEX CONCURRENTLY. The timeouts of the session apply."""
    await connection.execute(index.rebuild_statement)


async def index_drop_leftover(connection: Transaction, leftover: LeftoverIndex) -> None:
    """Drop the index with DROP INDEX CONCURRENTLY. The timeouts of the session apply."""
    await connection.execute(leftover.drop_statement)


def _to_timeout_milliseconds(timeout: timedelta | None) -> int:
    return 0 if timeout is None else max(round(timeout.total_seconds() * 1000), 1)
