"""The connection of a command that reads or changes River's tables."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from riverpy._postgres.driver import close, connect
from riverpy._postgres.schema import check_schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.schema import SchemaState
    from riverpy.cli._options import DatabaseSettings

ResultT = TypeVar("ResultT")

STATEMENT_TIMEOUT = 10.0
"""Seconds that reading or changing a few rows may take: somebody may have locked the table."""


class Connected(NamedTuple):
    """A connection to a database that has River's tables."""

    connection: Connection
    schema: str | None
    state: SchemaState


@asynccontextmanager
async def connected(database: DatabaseSettings) -> AsyncGenerator[Connected]:
    """Connect, and look whether the tables are there.

    Raises:
        ConfigError, DatabaseError, or one of DATABASE_ERRORS.
    """
    url = database.required_url()
    connection = await connect(url)
    try:
        state = await bounded(
            "reading the schema", check_schema(connection, database.schema, url=url)
        )
        yield Connected(connection, database.schema, state)
    finally:
        await close(connection)


async def bounded(purpose: str, answer: Awaitable[ResultT]) -> ResultT:
    """The answer to a statement.

    Raises:
        TimeoutError: there was none in time; the text has the purpose.
    """
    reason = f"{purpose} took longer than {STATEMENT_TIMEOUT:g} s"
    with anyio.fail_after(STATEMENT_TIMEOUT, reason=reason):
        return await answer
