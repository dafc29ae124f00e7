"""MigrationRunner: runs one migration and records it in `river_migration`, in one transaction."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.schema import (
    LINE_COLUMN_MIGRATION,
    MAIN_MIGRATION_LINE,
    SCHEMA_READ_TIMEOUT,
    read_schema_state,
)
from riverpy._postgres.sql_files import (
    get_query,
    load_statements,
    quote_identifier,
    quote_literal,
    splice_schema,
    to_milliseconds,
)
from riverpy.errors import MigrationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.schema import Migration

ROLLBACK_TIMEOUT = 5.0
"""The timeout for the rollback of a failed or cancelled migration, in seconds."""

MIGRATOR_IDLE_TIMEOUT = timedelta(seconds=10)
"""After this time without a statement, the server ends the session of a migrator."""

_SQL_FILE = "river_migration"
_LOCK_NOT_AVAILABLE_SQLSTATE = "55P03"
_QUERY_CANCELED_SQLSTATE = "57014"


class Direction(StrEnum):
    """Whether a migration is applied or undone."""

    UP = "up"
    DOWN = "down"


class MigrationRunner:
    """Runs the migrations of one migration line. A lock lets only one migrator run a migration at a
    time."""

    def __init__(
        self, migration_line: str, *, lock_timeout: timedelta, statement_timeout: timedelta
    ) -> None:
        self._migration_line = migration_line
        self._lock_timeout, self._statement_timeout = lock_timeout, statement_timeout

    async def run_migration(
        self,
        connection: Transaction,
        schema: str,
        direction: Direction,
        migration: Migration,
        sql: str,
    ) -> bool:
        """Run one migration and record it. Return False if another migrator has already done so."""
        up = direction is Direction.UP
        what = f"version {migration.version} of line {self._migration_line!r} in schema {schema!r}"
        with _translate_migration_errors(f"migrating {direction} {what}"):
            # After the wait for the lock, each statement must see what other transactions have
            # committed.
            async with transaction_with_timeouts(connection, isolation="read_committed"):
                with _translate_migration_errors(f"waiting for another migrator before {what}"):
                    await self._lock_migration_table(connection, schema)
                applied = (await read_schema_state(connection, schema)).applied_versions(
                    self._migration_line
                )
                if (migration.version in applied) is up:
                    return False
                self._check_version_order(migration.version, applied, direction)
                await self._set_timeouts(connection, self._lock_timeout)
                # The server ends slow statements. This timeout is for a lost connection.
                with anyio.fail_after(
                    self._statement_timeout.total_seconds() * sql.count(";") + SCHEMA_READ_TIMEOUT
                ):
                    await connection.execute(sql)
                    await self._record_migration(connection, schema, direction, migration.version)
        return True

    async def _lock_migration_table(self, connection: Transaction, schema: str) -> None:
        # Use the long statement timeout for the lock: another migrator may hold the lock for a
        # whole migration. Workers do not wait for this lock.
        await self._set_timeouts(connection, self._statement_timeout)
        with anyio.fail_after(self._statement_timeout.total_seconds() + SCHEMA_READ_TIMEOUT):
            await get_query(_SQL_FILE, "migration_lock", schema).execute(connection, schema=schema)

    async def _set_timeouts(self, connection: Transaction, lock_timeout: timedelta) -> None:
        with anyio.fail_after(SCHEMA_READ_TIMEOUT):
            await get_query(_SQL_FILE, "migration_limits", None).execute(
                connection,
                lock_timeout=str(to_milliseconds(lock_timeout)),
                statement_timeout=str(to_milliseconds(self._statement_timeout)),
                idle_timeout=str(to_milliseconds(MIGRATOR_IDLE_TIMEOUT)),
            )

    def _check_version_order(self, version: int, applied: set[int], direction: Direction) -> None:
        """Raise MigrationError if `version` is not the next version in this direction, because
        another migrator has migrated in the other direction."""
        up = direction is Direction.UP
        in_order = version == 1 or version - 1 in applied if up else max(applied) == version
        if not in_order:
            raise MigrationError(
                f"line {self._migration_line!r} was migrated the other way by another migrator: "
                f"its versions are now {', '.join(map(str, sorted(applied))) or 'none'}. "
                "Nothing more was done"
            )

    async def _record_migration(
        self, connection: Transaction, schema: str, direction: Direction, version: int
    ) -> None:
        if block := _get_record_statement_name(self._migration_line, version, direction):
            values: dict[str, object] = {"line": self._migration_line, "version": version}
            statement = get_query(_SQL_FILE, block, schema)
            await connection.execute(statement.text, *map(values.get, statement.parameters))


def _get_record_statement_name(
    migration_line: str, version: int, direction: Direction
) -> str | None:
    """Return the name of the SQL statement that records the migration in `river_migration`. Before
    version 5 of line `main`, this table has no column `line` and needs another statement. Return
    None if the migration drops the table."""
    up = direction is Direction.UP
    verb = "migration_insert" if up else "migration_delete"
    if (
        migration_line != MAIN_MIGRATION_LINE
        or version > LINE_COLUMN_MIGRATION
        or (up and version == LINE_COLUMN_MIGRATION)
    ):
        return verb
    return f"{verb}_without_line" if up or version > 1 else None


def make_migration_record_sql(migration_line: str, version: int, direction: Direction) -> str:
    """Return the SQL text that records the migration in `river_migration`, for another migration
    tool. Return "" if the migration drops this table."""
    block = _get_record_statement_name(migration_line, version, direction)
    if block is None:
        return ""
    text = load_statements(_SQL_FILE)[block].replace("@line", f"'{migration_line}'")
    return "\n" + text.replace("@version", str(version)) + ";\n"


def make_create_schema_sql(schema: str) -> str:
    """Return the statement that creates the schema, if it does not exist."""
    return load_statements(_SQL_FILE)["schema_create"].replace("@name", quote_identifier(schema))


def make_idempotent_migration_sql(
    migration_line: str, version: int, direction: Direction, sql: str, schema: str | None
) -> str:
    """Return one SQL statement that runs the SQL of a migration if it has not run yet."""
    values = {
        "@line": quote_literal(migration_line),
        "@version": str(version),
        "@applied": "false" if direction is Direction.UP else "true",
        "@sql": f"$riverpy_sql$\n{sql}$riverpy_sql$",
    }
    text = splice_schema(load_statements(_SQL_FILE)["migration_run"], schema)
    for name, value in values.items():
        text = text.replace(name, value)
    return text


@asynccontextmanager
async def transaction_with_timeouts(
    connection: Transaction, *, isolation: Literal["read_committed"] | None = None
) -> AsyncGenerator[None]:
    """Run the `async with` block in a transaction. BEGIN, COMMIT and ROLLBACK have timeouts, so
    that a lost connection cannot block them for long."""
    transaction = connection.transaction(isolation=isolation)
    with anyio.fail_after(SCHEMA_READ_TIMEOUT):
        await transaction.start()
    try:
        yield
    except BaseException:
        with anyio.move_on_after(ROLLBACK_TIMEOUT, shield=True) as scope:
            with suppress(*DATABASE_ERRORS):
                await transaction.rollback()
        if scope.cancelled_caught:
            connection.terminate()
        raise
    with anyio.fail_after(SCHEMA_READ_TIMEOUT):
        await transaction.commit()


@contextmanager
def _translate_migration_errors(action: str) -> Generator[None]:
    """Replace errors of the database with a MigrationError that says what the user has to do."""
    try:
        yield
    except DATABASE_ERRORS as error:
        sqlstate = getattr(error, "sqlstate", None)
        if sqlstate == _LOCK_NOT_AVAILABLE_SQLSTATE:
            advice = (
                "try again when the transaction that locks the table has ended, "
                "or set a longer lock timeout"
            )
        elif sqlstate == _QUERY_CANCELED_SQLSTATE:
            advice = "try again later, or set a longer statement timeout"
        else:
            advice = "correct this, and run it again: it continues where it stopped"
        raise MigrationError(
            f"{action} failed, and that version was rolled back: {describe_error(error)}; {advice}"
        ) from error
