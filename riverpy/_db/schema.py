"""The schema: which migrations riverpy knows, and which of them a database has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import TYPE_CHECKING

import structlog

from riverpy._sql import query, quote_identifier, splice_schema, sql_directory
from riverpy.errors import (
    ConfigError,
    MigrationError,
    SchemaMissingError,
    ServerVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import asyncpg
    from asyncpg.pool import PoolConnectionProxy

    AnyConnection = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]

MAIN_LINE = "main"
"""River's own line. All that riverpy needs of it is `MAIN_VERSION`."""

MAIN_VERSION = 7

LINES_VERSION = 5
"""The version of line `main` that gives `river_migration` its column `line`."""

SERVER_MAJOR_MIN = 13

READ_TIMEOUT = 10.0
"""Seconds that a read of the catalog or of `river_migration` may take."""

_FILE = re.compile(r"(\d{3})_(\w+)\.(up|down)\.sql")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_log = structlog.stdlib.get_logger("riverpy")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of a line, with `/* schema */` where the name of the schema goes."""

    version: int
    name: str
    up: str
    down: str


@cache
def lines() -> tuple[str, ...]:
    """The lines that riverpy knows: the directories below `sql/migrations`."""
    return tuple(
        sorted(
            entry.name
            for entry in sql_directory().joinpath("migrations").iterdir()
            if entry.is_dir()
        )
    )


@cache
def migrations(line: str) -> Mapping[int, Migration]:
    """The migrations of a line by version, lowest first. An unknown line is a ConfigError."""
    if line not in lines():
        raise ConfigError(f"unknown migration line {line!r}: riverpy has {', '.join(lines())}")
    texts: dict[tuple[int, str], dict[str, str]] = {}
    for entry in sql_directory().joinpath("migrations", line).iterdir():
        if match := _FILE.fullmatch(entry.name):
            key = int(match[1]), match[2].replace("_", " ")
            texts.setdefault(key, {})[match[3]] = entry.read_text("utf-8")
    return {
        version: Migration(version, name, up=text["up"], down=text["down"])
        for (version, name), text in sorted(texts.items())
    }


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What a database records about River's tables in one schema."""

    schema: str
    has_record: bool
    has_lines: bool
    has_jobs: bool
    applied: Mapping[str, Mapping[int, datetime]]
    """For each line its versions, lowest first, and when each was applied."""

    def versions(self, line: str) -> set[int]:
        return set(self.applied.get(line, ()))

    def unknown_versions(self, line: str) -> list[int]:
        """Versions of a newer riverpy or River, lowest first."""
        return sorted(self.versions(line) - set(migrations(line)))

    def foreign_lines(self) -> list[str]:
        """Lines that riverpy has no migrations for."""
        return sorted(set(self.applied) - set(lines()))


async def read_schema_state(connection: AnyConnection, schema: str | None) -> SchemaState:
    """Read which migrations are applied.

    Raises:
        ServerVersionError: PostgreSQL is older than 13.
        SchemaMissingError: the schema does not exist.
    """
    _check_server(connection)
    place = query("river_migration", "migration_place", None)
    row = await connection.fetchrow(
        place.text, *place.arguments({"schema": schema}), timeout=READ_TIMEOUT
    )
    assert row is not None  # noqa: S101 (a select without FROM's filter gives one row)
    name: str | None = row["schema"]
    if name is None:
        raise SchemaMissingError(
            "no schema is configured and the connection's search_path names none that exists: "
            "pass a schema"
        )
    if not row["schema_exists"]:
        raise SchemaMissingError(
            f"schema {name!r} does not exist: create it with "
            f"CREATE SCHEMA {quote_identifier(name)}; riverpy makes tables, never schemas"
        )
    applied: dict[str, dict[int, datetime]] = {}
    if row["has_record"]:
        block = "migration_list" if row["has_lines"] else "migration_list_without_line"
        text = query("river_migration", block, name).text
        for record in await connection.fetch(text, timeout=READ_TIMEOUT):
            at = _EPOCH + timedelta(microseconds=record["created_at"])
            applied.setdefault(record["line"], {})[record["version"]] = at
    return SchemaState(
        schema=name,
        has_record=row["has_record"],
        has_lines=row["has_lines"],
        has_jobs=row["has_jobs"],
        applied=applied,
    )


def _check_server(connection: AnyConnection) -> None:
    server = connection.get_server_version()
    if server.major < SERVER_MAJOR_MIN:
        raise ServerVersionError(
            f"the server is PostgreSQL {server.major}.{server.minor}: riverpy needs "
            f"{SERVER_MAJOR_MIN} or newer"
        )
