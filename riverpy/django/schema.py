"""River's tables in a database of Django: their names, their versions and their migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.migration_step import (
    Direction,
    make_create_schema_sql,
    make_migration_record_sql,
)
from riverpy._postgres.schema import (
    MAIN_MIGRATION_LINE,
    SchemaState,
    list_migration_lines,
    load_migrations,
    read_schema_state,
)
from riverpy._postgres.sessions.django import DjangoSession
from riverpy._postgres.sql_files import get_query, quote_identifier, splice_schema
from riverpy._without_loop import run_without_loop
from riverpy.django.settings import read_schema_name, read_settings
from riverpy.errors import MigrationError, SchemaMissingError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from riverpy._postgres.driver import Transaction

_PERMISSION_DENIED_SQLSTATE = "42501"
LOCK_TIMEOUT_MILLISECONDS = 4_000
"""How long a statement of a migration waits for a table that another transaction has locked. During
this time, new statements of workers on this table wait too."""


class RiverTablesState(NamedTuple):
    """The state of River's and riverpy's tables in one schema of a database."""

    state: SchemaState

    def find_problems(self) -> list[str]:
        """Return a sentence for each problem of the tables, for example for a migration line that
        lacks versions."""
        if self.state.are_migrations_unrecorded():
            return [self.state.make_unrecorded_migrations_message()]
        found: list[str] = []
        for line in list_migration_lines():
            if self.state.skipped_versions(line):
                found.append(self.state.make_skipped_versions_message(line))
            elif missing := self.state.missing_versions(line):
                has_none = len(missing) == len(load_migrations(line))
                found.append(
                    f"schema {self.state.schema!r} has none of the tables of line {line!r}"
                    if has_none
                    else f"schema {self.state.schema!r} lacks the versions "
                    f"{', '.join(map(str, missing))} of line {line!r}"
                )
        return found


def make_table_name(table: str) -> str:
    """Return the name of one of River's tables for `Meta.db_table`, with the schema from the
    settings. The name is already quoted, so that Django does not quote it again."""
    schema = read_schema_name()
    return table if schema is None else f"{quote_identifier(schema)}.{quote_identifier(table)}"


def adapt_django_connection(connection: BaseDatabaseWrapper) -> Transaction:
    """Return an adapter for a connection of Django. It has the methods of an asyncpg connection
    that riverpy's statements use."""
    return cast("Transaction", DjangoSession(connection))


def read_river_tables_state(
    connection: BaseDatabaseWrapper, schema: str | None
) -> RiverTablesState:
    """Read the versions of River's and riverpy's tables in a schema. If `schema` is None, use the
    first schema in the search path that has River's tables or, if none has them, the first schema
    in the search path.

    Raises:
        SchemaMissingError: the schema does not exist.
        ServerVersionError: PostgreSQL is older than 13.
        asyncpg.PostgresError: the database failed.
    """
    return RiverTablesState(
        run_without_loop(read_schema_state(adapt_django_connection(connection), schema))
    )


def run_migration(editor: Any, line: str, version: int, direction: Direction) -> None:
    """Apply or undo one version of a migration line. Do nothing if this was already done, for
    example by `riverpy migrate` or by River in Go. The first version of `main` also creates the
    schema of the settings if it is missing.

    Args:
        editor: Django's schema editor, in a transaction. If the editor only collects SQL, the
            database is not read.
        line: the migration line, `main` or `riverpy`.
        version: the version of the line.
        direction: whether to apply or to undo the version.

    Raises:
        MigrationError: the tables exist but no migration is recorded; or versions below an applied
            version are missing; or the schema is missing, and the role has no right to create it.
        SchemaMissingError: the schema is missing, and this is not the first version of `main`.
    """
    schema = read_settings().schema
    migration = load_migrations(line)[version]
    is_first = (line, version, direction) == (MAIN_MIGRATION_LINE, 1, Direction.UP)
    if not editor.collect_sql:
        schema = _lock_schema(editor.connection, schema, may_create=is_first)
        state = read_river_tables_state(editor.connection, schema).state
        if state.are_migrations_unrecorded() and direction is Direction.UP:
            raise MigrationError(state.make_unrecorded_migrations_message())
        if (version in state.applied_versions(line)) is (direction is Direction.UP):
            return
        _check_migration_order(state, line, version, direction)
    elif is_first and schema is not None:
        editor.execute(make_create_schema_sql(schema).strip(), params=None)
    body = migration.up_sql if direction is Direction.UP else migration.down_sql
    # Without parameters, Django does not change the SQL, even if it has percent signs.
    editor.execute(splice_schema(body, schema), params=None)
    if record := make_migration_record_sql(line, version, direction):
        editor.execute(splice_schema(record, schema).strip(), params=None)


def _lock_schema(connection: BaseDatabaseWrapper, schema: str | None, *, may_create: bool) -> str:
    """Lock the schema until the end of the transaction, so that no other migration runs, and return
    its name. If the schema is missing, create it if `may_create` is True, otherwise raise
    SchemaMissingError."""
    is_missing = False
    try:
        name = read_river_tables_state(connection, schema).state.schema
    except SchemaMissingError:
        if schema is None or not may_create:
            raise
        name, is_missing = schema, True

    async def lock() -> None:
        session = adapt_django_connection(connection)
        await get_query("river_migration", "migration_lock", None).execute(session, schema=name)
        await get_query("session", "session_set_lock_timeout", None).execute(
            session, lock_timeout=f"{LOCK_TIMEOUT_MILLISECONDS}ms"
        )
        # Do this only if it is missing: even IF NOT EXISTS needs the right to create a schema.
        if is_missing:
            await session.fetch(make_create_schema_sql(name))

    try:
        run_without_loop(lock())
    except DATABASE_ERRORS as error:
        if getattr(error, "sqlstate", None) != _PERMISSION_DENIED_SQLSTATE:
            raise
        raise MigrationError(
            f"schema {name!r} does not exist, and the role may not create it: create it as another "
            f"role with CREATE SCHEMA {quote_identifier(name)}, and migrate again"
        ) from error
    return name


def _check_migration_order(
    state: SchemaState, line: str, version: int, direction: Direction
) -> None:
    applied = state.applied_versions(line)
    if direction is Direction.UP:
        if state.skipped_versions(line):
            raise MigrationError(state.make_skipped_versions_message(line))
        if line != MAIN_MIGRATION_LINE and not state.has_migration_line_column:
            raise MigrationError("the tables of River's line main must be migrated first")
    elif applied and max(applied) != version:
        raise MigrationError(
            f"line {line!r} has the versions {', '.join(map(str, sorted(applied)))}, so version "
            f"{version} cannot be undone: undo the newer ones first, with `manage.py riverpy "
            f"migrate down --line {line}`"
        )
