"""The migrations that riverpy knows, and the migrations that a database has. A migration line is a
series of migrations: `main` for River's tables, `riverpy` for riverpy's own tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from riverpy._dsn import mask_passwords
from riverpy._log import get_logger
from riverpy._log_events import (
    NEWER_MIGRATIONS_FOUND,
    RIVERPY_TABLES_NOT_FOUND,
    ROW_LEVEL_SECURITY_FOUND,
)
from riverpy._names import validate_schema_name_length
from riverpy._postgres.driver import check_server_version
from riverpy._postgres.sql_files import (
    explain_unreadable_files,
    get_query,
    quote_identifier,
    sql_directory,
)
from riverpy._without_loop import fail_after
from riverpy.errors import ConfigError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._postgres.driver import Transaction

MAIN_MIGRATION_LINE = "main"
"""The migration line of River's own tables."""
RIVERPY_MIGRATION_LINE = "riverpy"
"""The migration line of riverpy's own tables. River's clients do not need it, and riverpy works
without it."""

# Versions of migration line `riverpy` that features need.
CLIENTS_MIGRATION = 1
PERIODIC_JOBS_MIGRATION = 2
CLIENT_SLOTS_MIGRATION = 3
LEASES_MIGRATION = 4
EXECUTIONS_MIGRATION = 5
DOMAINS_MIGRATION = 6
CLIENT_STATE_MIGRATION = 7
LEASE_REPORTS_MIGRATION = 8
JOB_COUNTS_MIGRATION = 9
RUN_REQUESTS_MIGRATION = 10
FEATURES_BY_MIGRATION = {
    CLIENTS_MIGRATION: (
        "rescue of a killed client's jobs after dead_after: they wait for rescue_after"
    ),
    PERIODIC_JOBS_MIGRATION: "periodic jobs",
    CLIENT_SLOTS_MIGRATION: "the slots and stuck jobs of each client in riverpy doctor and top",
    LEASES_MIGRATION: "leases and singletons",
    EXECUTIONS_MIGRATION: "run_once",
    DOMAINS_MIGRATION: "leader domains",
    CLIENT_STATE_MIGRATION: (
        "the state of stopping clients, the rows that are set aside in riverpy doctor, and the "
        "quick start of a client under the configured id of a killed one"
    ),
    LEASE_REPORTS_MIGRATION: (
        "the standbys and the lag of leases in riverpy lease, top and doctor, and "
        "Config(spread_leases=True)"
    ),
    JOB_COUNTS_MIGRATION: "the plots of the dashboard",
    RUN_REQUESTS_MIGRATION: "who requested a run of a periodic job, in the dashboard",
}
"""For each version of line `riverpy`: the features that do not work without this version."""
NEEDED_MAIN_VERSION = 7
"""The newest version of line `main` that a client needs. Version 8 is not needed, because it
changes nothing on PostgreSQL: River has it for SQLite."""
EMPTY_MIGRATION_VERSIONS = {MAIN_MIGRATION_LINE: {8}}
"""The versions that change nothing on PostgreSQL, by migration line."""
LINE_COLUMN_MIGRATION = 5
"""The version of line `main` that adds the column `line` to `river_migration`."""
SCHEMA_READ_TIMEOUT = 10.0
"""The timeout for reading the catalog and `river_migration`, in seconds."""

