"""Migrator: applies, undoes, lists and checks the migrations of River's and riverpy's tables, and
returns their SQL."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING

from riverpy._names import validate_schema_name, validate_schema_name_length
from riverpy._postgres.driver import (
    CONNECT_TIMEOUT,
    close_connection,
    connect,
    is_asyncpg_connection,
    is_pool,
)
from riverpy._postgres.migration_step import (
    Direction,
    MigrationRunner,
    make_idempotent_migration_sql,
    make_migration_record_sql,
    transaction_with_timeouts,
)
from riverpy._postgres.schema import (
    LINE_COLUMN_MIGRATION,
    MAIN_MIGRATION_LINE,
    Migration,
    SchemaState,
    list_migration_lines,
    load_migrations,
    read_schema_state,
)
from riverpy._postgres.sql_files import splice_schema
from riverpy.errors import ConfigError, MigrationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Pool, Transaction

__all__ = [
    "Direction",
    "MigrateResult",
    "MigrationStatus",
    "MigrationStep",
    "Migrator",
    "ValidateResult",
    "is_riverpy_table",
    "migrate_all",
]

LOCK_TIMEOUT_DEFAULT = timedelta(seconds=4)
STATEMENT_TIMEOUT_DEFAULT = timedelta(minutes=1)
_SQL_OUTPUT_HEADER = """\
-- Do not run these migrations in one transaction: version 4 of line main adds a value to an enum,
-- and PostgreSQL does not allow its use before the commit. Commit after each version.
"""

_CREATED_TABLE_PATTERN = re.compile(r"CREATE (?:UNLOGGED )?TABLE /\* schema \*/ (\w+)")

_SERVER_TIMEOUT_MAX = timedelta(days=24)
"""The largest allowed value of `lock_timeout` and of `statement_timeout`. PostgreSQL accepts a
little more."""


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """One migration that was applied or undone, or that a dry run would apply or undo."""

    version: int
    name: str
    direction: Direction
    sql: str
    """The SQL text of the migration. It contains the name of the schema."""

    duration: timedelta
    """The duration of the migration's transaction. Zero in a dry run."""


@dataclass(frozen=True, slots=True)
class MigrateResult:
    """The result of `up` or `down`."""

    line: str
    schema: str
    steps: Sequence[MigrationStep]
    """The steps in the order in which they ran. Empty if there was nothing to do."""

    notices: Sequence[str]
    """One sentence for each recorded migration or migration line that this version of riverpy does
    not know."""


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """One migration, and whether it is applied in a database."""

    version: int
    name: str | None
    """The name of the migration. None: this version of riverpy does not know the migration."""

    applied_at: datetime | None
    """The time at which the migration was applied. None: it is not applied."""


@dataclass(frozen=True, slots=True)
class ValidateResult:
    """The result of `validate`: whether a database has every migration of one migration line."""

    ok: bool
    missing: Sequence[int]
    """The versions that are not applied, lowest first."""

    messages: Sequence[str]
    """One sentence for each problem, and for each migration or migration line in the database that
    this version of riverpy does not know."""


