"""The options that every command with a database has."""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click
import msgspec

from riverpy._dsn import validate_url
from riverpy._names import validate_schema
from riverpy.cli._run import debug_option
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class DatabaseSettings(msgspec.Struct, frozen=True):
    """Which database a command works on, after flags, environment and file were read."""

    url: str | None
    """None: nothing names a database."""
    schema: str | None
    """River's schema. None: the one that the database's search path finds."""

    def required_url(self) -> str:
        """The URL.

        Raises:
            ConfigError: there is none; the text says how to give one.
        """
        if self.url is None:
            raise ConfigError(
                "no database is given: use --database-url, RIVERPY_DATABASE_URL, DATABASE_URL, "
                "PGHOST and its like, or database-url in [tool.riverpy] of pyproject.toml"
            )
        return self.url


def database_options(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Add `--database-url`, `--schema`, `--debug`; pass `database: DatabaseSettings`."""

    @wraps(command)
    def with_database(
        *args: object, database_url: str | None, schema: str | None, **kwargs: object
    ) -> ResultT:
        settings = DatabaseSettings(
            database_url
            or os.environ.get("RIVERPY_DATABASE_URL")
            or os.environ.get("DATABASE_URL"),
            schema,
        )
        if settings.url is not None:
            validate_url(settings.url)
        if settings.schema is not None:
            validate_schema(settings.schema)
        return command(*args, database=settings, **kwargs)

    for option in (
        debug_option,
        click.option(
            "--schema", metavar="NAME", help="Schema of River's tables. Default: by search path."
        ),
        click.option(
            "--database-url",
            metavar="URL",
            help="Where the database is, as postgres://user@host/name.",
        ),
    ):
        with_database = option(with_database)
    return with_database
