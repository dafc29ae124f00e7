"""Options that several commands use."""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from riverpy._dsn import url_for_display
from riverpy.cli._embedded import find_running_dev_server
from riverpy.cli._output import print_note
from riverpy.cli._run import debug_option, get_debug_flag
from riverpy.cli._settings import DATABASE_URL, DEBUG, SCHEMA, SettingsError, SettingSources
from riverpy.cli._types import TEXT_TYPE, IntegerType
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

CommandT = TypeVar("CommandT", bound="Callable[..., object]")
ResultT = TypeVar("ResultT")

ROW_LIMIT_DEFAULT = 100
ROW_LIMIT_MAX = 10_000

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object."
)


def _make_filter_option(
    name: str, job_description: str, value_type: click.ParamType[str]
) -> Callable[[CommandT], CommandT]:
    text = f"Show only jobs {job_description}. Can be repeated."
    return click.option(f"--{name}", f"{name}s", type=value_type, multiple=True, help=text)


kinds_option = _make_filter_option("kind", "of this kind", TEXT_TYPE)
queues_option = _make_filter_option("queue", "in this queue", TEXT_TYPE)
states_option = _make_filter_option("state", "in this state", click.Choice([*map(str, JobState)]))
limit_option = click.option(
    "--limit",
    type=IntegerType(1, ROW_LIMIT_MAX),
    default=ROW_LIMIT_DEFAULT,
    show_default=True,
    help="Maximum number of rows.",
)

DATABASE_HINT = (
    "use --database-url, RIVERPY_DATABASE_URL, DATABASE_URL, PGHOST and related variables, or "
    "database-url in riverpy.toml or in [tool.riverpy] of pyproject.toml; or start one with "
    "`riverpy dev` in this directory, or with `riverpy db start`, which prints its URL"
)


class DatabaseSettings(msgspec.Struct, frozen=True):
    """The URL and the schema of the database that a command uses."""

    url: str | None
    """The URL of the database; None: no database is configured."""
    schema: str | None
    """The schema of River's tables; None: the search path of the database decides."""
    url_source: str = "default"
    schema_source: str = "default"

    def require_url(self) -> str:
        """Return the URL of the database. If none is configured, return the URL of the running
        `riverpy dev` in the current directory.

        Raises:
            SettingsError: no database is configured, and no `riverpy dev` runs in the directory.
        """
        if self.url is not None and self.url_source.startswith("--"):
            return self.url
        server = find_running_dev_server()
        if self.url is None:
            if server is None:
                raise SettingsError(f"no database is given: {DATABASE_HINT}")
            _print_note_once(
                f"riverpy: using the database of `riverpy dev` in this directory ({server.name})"
            )
            return server.url
        if server is not None and server.url != self.url:
            _print_note_once(
                f"riverpy: using the database {url_for_display(self.url)} from {self.url_source}, "
                f"not that of the running `riverpy dev` in this directory ({server.name})"
            )
        return self.url


_print_note_once = cache(print_note)


def database_options(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Add the options `--database-url`, `--schema` and `--debug` to a command. The command function
    receives a DatabaseSettings in its parameter `database`."""

    @wraps(command)
    def call_with_database(
        *args: object, database_url: str | None, schema: str | None, **kwargs: object
    ) -> ResultT:
        sources = SettingSources()
        sources.find_value(DEBUG, get_debug_flag())  # report a wrong value before any other error
        url = sources.find_value(DATABASE_URL, database_url)
        name = sources.find_value(SCHEMA, schema)
        database = DatabaseSettings(url.or_none(), name.or_none(), url.source, name.source)
        return command(*args, database=database, **kwargs)

    return DATABASE_URL.click_option()(SCHEMA.click_option()(debug_option(call_with_database)))
