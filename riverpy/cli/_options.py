"""The options that commands share."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from riverpy.cli._run import debug_flag, debug_option
from riverpy.cli._settings import (
    DATABASE_URL,
    DEBUG,
    SCHEMA,
    SettingsError,
    Sources,
    Value,
    setting_option,
)
from riverpy.cli._types import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

LIMIT_DEFAULT = 100
LIMIT_MAX = 10_000

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
kinds_option = click.option(
    "--kind", "kinds", type=TEXT, multiple=True, help="Only of this kind; repeatable."
)
queues_option = click.option(
    "--queue", "queues", type=TEXT, multiple=True, help="Only in this queue; repeatable."
)
limit_option = click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="At most so many.",
)

_NOT_SET: Value[str] = Value(msgspec.UNSET, "default")


class DatabaseSettings(msgspec.Struct, frozen=True):
    """Which database a command works on, after flags, environment and file were read."""

    url: str | None
    """None: nothing names a database."""
    schema: str | None
    """River's schema. None: the one that the database's search path finds."""
    url_value: Value[str] = _NOT_SET
    """The URL with its source."""
    schema_value: Value[str] = _NOT_SET
    """The schema with its source."""

    def required_url(self) -> str:
        """The URL.

        Raises:
            SettingsError: there is none; the text says how to give one.
        """
        if self.url is None:
            raise SettingsError(
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
        sources = Sources()
        sources.value(DEBUG, debug_flag())  # a wrong value is an error now, not at a failure
        url_value = sources.value(DATABASE_URL, database_url)
        schema_value = sources.value(SCHEMA, schema)
        database = DatabaseSettings(
            url_value.or_none(), schema_value.or_none(), url_value, schema_value
        )
        return command(*args, database=database, **kwargs)

    for option in (
        debug_option,
        setting_option(
            SCHEMA,
            metavar="NAME",
            help="Schema of River's tables. Default: by search path.",
        ),
        setting_option(
            DATABASE_URL,
            metavar="URL",
            help="Where the database is, as postgres://user@host/name. Default: "
            "RIVERPY_DATABASE_URL, DATABASE_URL, PGHOST and its like, or the file.",
        ),
    ):
        with_database = option(with_database)
    return with_database