class Migrator:
    """Applies and undoes the migrations of one migration line (a series of migrations) in one
    schema.

    Each migration runs in its own transaction, which also writes the migration's row in
    `river_migration`. So the next run continues after an interruption. Several migrators may run at
    the same time, because each takes a lock before it runs a migration.

    Args:
        database: a URL, an asyncpg pool, or an asyncpg connection that is in no transaction. None:
            the environment variables `PG…` of PostgreSQL.
        schema: the schema of River's tables, which must exist. None: the schema in the search path
            that has River's tables or, if none has them, the first schema.
        line: the migration line: `main` for River's tables, `riverpy` for riverpy's own tables. See
            `migrate_all` for both.
        lock_timeout: how long a migration waits for a table that another transaction has locked.
            During this wait, new statements of workers on this table wait too. 1 ms to 24 days.
        statement_timeout: how long one statement of a migration may run. Also how long to wait
            while another migrator runs a migration. 1 ms to 24 days.

    Raises:
        ConfigError: the name of the schema is not allowed, the migration line is unknown, or a
            timeout is out of its range.
        TypeError: `database` has another type.
    """

    def __init__(
        self,
        database: str | Transaction | Pool | None,
        *,
        schema: str | None = None,
        line: str = MAIN_MIGRATION_LINE,
        lock_timeout: timedelta = LOCK_TIMEOUT_DEFAULT,
        statement_timeout: timedelta = STATEMENT_TIMEOUT_DEFAULT,
    ) -> None:
        if schema is not None:
            validate_schema_name(schema)
        if not (database is None or isinstance(database, str)) and not (
            is_pool(database) or is_asyncpg_connection(database)
        ):
            raise TypeError(
                "a Migrator takes a URL, an asyncpg pool or an asyncpg connection, "
                f"got {type(database).__name__}"
            )
        self._database = database
        self._schema = schema
        self._migration_line = line
        self._migrations = load_migrations(line)
        self._step_runner = MigrationRunner(
            line,
            lock_timeout=_check_timeout("lock_timeout", lock_timeout),
            statement_timeout=_check_timeout("statement_timeout", statement_timeout),
        )

    async def up(
        self, *, target: int | None = None, max_steps: int | None = None, dry_run: bool = False
    ) -> MigrateResult:
        """Apply the missing migrations.

        Args:
            target: the last version to apply. None: the newest. If it is already applied, nothing
                is done.
            max_steps: the maximum number of migrations to apply. None: no limit.
            dry_run: change nothing, and only return the migrations that would be applied.

        Raises:
            MigrationError: the connection is in a transaction, the target is unknown, River's
                tables exist but no migration is recorded, a version below an applied one is not
                recorded, or a migration failed. The migrations before the failed one stay applied.
            SchemaMissingError: the schema does not exist.
            ServerVersionError: PostgreSQL is older than 13.
            OSError, TimeoutError, asyncpg.PostgresError: the database cannot be reached.
        """
        return await self._run_migrations(Direction.UP, target, max_steps, dry_run=dry_run)

    async def down(
        self, *, target: int | None = None, max_steps: int | None = None, dry_run: bool = False
    ) -> MigrateResult:
        """Undo the newest migration, or all migrations above a target. This can drop tables with
        their jobs.

        Args:
            target: the newest version that stays applied. 0 removes everything.
            max_steps: the maximum number of migrations to undo. Default None: no limit if `target`
                is set, otherwise one migration.
            dry_run: change nothing, and only return the migrations that would be undone.

        Raises:
            MigrationError: the connection is in a transaction, the target is not applied, River's
                tables exist but no migration is recorded, this riverpy does not know an applied
                version, or a migration failed. The migrations that were undone before the failed
                one stay undone.
            SchemaMissingError, ServerVersionError, OSError, TimeoutError, asyncpg.PostgresError: as
                `up`.
        """
        if target is None and max_steps is None:
            max_steps = 1
        return await self._run_migrations(Direction.DOWN, target, max_steps, dry_run=dry_run)

    async def list(self) -> Sequence[MigrationStatus]:
        """Return the migrations of the migration line, lowest version first, with the times at
        which they were applied.

        Raises:
            MigrationError: River's tables exist but no migration is recorded.
            SchemaMissingError, ServerVersionError, OSError, TimeoutError, asyncpg.PostgresError: as
                `up`.
        """
        async with self._acquire_connection() as connection:
            state = await self._read_schema_state(connection)
        if state.are_migrations_unrecorded():
            raise MigrationError(state.make_unrecorded_migrations_message())
        applied = state.applied_at_by_line.get(self._migration_line, {})
        return [
            MigrationStatus(
                version,
                self._migrations[version].name if version in self._migrations else None,
                applied.get(version),
            )
            for version in sorted(self._migrations.keys() | applied.keys())
        ]

    async def validate(self, *, target: int | None = None) -> ValidateResult:
        """Check that all migrations are applied, or all migrations up to the version `target`. This
        changes nothing.

        Raises:
            MigrationError: the target is unknown.
            SchemaMissingError, ServerVersionError, OSError, TimeoutError, asyncpg.PostgresError: as
                `up`.
        """
        _require_known_version(self._migration_line, target)
        async with self._acquire_connection() as connection:
            state = await self._read_schema_state(connection)
        missing = [
            version
            for version in state.missing_versions(self._migration_line)
            if target is None or version <= target
        ]
        messages: list[str] = []
        if state.are_migrations_unrecorded():
            messages.append(state.make_unrecorded_migrations_message())
        elif state.skipped_versions(self._migration_line) and missing:
            messages.append(state.make_skipped_versions_message(self._migration_line))
        elif missing:
            plural = "s" if len(missing) > 1 else ""
            messages.append(
                f"line {self._migration_line!r} in schema {state.schema!r} lacks version{plural} "
                f"{', '.join(map(str, missing))}: run `riverpy migrate up`"
            )
        messages += [_make_invalid_index_message(state, index) for index in state.invalid_indexes]
        return ValidateResult(
            not messages,
            missing,
            [*messages, *state.make_unknown_version_notices(self._migration_line)],
        )

    @staticmethod
    def sql(
        *,
        line: str = MAIN_MIGRATION_LINE,
        versions: Sequence[int] | None = None,
        direction: Direction = Direction.UP,
        schema: str | None = None,
    ) -> str:
        """Return the SQL text of migrations, to run it with another tool. This needs no database.

        Args:
            line: `main` for River's tables, `riverpy` for riverpy's own tables.
            versions: the versions to return, in any order. None: all. The text has them in the
                order in which they must run.
            direction: whether to return the SQL that applies the migrations, or that undoes them.
            schema: the schema of the tables, written before each name. None: the search path
                decides.

        Raises:
            ConfigError: the migration line is unknown or the name of the schema is not allowed.
            MigrationError: a version is unknown.
        """
        texts = [_SQL_OUTPUT_HEADER] if line == MAIN_MIGRATION_LINE else []
        for migration, sql in _list_migrations_with_sql(line, versions, direction, schema):
            title = (
                f"-- Line {line}, version {migration.version:03} ({migration.name}), {direction}"
            )
            texts.append(f"{title}\n{sql}")
        return "\n".join(texts)

    @staticmethod
    def statements(
        *,
        line: str = MAIN_MIGRATION_LINE,
        versions: Sequence[int] | None = None,
        direction: Direction = Direction.UP,
        schema: str | None = None,
    ) -> Sequence[str]:
        """Return one SQL statement for each migration, to run them with another tool, such as
        Alembic. This needs no database.

        Each statement is atomic, also without a transaction around it. It changes nothing if its
        migration is already applied (or undone). Commit after each statement. A statement waits at
        most 4 s for a table that another transaction has locked.

        Args, Raises: as `sql`.
        """
        return [
            make_idempotent_migration_sql(line, migration.version, direction, sql, schema)
            for migration, sql in _list_migrations_with_sql(line, versions, direction, schema)
        ]

    async def _run_migrations(
        self, direction: Direction, target: int | None, max_steps: int | None, *, dry_run: bool
    ) -> MigrateResult:
        if max_steps is not None and max_steps < 0:
            raise ConfigError(f"max_steps is 0 or more, or None for no limit, got {max_steps}")
        async with self._acquire_connection() as connection:
            if connection.is_in_transaction():
                raise MigrationError(
                    "the connection is in a transaction, but each migration needs its own, because "
                    "a later one uses an enum value that an earlier one adds. Commit or roll back "
                    "first, or pass a URL"
                )
            state = await self._read_schema_state(connection)
            if state.are_migrations_unrecorded():
                raise MigrationError(state.make_unrecorded_migrations_message())
            notices = state.make_unknown_version_notices(self._migration_line)
            if direction is Direction.DOWN:
                plan = self._plan_down(state, target)
            else:
                validate_schema_name_length(state.schema)
                notices += self._check_migration_line_column(state, dry_run=dry_run)
                plan = self._plan_up(state, target)
            steps: list[MigrationStep] = []
            for migration in plan[:max_steps]:
                body = migration.up_sql if direction is Direction.UP else migration.down_sql
                sql = splice_schema(body, state.schema)
                started = monotonic()
                if not dry_run and not await self._step_runner.run_migration(
                    connection, state.schema, direction, migration, sql
                ):
                    continue
                duration = timedelta(seconds=0 if dry_run else monotonic() - started)
                steps.append(
                    MigrationStep(migration.version, migration.name, direction, sql, duration)
                )
        return MigrateResult(self._migration_line, state.schema, steps, notices)

    def _check_migration_line_column(self, state: SchemaState, *, dry_run: bool) -> list[str]:
        """Raise MigrationError if this migration line needs the column `line` of `river_migration`
        and the column does not exist. In a dry run, return a notice instead."""
        if self._migration_line == MAIN_MIGRATION_LINE or state.has_migration_line_column:
            return []
        needed = f"version {LINE_COLUMN_MIGRATION} of line {MAIN_MIGRATION_LINE!r}"
        need = f"line {self._migration_line!r} needs {needed}"
        if dry_run:
            return [f"{need} before it"]
        raise MigrationError(f"{need}: run `riverpy migrate up --line {MAIN_MIGRATION_LINE}` first")

    def _plan_up(self, state: SchemaState, target: int | None) -> Sequence[Migration]:
        _require_known_version(self._migration_line, target)
        if state.skipped_versions(self._migration_line):
            raise MigrationError(state.make_skipped_versions_message(self._migration_line))
        plan = [
            self._migrations[version]
            for version in state.missing_versions(self._migration_line)
            if target is None or version <= target
        ]
        if plan and state.invalid_indexes:
            raise MigrationError(_make_invalid_index_message(state, state.invalid_indexes[0]))
        return plan

    def _plan_down(self, state: SchemaState, target: int | None) -> Sequence[Migration]:
        if unknown := state.unknown_versions(self._migration_line):
            raise MigrationError(
                f"line {self._migration_line!r} has versions {', '.join(map(str, unknown))}, which "
                "this riverpy cannot undo: migrate down with the release that applied them"
            )
        applied = state.applied_versions(self._migration_line)
        if target and target not in applied:
            raise MigrationError(
                f"version {target} of line {self._migration_line!r} is not applied in schema "
                f"{state.schema!r}, so nothing can be migrated down to it"
            )
        plan = [
            self._migrations[version]
            for version in sorted(applied, reverse=True)
            if version > (target or 0)
        ]
        others = sorted(state.applied_at_by_line.keys() - {MAIN_MIGRATION_LINE})
        if (
            self._migration_line == MAIN_MIGRATION_LINE
            and others
            and LINE_COLUMN_MIGRATION in (m.version for m in plan)
        ):
            commands = [
                f"`riverpy migrate down --line {o} --to 0`"
                for o in others
                if o in list_migration_lines()
            ]
            raise MigrationError(
                f"version {LINE_COLUMN_MIGRATION} of line {MAIN_MIGRATION_LINE!r} cannot be undone "
                f"while the lines {', '.join(others)} have migrations: migrate them down to 0 first"
                + "".join(f", with {command}" for command in commands)
            )
        return plan

    @asynccontextmanager
    async def _acquire_connection(self) -> AsyncGenerator[Transaction]:
        database = self._database
        if database is None or isinstance(database, str):
            connection = await connect(database, through_pooler=True)
            try:
                yield connection
            finally:
                await close_connection(connection)
        elif is_pool(database):
            async with database.acquire(timeout=CONNECT_TIMEOUT) as pooled:
                yield pooled
        else:
            yield database

    async def _read_schema_state(self, connection: Transaction) -> SchemaState:
        async with transaction_with_timeouts(connection):
            return await read_schema_state(connection, self._schema)


