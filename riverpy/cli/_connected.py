"""The database connection of a command, with checks that the tables it needs exist."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import anyio

from riverpy._postgres.driver import close_connection, connect
from riverpy._postgres.schema import RIVERPY_MIGRATION_LINE, check_schema, make_migrate_command
from riverpy.errors import SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.schema import SchemaState
    from riverpy.cli._options import DatabaseSettings

ArgsP = ParamSpec("ArgsP")
ResultT = TypeVar("ResultT")

STATEMENT_TIMEOUT = 10.0
"""The timeout in seconds of a statement that reads or changes a few rows. A statement may have to
wait for a lock of another session."""


class CommandConnection(NamedTuple):
    """A connection to a database that has River's tables."""

    connection: Connection
    schema: str | None
    schema_state: SchemaState
    database_url: str

    async def run_read_statement(
        self,
        statement: Callable[Concatenate[Connection, str | None, ArgsP], Awaitable[ResultT]],
        *args: ArgsP.args,
        **kwargs: ArgsP.kwargs,
    ) -> ResultT:
        """Run a statement that reads a few rows, and return its result. `statement` is called with
        the connection, the schema, `args` and `kwargs`."""
        result = statement(self.connection, self.schema, *args, **kwargs)
        return await wait_for_statement("reading the database", result)

    def has_riverpy_migration(self, version: int) -> bool:
        """Return whether this version of the migration line `riverpy` (riverpy's own tables) is
        applied."""
        return version in self.schema_state.applied_versions(RIVERPY_MIGRATION_LINE)

    def require_riverpy_migration(self, version: int, missing_tables: str) -> None:
        """Check that this version of the migration line `riverpy` (riverpy's own tables) is
        applied. `missing_tables` describes the tables in the error text, such as "table of leases".

        Raises:
            SchemaMissingError: the version is not applied. The message has the command that applies
                it.
        """
        if not self.has_riverpy_migration(version):
            up = f"riverpy migrate up --line {RIVERPY_MIGRATION_LINE}"
            command = make_migrate_command(up, self.schema, self.database_url)
            raise SchemaMissingError(f"the database lacks the {missing_tables}: run `{command}`")


@asynccontextmanager
async def open_command_connection(database: DatabaseSettings) -> AsyncGenerator[CommandConnection]:
    """Open a connection, and check that River's tables exist. The connection is closed after the
    `async with` block."""
    url = database.require_url()
    connection = await connect(url)
    try:
        state = await wait_for_statement(
            "reading the schema", check_schema(connection, database.schema, url=url)
        )
        yield CommandConnection(connection, database.schema, state, url)
    finally:
        await close_connection(connection)


async def wait_for_statement(purpose: str, statement: Awaitable[ResultT]) -> ResultT:
    """Wait at most `STATEMENT_TIMEOUT` for a statement, and return its result. The text of a
    timeout error starts with `purpose`."""
    reason = f"{purpose} took longer than {STATEMENT_TIMEOUT:g} s"
    with anyio.fail_after(STATEMENT_TIMEOUT, reason=reason):
        return await statement