_MIGRATION_FILE_PATTERN = re.compile(r"(\d{3})_(\w+)\.(up|down)\.sql")
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration of River's tables (migration line `main`) or of riverpy's own tables (migration
    line `riverpy`). Its SQL has placeholders for the name of the schema."""

    version: int
    name: str
    up_sql: str
    down_sql: str


@cache
def list_migration_lines() -> Sequence[str]:
    """Return the migration lines in the order in which they are applied: the directories in
    `sql/migrations`."""
    with explain_unreadable_files():
        entries = sql_directory().joinpath("migrations").iterdir()
        names = {entry.name for entry in entries if entry.is_dir()}
    return MAIN_MIGRATION_LINE, *sorted(names - {MAIN_MIGRATION_LINE})


@cache
def load_migrations(migration_line: str) -> Mapping[int, Migration]:
    """Return the migrations of a migration line by version, lowest first. Raise ConfigError for an
    unknown line."""
    if migration_line not in list_migration_lines():
        raise ConfigError(
            f"unknown migration line {migration_line!r}: "
            f"riverpy has {', '.join(list_migration_lines())}"
        )
    texts: dict[tuple[int, str], dict[str, str]] = {}
    with explain_unreadable_files():
        for entry in sql_directory().joinpath("migrations", migration_line).iterdir():
            if match := _MIGRATION_FILE_PATTERN.fullmatch(entry.name):
                key = int(match[1]), match[2].replace("_", " ")
                texts.setdefault(key, {})[match[3]] = entry.read_text("utf-8")
    known = {
        version: Migration(version, name, up_sql=text["up"], down_sql=text["down"])
        for (version, name), text in sorted(texts.items())
    }
    return MappingProxyType(known)


class RowSecurity(NamedTuple):
    """The tables in which row-level security may hide rows from the role of the connection. Queries
    do not see hidden rows, and raise no error."""

    role: str
    hidden_tables: Sequence[str]
    """The tables with row-level security but without a policy. The role sees no row of them."""
    filtered_tables: Sequence[str]
    """The tables whose policies may hide some rows."""

    @property
    def affected_tables(self) -> list[str]:
        """All tables in which rows may be hidden."""
        return sorted([*self.hidden_tables, *self.filtered_tables])

    @property
    def problem_text(self) -> str:
        """A text that describes how row-level security affects a client. Use it only if
        `affected_tables` is not empty."""
        effect = (
            "without a policy no job is worked or counted"
            if self.hidden_tables
            else "jobs that no policy allows are neither worked nor counted"
        )
        return (
            f'row-level security applies to "{self.role}" on {", ".join(self.affected_tables)}: '
            f"{effect}, and no error is raised"
        )

    @property
    def remedy_text(self) -> str:
        """How an operator gives the role access to all rows, as text for a message."""
        return (
            "for each table ALTER TABLE … DISABLE ROW LEVEL SECURITY, or CREATE POLICY … TO "
            f'"{self.role}" USING (true); or let the role own the tables'
        )


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The state of River's and riverpy's tables in one schema of a database."""

    schema: str
    has_migration_line_column: bool
    """Whether `river_migration` has the column `line`."""
    has_job_table: bool
    """Whether the table `river_job` exists."""
    invalid_indexes: Sequence[str]
    """Indexes of River's tables whose concurrent build failed. No query uses them."""
    applied_at_by_line: Mapping[str, Mapping[int, datetime]]
    """When each version was applied, by migration line and version, lowest version first."""
    row_security: RowSecurity
    """The tables in which row-level security may hide rows from the role."""

    def applied_versions(self, migration_line: str) -> set[int]:
        """Return the applied versions of a migration line."""
        return set(self.applied_at_by_line.get(migration_line, ()))

    def missing_versions(self, migration_line: str) -> list[int]:
        """Return the versions of a migration line that the database lacks, lowest first."""
        return sorted(
            load_migrations(migration_line).keys() - self.applied_versions(migration_line)
        )

    def missing_needed_versions(self) -> list[int]:
        """Return the missing versions of line `main` that a client needs, lowest first."""
        return [
            version
            for version in self.missing_versions(MAIN_MIGRATION_LINE)
            if version <= NEEDED_MAIN_VERSION
        ]

    def skipped_versions(self, migration_line: str) -> list[int]:
        """Return the missing versions of a migration line that are below an applied version, lowest
        first.

        Versions that change nothing on PostgreSQL are ignored when the newest applied version is
        determined. Reason: when River before 0.48 undoes version 7, version 8 stays recorded. Then
        version 7 is missing, but was not skipped.
        """
        newest = max(
            self.applied_versions(migration_line)
            - EMPTY_MIGRATION_VERSIONS.get(migration_line, set()),
            default=0,
        )
        return [version for version in self.missing_versions(migration_line) if version < newest]

    def unknown_versions(self, migration_line: str) -> list[int]:
        """Return the applied versions of a migration line that this riverpy does not know, lowest
        first."""
        return sorted(
            self.applied_versions(migration_line) - load_migrations(migration_line).keys()
        )

    def are_migrations_unrecorded(self) -> bool:
        """Whether River's tables exist, but `river_migration` records no version of line `main`."""
        return self.has_job_table and not self.applied_versions(MAIN_MIGRATION_LINE)

    def make_unknown_version_notices(self, migration_line: str) -> list[str]:
        """Return a sentence for each recorded version or line that this riverpy does not know."""
        known = max(load_migrations(migration_line))
        return [
            f"line {migration_line!r} has version {version}, which this riverpy does not know "
            f"(it knows 1 to {known}): left alone"
            for version in self.unknown_versions(migration_line)
        ] + [
            f"line {foreign!r} is not one of riverpy's: left alone"
            for foreign in sorted(self.applied_at_by_line.keys() - set(list_migration_lines()))
        ]

    def make_skipped_versions_message(self, migration_line: str) -> str:
        """Return the error text for skipped versions. Call this only if `skipped_versions` returns
        at least one version."""
        skipped = ", ".join(map(str, self.skipped_versions(migration_line)))
        return (
            f"river_migration in schema {self.schema!r} records version "
            f"{max(self.applied_versions(migration_line))} of line {migration_line!r}, but not "
            f"{skipped} below it: versions are applied in order only. If you know that the tables "
            "have the missing versions, insert their rows into "
            f"{quote_identifier(self.schema)}.river_migration. "
            "Otherwise restore the tables from a backup, or move them away and migrate again"
        )

    def make_unrecorded_migrations_message(self) -> str:
        """Return the error text if `are_migrations_unrecorded` is True."""
        newest = max(load_migrations(MAIN_MIGRATION_LINE))
        table = f"{quote_identifier(self.schema)}.river_migration"
        return (
            f"schema {self.schema!r} has River's tables, but river_migration records no version of "
            f"them. If you know that they are complete up to version {newest}, record it: "
            f"CREATE TABLE IF NOT EXISTS {table} (line text NOT NULL, version bigint NOT NULL, "
            "created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (line, version)); "
            f"INSERT INTO {table} (line, version) SELECT 'main', generate_series(1, {newest}). "
            "Otherwise move the tables away and migrate again"
        )