async def migrate_all(
    database: str | Transaction | Pool | None,
    *,
    schema: str | None = None,
    dry_run: bool = False,
    lock_timeout: timedelta = LOCK_TIMEOUT_DEFAULT,
    statement_timeout: timedelta = STATEMENT_TIMEOUT_DEFAULT,
) -> Sequence[MigrateResult]:
    """Apply the missing migrations of both migration lines: River's `main`, then `riverpy`.

    The arguments are those of `Migrator` and `Migrator.up`.

    Returns:
        The result of `main` and the result of `riverpy`.

    Raises:
        ConfigError, TypeError: as `Migrator`. MigrationError, SchemaMissingError,
            ServerVersionError, OSError, TimeoutError, asyncpg.PostgresError: as `Migrator.up`. If
            a migration of `riverpy` fails, the migrations of `main` stay applied.
    """
    return [
        await Migrator(
            database,
            schema=schema,
            line=line,
            lock_timeout=lock_timeout,
            statement_timeout=statement_timeout,
        ).up(dry_run=dry_run)
        for line in list_migration_lines()
    ]


def is_riverpy_table(name: str | None) -> bool:
    """Return whether River or riverpy, in this or an older version, creates a table with this name.

    Use it in tools that compare the tables of a database with the models of a program, such as
    Alembic, so that they ignore these tables.
    """
    return name in _list_tables_in_migrations()


