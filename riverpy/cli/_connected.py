"""The database connection of a command, and the tables that the command needs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from riverpy._postgres.driver import close, connect
from riverpy._postgres.periodic import periodic_exists
from riverpy._postgres.schema import DOMAINS_VERSION, OWN_LINE, check_schema, migrate_command
from riverpy.errors import SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.schema import SchemaState
    from riverpy.cli._options import DatabaseSettings

ResultT = TypeVar("ResultT")

STATEMENT_TIMEOUT = 10.0
"""The timeout of a statement that reads or changes a few rows, in seconds. Another session may lock
the table."""


class Connected(NamedTuple):
    """A connection to a database that has River's tables."""

    connection: Connection
    schema: str | None
    state: SchemaState


@asynccontextmanager
async def connected(database: DatabaseSettings) -> AsyncGenerator[Connected]:
    """Connect, and check that River's tables exist.

    Raises:
        ConfigError, DatabaseError, or one of DATABASE_ERRORS.
    """
    url = database.required_url()
    connection = await connect(url)
    try:
        state = await with_timeout(
            "reading the schema", check_schema(connection, database.schema, url=url)
        )
        yield Connected(connection, database.schema, state)
    finally:
        await close(connection)


async def with_timeout(purpose: str, result: Awaitable[ResultT]) -> ResultT:
    """Wait for the result of a statement, at most `STATEMENT_TIMEOUT`.

    Raises:
        TimeoutError: the timeout expired; the text has the purpose.
    """
    reason = f"{purpose} took longer than {STATEMENT_TIMEOUT:g} s"
    with anyio.fail_after(STATEMENT_TIMEOUT, reason=reason):
        return await result


def expect_domains(database: DatabaseSettings, found: Connected) -> None:
    """Raise SchemaMissingError, with the command to run, if the tables of domains are missing."""
    if DOMAINS_VERSION not in found.state.versions(OWN_LINE):
        raise _missing(database, found, "tables of domains")


async def expect_periodic_jobs(database: DatabaseSettings, found: Connected) -> None:
    """Raise SchemaMissingError, with the command to run, if the table of periodic jobs is
    missing."""
    exists = periodic_exists(found.connection, found.schema)
    if not await with_timeout("looking for the table of periodic jobs", exists):
        raise _missing(database, found, "table of periodic jobs")


def _missing(database: DatabaseSettings, found: Connected, what: str) -> SchemaMissingError:
    command = migrate_command(
        f"riverpy migrate up --line {OWN_LINE}", found.schema, database.required_url()
    )
    return SchemaMissingError(f"the database lacks the {what}: run `{command}`")