async def read_schema_state(connection: Transaction, schema: str | None) -> SchemaState:
    """Read the state of a schema. If `schema` is None, use the schema in the search path that has
    River's tables. If none has these tables, use the first schema of the search path.

    Raises:
        ServerVersionError: PostgreSQL is older than 13.
        SchemaMissingError: the schema does not exist.
        TimeoutError: the server did not answer within `SCHEMA_READ_TIMEOUT`.
    """
    check_server_version(connection)
    with fail_after(SCHEMA_READ_TIMEOUT):
        statement = get_query("river_migration", "migration_place", None)
        (row,) = await statement.fetch(connection, schema=schema)
        name: str | None = row["schema"]
        if name is None:
            raise SchemaMissingError(
                "the connection's search_path names no schema that exists: "
                "give riverpy the schema's name"
            )
        if not row["schema_exists"]:
            raise SchemaMissingError(
                f"schema {name!r} does not exist: correct the name, or create it with "
                f"CREATE SCHEMA {quote_identifier(name)} (riverpy creates tables, never schemas)"
            )
        applied: dict[str, dict[int, datetime]] = {}
        if row["has_record"]:
            block = "migration_list" if row["has_lines"] else "migration_list_without_line"
            for record in await get_query("river_migration", block, name).fetch(connection):
                at = _UNIX_EPOCH + timedelta(microseconds=record["created_at"])
                applied.setdefault(record["line"], {})[record["version"]] = at
    return SchemaState(
        schema=name,
        has_migration_line_column=row["has_lines"],
        has_job_table=row["has_jobs"],
        invalid_indexes=row["invalid_indexes"],
        applied_at_by_line=applied,
        row_security=RowSecurity(row["role"], row["hidden_tables"], row["filtered_tables"]),
    )


