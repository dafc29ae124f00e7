"""One typed function per block of `sql/queries/river_index.sql`, and the statements that blocks
make."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction


class Index(NamedTuple):
    """An index that may be rebuilt."""

    name: str
    is_owner: bool
    """Whether this role may rebuild it."""
    is_held: bool
    """Whether another backend builds an index of the same table."""
    read_at: datetime
    """When this was read, by the server's clock."""
    size: int
    """In bytes."""
    comment: str
    """Empty without one."""
    rebuild: str
    """The statement."""


class Artifact(NamedTuple):
    """What a rebuild that did not finish left."""

    name: str
    is_ownerless: bool
    """Whether it may be dropped: it is invalid, and no other backend builds it."""
    removal: str
    """The statement."""


async def index_lock(connection: Transaction, schema: str | None) -> bool:
    """Exclude every other reindexer while the session lasts. False: there is one."""
    return bool(await connection.fetchval(query("river_index", "index_lock", schema).text))


async def index_limits(
    connection: Transaction, *, statement: timedelta | None, lock: timedelta | None, idle: timedelta
) -> None:
    """Limit the session's statements, their waits for a lock, and its pauses between them."""
    limits = query("river_index", "index_limits", None)
    values: dict[str, object] = {
        "statement": _milliseconds(statement),
        "lock": _milliseconds(lock),
        "idle": _milliseconds(idle),
    }
    await connection.execute(limits.text, *limits.arguments(values))


async def index_now(connection: Transaction) -> datetime:
    """The server's clock."""
    return await connection.fetchval(query("river_index", "index_now", None).text)


async def index_list(
    connection: Transaction, schema: str | None, names: Sequence[str]
) -> list[Index]:
    """Those of the indexes that exist, in the order of the names."""
    rows = await connection.fetch(query("river_index", "index_list", schema).text, list(names))
    return [Index(*row) for row in rows]


async def index_artifacts(connection: Transaction, schema: str | None, name: str) -> list[Artifact]:
    """What rebuilds of the index left."""
    rows = await connection.fetch(query("river_index", "index_artifacts", schema).text, name)
    return [Artifact(*row) for row in rows]


async def index_describe(
    connection: Transaction, schema: str | None, *, name: str, comment: str
) -> None:
    """Give the index a comment, or with an empty one none. A missing index is left missing."""
    describe = query("river_index", "index_describe", schema)
    values: dict[str, object] = {"name": name, "comment": comment}
    statement = await connection.fetchval(describe.text, *describe.arguments(values))
    if statement is not None:
        await connection.execute(statement)


async def index_rebuild(connection: Transaction, index: Index) -> None:
    """Rebuild it while it is used. The session's limits count."""
    await connection.execute(index.rebuild)


async def index_drop(connection: Transaction, artifact: Artifact) -> None:
    """Drop it while its table is used. The session's limits count."""
    await connection.execute(artifact.removal)


def _milliseconds(limit: timedelta | None) -> int:
    return 0 if limit is None else max(round(limit.total_seconds() * 1000), 1)