@cache
def _list_tables_in_migrations() -> frozenset[str]:
    """Return the names of all tables that the migrations create."""
    texts = (
        migration.up_sql
        for line in list_migration_lines()
        for migration in load_migrations(line).values()
    )
    return frozenset(name for text in texts for name in _CREATED_TABLE_PATTERN.findall(text))


def _list_migrations_with_sql(
    line: str, versions: Sequence[int] | None, direction: Direction, schema: str | None
) -> list[tuple[Migration, str]]:
    """Return migrations with their SQL, in the order in which they must run. The SQL also writes
    the migration's row in `river_migration`."""
    if schema is not None:
        validate_schema_name(schema)
    for version in versions or ():
        _require_known_version(line, version)
    up = direction is Direction.UP
    found: list[tuple[Migration, str]] = []
    for version in sorted(versions or load_migrations(line), reverse=not up):
        migration = load_migrations(line)[version]
        body = migration.up_sql if up else migration.down_sql
        sql = splice_schema(body + make_migration_record_sql(line, version, direction), schema)
        found.append((migration, sql))
    return found


def _require_known_version(migration_line: str, version: int | None) -> None:
    known = load_migrations(migration_line)
    if version is not None and version not in known:
        raise MigrationError(
            f"line {migration_line!r} has no version {version}: riverpy knows 1 to {max(known)}"
        )


def _make_invalid_index_message(state: SchemaState, index: str) -> str:
    return (
        f"index {index!r} in schema {state.schema!r} is invalid, because its concurrent build "
        "failed: drop it, or rebuild it with REINDEX INDEX CONCURRENTLY"
    )


def _check_timeout(name: str, limit: timedelta) -> timedelta:
    if not timedelta(milliseconds=1) <= limit <= _SERVER_TIMEOUT_MAX:
        raise ConfigError(f"{name} is 1 ms to {_SERVER_TIMEOUT_MAX.days} days, got {limit}")
    return limit