async def check_schema(
    connection: Transaction, schema: str | None, *, url: str | None = None
) -> SchemaState:
    """Check that River's tables exist and are new enough. Return the state of the schema.

    This logs a warning if the database has newer versions than this riverpy, or if row-level
    security may hide rows. `url` is the URL of the connection, for the command in an error text.

    Raises:
        SchemaMissingError: tables are missing or too old. The text has the command to run.
        ConfigError: the name of the schema is too long, or row-level security hides all rows of a
            table from the role.
        ServerVersionError: PostgreSQL is older than 13.
        TimeoutError: no answer within `SCHEMA_READ_TIMEOUT`.
    """
    state = await read_schema_state(connection, schema)
    validate_schema_name_length(state.schema)
    security = state.row_security
    if security.hidden_tables:
        raise ConfigError(f"{security.problem_text}: {security.remedy_text}")
    if security.filtered_tables:
        _log.warning(
            ROW_LEVEL_SECURITY_FOUND,
            role=security.role,
            tables=security.affected_tables,
            effect=security.problem_text,
            advice=security.remedy_text,
        )
    if state.are_migrations_unrecorded():
        raise SchemaMissingError(state.make_unrecorded_migrations_message())
    if state.skipped_versions(MAIN_MIGRATION_LINE):
        raise SchemaMissingError(state.make_skipped_versions_message(MAIN_MIGRATION_LINE))
    if state.missing_needed_versions():
        found = (
            "lacks River's migrations "
            + ", ".join(map(str, state.missing_versions(MAIN_MIGRATION_LINE)))
            if state.has_job_table
            else "does not have River's tables"
        )
        command = make_migrate_command("riverpy migrate up", schema, url)
        raise SchemaMissingError(f"schema {state.schema!r} {found}: run `{command}`")
    if unknown := state.unknown_versions(MAIN_MIGRATION_LINE):
        _log.warning(
            NEWER_MIGRATIONS_FOUND,
            advice="update riverpy",
            schema=state.schema,
            unknown_versions=unknown,
        )
    return state


def require_migration_version(
    state: SchemaState, version: int, schema: str | None, *, url: str | None
) -> None:
    """If a version of line `riverpy` is not applied, raise SchemaMissingError with the command to
    run."""
    if version not in state.applied_versions(RIVERPY_MIGRATION_LINE):
        command = make_migrate_command(
            f"riverpy migrate up --line {RIVERPY_MIGRATION_LINE}", schema, url
        )
        raise SchemaMissingError(
            f"schema {state.schema!r} lacks version {version} of line {RIVERPY_MIGRATION_LINE!r}, "
            f"which {FEATURES_BY_MIGRATION[version]} need: run `{command}`"
        )


def warn_of_missing_features(state: SchemaState, schema: str | None, *, url: str | None) -> None:
    """Log the features that do not work because their tables are missing, and the command that
    creates these tables."""
    if missing := state.missing_versions(RIVERPY_MIGRATION_LINE):
        _log.warning(
            RIVERPY_TABLES_NOT_FOUND,
            schema=state.schema,
            off=[text for version, text in FEATURES_BY_MIGRATION.items() if version in missing],
            command=make_migrate_command(
                f"riverpy migrate up --line {RIVERPY_MIGRATION_LINE}", schema, url
            ),
        )


riverpy_program_by_url: dict[str, str] = {}
"""The program that runs riverpy's commands for a database (such as Django's `manage.py`), by the
database URL. The program reads the URL and the schema from its settings, so its commands need no
options for them."""


def make_migrate_command(command: str, schema: str | None, url: str | None) -> str:
    """Return `command` with the options for the database and the schema, for a message. If
    `riverpy_program_by_url` has a program for the URL, return `command` after this program's name,
    without options."""
    if url is not None and (program := riverpy_program_by_url.get(url)):
        return f"{program} {command}"
    command += f" --database-url {quote(mask_passwords(url)) if url else 'URL'}"
    return command if schema is None else f"{command} --schema {schema}"
