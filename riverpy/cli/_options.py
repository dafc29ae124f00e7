"""The options that commands share."""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from riverpy._dsn import show_url
from riverpy.cli._embedded import running_dev_server
from riverpy.cli._output import print_note
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
from riverpy.cli._types import TEXT, IntegerType

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
    type=IntegerType(1, LIMIT_MAX),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="At most so many.",
)

HOW_TO_GIVE_A_DATABASE = (
    "use --database-url, RIVERPY_DATABASE_URL, DATABASE_URL, PGHOST and its like, or database-url "
    "in [tool.riverpy] of pyproject.toml; or start one with `riverpy dev` in this directory, or "
    "with `riverpy db start`, which prints its URL"
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
        """The URL; where none is given, that of the running `riverpy dev` of this directory.

        Raises:
            SettingsError: there is none; the text says how to give one.
        """
        if self.url is None:
            found = _dev_url()
            if found is None:
                raise SettingsError(f"no database is given: {HOW_TO_GIVE_A_DATABASE}")
            return found
        if not self.url_value.source.startswith("--"):
            _note_other_database(self.url, self.url_value.source)
        return self.url


@cache
def _dev_url() -> str | None:
    server = running_dev_server()
    if server is None:
        return None
    print_note(f"riverpy: the database is that of `riverpy dev` in this directory ({server.name})")
    return server.url


@cache
def _note_other_database(url: str, source: str) -> None:
    server = running_dev_server()
    if server is not None and server.url != url:
        print_note(
            f"riverpy: the database is {show_url(url)}, which {source} names, not that of the "
            f"running `riverpy dev` in this directory ({server.name})"
        )


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
