"""What tests of the reindexer share: an index whose rebuild can be held, and a check of
rebuilds."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from datetime import datetime

    from tests._database import Schema

LIMIT = 20.0
SESSION = "riverpy reindex"
"""The application_name of the reindexer's sessions."""
_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = $1"
)


class Always:
    """A schedule that is due whenever it is looked at again."""

    def next(self, after: datetime, /) -> datetime:
        return after + timedelta(microseconds=1)


class Once:
    """A schedule that is due at once when Config and the first pass ask, and then in a year."""

    def __init__(self) -> None:
        self._asked = 0

    def next(self, after: datetime, /) -> datetime:
        self._asked += 1
        return after + (timedelta(microseconds=1) if self._asked <= 2 else timedelta(days=365))


class Never:
    """A schedule that is due in a year."""

    def next(self, after: datetime, /) -> datetime:
        return after + timedelta(days=365)


async def until(schema: Schema, sql: str, expected: object = True, *args: object) -> None:
    """Wait until a query has this value."""
    async with asyncio.timeout(LIMIT):
        while await schema.fetchval(sql, *args) != expected:
            await asyncio.sleep(0.01)


async def until_building(schema: Schema, phase: str, index: str | None = None) -> None:
    """Wait until the server says that an index of river_job is in such a phase of its rebuild."""
    await until(
        schema,
        "SELECT count(*) FROM pg_stat_progress_create_index WHERE relid = 'river_job'::regclass"
        " AND command = 'REINDEX CONCURRENTLY' AND phase LIKE $1"
        " AND ($2::text IS NULL OR index_relid ="
        " (SELECT oid FROM pg_class WHERE relname = $2 || '_ccnew'"
        " AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = relid)))",
        1,
        phase,
        index,
    )


async def indexes(schema: Schema) -> list[str]:
    """The names of all indexes."""
    rows = await schema.fetch("SELECT indexname FROM pg_indexes WHERE schemaname = $1", schema.name)
    return [name for (name,) in rows]


async def artifacts(schema: Schema) -> list[str]:
    """The indexes that look like left by a rebuild."""
    return sorted(name for name in await indexes(schema) if re.search("_cc(new|old)", name))


async def until_no_artifacts(schema: Schema) -> None:
    """Wait until no index looks like left by a rebuild."""
    async with asyncio.timeout(LIMIT):
        while await artifacts(schema):
            await asyncio.sleep(0.01)


async def oid(schema: Schema, index: str) -> int:
    """The identity of an index, which a rebuild changes."""
    found = await schema.fetchval(
        "SELECT oid FROM pg_class WHERE relname = $1 AND relnamespace = $2::regnamespace",
        index,
        schema.name,
    )
    assert isinstance(found, int)
    return found


async def until_no_session(schema: Schema) -> None:
    """Wait until the server has ended the sessions of reindexers."""
    await until(schema, _SESSIONS, 0, SESSION)


async def until_waiting(schema: Schema, statement: str, sessions: int = 1) -> None:
    """Wait until so many sessions wait for others in such a statement."""
    await until(
        schema,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND query ILIKE $1 AND wait_event_type = 'Lock'",
        sessions,
        statement,
    )


@asynccontextmanager
async def snapshot(schema: Schema) -> AsyncGenerator[None]:
    """Keep a snapshot: rebuilds wait for its end before the new index takes the place of the
    old."""
    async with schema.connected() as connection:
        transaction = connection.transaction(isolation="repeatable_read")
        await transaction.start()
        await connection.fetchval("SELECT 1")
        try:
            yield
        finally:
            await transaction.rollback()


@asynccontextmanager
async def reader(schema: Schema) -> AsyncGenerator[None]:
    """Read the table of jobs and stay in the transaction, without a snapshot: rebuilds wait for its
    end when the new index has taken the place of the old."""
    async with schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("LOCK TABLE river_job IN ACCESS SHARE MODE")
        try:
            yield
        finally:
            await transaction.rollback()


@asynccontextmanager
async def slow_index(schema: Schema) -> AsyncGenerator[str]:
    """An index whose rebuild in a reindexer's session takes a minute, until its function is
    replaced by `mend`. Its name needs quotes."""
    await _make_function(
        schema,
        f"IF current_setting('application_name') = '{SESSION}' THEN PERFORM pg_sleep(60); END IF;",
    )
    await schema.execute("INSERT INTO river_job (args, kind, max_attempts) VALUES ('{}', 'k', 1)")
    await schema.execute('CREATE INDEX "Slow" ON river_job (slow(kind))')
    try:
        yield "Slow"
    finally:
        await schema.execute("DROP FUNCTION slow CASCADE")


async def mend(schema: Schema) -> None:
    """Let the slow index be as quick as others."""
    await _make_function(schema, "")


async def take_a_moment(schema: Schema) -> None:
    """Let the rebuild of the slow index take half a second."""
    await _make_function(
        schema,
        f"IF current_setting('application_name') = '{SESSION}' THEN PERFORM pg_sleep(0.5); END IF;",
    )


async def fail(schema: Schema) -> None:
    """Let the rebuild of the slow index fail."""
    await _make_function(
        schema,
        f"IF current_setting('application_name') = '{SESSION}' THEN RAISE 'no luck'; END IF;",
    )


async def _make_function(schema: Schema, body: str) -> None:
    await schema.execute(
        f"CREATE OR REPLACE FUNCTION {schema.name}.slow(text) RETURNS text IMMUTABLE"
        f" LANGUAGE plpgsql AS $$ BEGIN {body} RETURN $1; END $$"
    )
