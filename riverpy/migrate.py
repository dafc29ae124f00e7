"""The migrator: brings River's tables to a version, says what a database has, and prints the SQL."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from riverpy._db.schema import (
    LINES_VERSION,
    MAIN_LINE,
    READ_TIMEOUT,
    Migration,
    SchemaState,
    lines,
    migrations,
    read_schema_state,
)
from riverpy._names import validate_schema
from riverpy._sql import query, splice_schema
from riverpy.errors import ConfigError, MigrationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import asyncpg

    from riverpy._db.schema import AnyConnection

    Database = str | AnyConnection | asyncpg.Pool[asyncpg.Record]

__all__ = [
    "Direction",
    "MigrateResult",
    "MigrationStatus",
    "MigrationStep",
    "Migrator",
    "ValidateResult",
]

_log = structlog.stdlib.get_logger("riverpy")


class Direction(StrEnum):
    """Which way a migration goes."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """One migration that was applied or undone, or with `dry_run` would be."""

    line: str
    version: int
    name: str
    direction: Direction
    sql: str
    """The text that was run, with the schema in place."""

    duration: timedelta
    """From the begin to the commit of its transaction. Zero in a dry run."""


@dataclass(frozen=True, slots=True)
class MigrateResult:
    """What `up` or `down` did."""

    steps: Sequence[MigrationStep]
    """In the order in which they ran. Empty if the database was where it should be."""

    notices: Sequence[str]
    """What the database holds that riverpy does not know and left alone."""


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """One version of a line, as `list` reports it."""

    version: int
    name: str | None
    """None for a version that this riverpy does not know."""

    applied_at: datetime | None
    """None if it is not applied."""


@dataclass(frozen=True, slots=True)
class ValidateResult:
    """Whether a database has every migration that riverpy knows."""

    ok: bool
    missing: Sequence[int]
    messages: Sequence[str]
    """Why it is not ok, and what the database holds beyond what riverpy knows."""


class Migrator:
    """Applies and undoes the migrations of one line in one schema.

    Each migration runs in its own transaction together with its row in `river_migration`, so that an interrupted run
    is continued by the next. Any number of migrators may run at once: they take turns.

    Args:
        database: a URL, an asyncpg pool, or an asyncpg connection that is in no transaction.
        schema: the schema of River's tables, which must exist; None leaves it to the search path.
        line: `main` for River's own tables.
        lock_timeout: how long a statement waits for a table lock, and so the longest time for which a waiting
            migration holds up the statements of workers that queue behind it.
        statement_timeout: how long one statement of a migration may run, and how long to wait for another migrator.

    Raises:
        ConfigError: the name of the schema is not allowed, the line is unknown, or a limit is below 1 ms.
    """

    def __init__(
        self,
        database: Database,
        *,
        schema: str | None = None,
        line: str = MAIN_LINE,
        lock_timeout: timedelta = timedelta(seconds=4),
        statement_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if schema is not None:
            validate_schema(schema)
        self._migrations = migrations(line)
        self._database = database
        self._schema = schema
        self._line = line
        self._lock_timeout = _milliseconds("lock_timeout", lock_timeout)
        self._statement_timeout = _milliseconds("statement_timeout", statement_timeout)

    async def up(
        self, *, target: int | None = None, max_steps: int | None = None, dry_run: bool = False
    ) -> MigrateResult:
        """Apply what is outstanding.

        Args:
            target: the last version to apply; None means the newest. Applied already: nothing is done.
            max_steps: apply at most this many; None means no limit.
            dry_run: change nothing, only say what would be done.

        Raises:
            MigrationError: the target is unknown, or a migration failed; those before it are applied and recorded.
            SchemaMissingError: the schema does not exist.
            ServerVersionError: PostgreSQL is older than 13.
        """
        async with self._connection() as connection:
            state = await self._read(connection)
            plan = self._plan_up(state, target)[: _limit(max_steps)]
            return await self._migrate(connection, state, Direction.UP, plan, dry_run=dry_run)

    async def down(
        self, *, target: int | None = None, max_steps: int | None = None, dry_run: bool = False
    ) -> MigrateResult:
        """Undo one migration, or those above a target. This drops tables with the jobs in them.

        Args:
            target: the version to end at, which stays applied; 0 removes everything. None means one step.
            max_steps: undo at most this many; None means one, or with a target no limit.
            dry_run: change nothing, only say what would be done.

        Raises:
            MigrationError: the target is not applied, the database has versions that this riverpy does not know, or
                a migration could not be undone; those before it are undone.
            SchemaMissingError: the schema does not exist.
            ServerVersionError: PostgreSQL is older than 13.
        """
        if target is None and max_steps is None:
            max_steps = 1
        async with self._connection() as connection:
            state = await self._read(connection)
            plan = self._plan_down(state, target or 0)[: _limit(max_steps)]
            return await self._migrate(connection, state, Direction.DOWN, plan, dry_run=dry_run)

    def _plan_up(self, state: SchemaState, target: int | None) -> list[Migration]:
        if target is not None and target not in self._migrations:
            raise MigrationError(
                f"line {self._line!r} has no version {target}: riverpy knows 1 to {max(self._migrations)}"
            )
        applied = state.versions(self._line)
        return [
            migration
            for version, migration in self._migrations.items()
            if version not in applied and (target is None or version <= target)
        ]

    def _plan_down(self, state: SchemaState, target: int) -> list[Migration]:
        applied = state.versions(self._line)
        return [
            self._migrations[version]
            for version in sorted(applied, reverse=True)
            if version > target
        ]

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AnyConnection]:
        database = self._database
        if isinstance(database, str):
            import asyncpg

            connection = await asyncpg.connect(database, timeout=READ_TIMEOUT)
            try:
                yield connection
            finally:
                await connection.close(timeout=READ_TIMEOUT)
        else:
            yield database

    async def _read(self, connection: AnyConnection) -> SchemaState:
        return await read_schema_state(connection, self._schema)

    async def _migrate(
        self,
        connection: AnyConnection,
        state: SchemaState,
        direction: Direction,
        plan: Sequence[Migration],
        *,
        dry_run: bool,
    ) -> MigrateResult:
        steps: list[MigrationStep] = []
        for migration in plan:
            started = monotonic()
            text = migration.up if direction is Direction.UP else migration.down
            sql = splice_schema(text, state.schema)
            if not dry_run and not await self._step(
                connection, state.schema, direction, migration, sql
            ):
                continue
            duration = timedelta(0) if dry_run else timedelta(seconds=monotonic() - started)
            steps.append(
                MigrationStep(
                    self._line, migration.version, migration.name, direction, sql, duration
                )
            )
        return MigrateResult(steps, ())

    async def _step(
        self,
        connection: AnyConnection,
        schema: str,
        direction: Direction,
        migration: Migration,
        sql: str,
    ) -> bool:
        """Run one migration and record it. False if another migrator has done it meanwhile."""
        async with connection.transaction():
            await self._execute(
                connection,
                schema,
                "migration_limits",
                {
                    "lock_timeout": str(self._statement_timeout),
                    "statement_timeout": str(self._statement_timeout),
                },
            )
            await self._execute(connection, schema, "migration_lock", {"schema": schema})
            state = await read_schema_state(connection, schema)
            if (migration.version in state.versions(self._line)) is (direction is Direction.UP):
                return False
            await self._execute(
                connection,
                schema,
                "migration_limits",
                {
                    "lock_timeout": str(self._lock_timeout),
                    "statement_timeout": str(self._statement_timeout),
                },
            )
            await connection.execute(sql)
            await self._record(connection, schema, direction, migration.version)
        return True

    async def _record(
        self, connection: AnyConnection, schema: str, direction: Direction, version: int
    ) -> None:
        up = direction is Direction.UP
        verb = "insert" if up else "delete"
        if self._line != MAIN_LINE or version > LINES_VERSION or (up and version == LINES_VERSION):
            await self._execute(
                connection, schema, f"migration_{verb}", {"line": self._line, "version": version}
            )
        elif up or version > 1:
            await self._execute(
                connection, schema, f"migration_{verb}_without_line", {"version": version}
            )

    async def _execute(
        self, connection: AnyConnection, schema: str, block: str, values: dict[str, object]
    ) -> None:
        statement = query("river_migration", block, schema)
        await connection.execute(statement.text, *statement.arguments(values))


def _milliseconds(name: str, limit: timedelta) -> int:
    milliseconds = limit // timedelta(milliseconds=1)
    if milliseconds < 1:
        raise ConfigError(f"{name} is 1 ms or more, got {limit}")
    return milliseconds


def _limit(max_steps: int | None) -> int | None:
    if max_steps is not None and max_steps < 0:
        raise ConfigError(f"max_steps is 0 or more, got {max_steps}")
    return max_steps
