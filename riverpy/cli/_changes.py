"""Commands that change several items, each in a transaction of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from riverpy._postgres.driver import DATABASE_ERRORS, is_refusal
from riverpy.cli._connected import connected, with_timeout
from riverpy.cli._output import print_json, print_note
from riverpy.cli._run import EXIT_FAILURE, CommandError, describe, run, show_traceback
from riverpy.client import Client
from riverpy.config import Config
from riverpy.errors import JobDamagedError, NotFoundError, UniqueConflictError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings

ItemT = TypeVar("ItemT", int, str)

UNCHANGED = "none"
FAILED = "failed"
NOTE_INTERVAL = 2.0
"""Seconds between two notes about the progress, with `--json`."""


class ItemNames(NamedTuple):
    """The words for the changed items, in messages and in `--json` output."""

    singular: str
    plural: str
    key: str


class ItemResult(NamedTuple):
    """The result of changing one item."""

    action: str
    """The change, for programs. `UNCHANGED`: no change was needed. `FAILED`: the change failed."""
    message: str


class _ResultPrinter:
    """Prints each result at once, or with `--json` all results as one object at the end."""

    def __init__(self, names: ItemNames, total: int, *, as_json: bool) -> None:
        self._names = names
        self._total = total
        self._as_json = as_json
        self._results: list[dict[str, object]] = []
        self._noted_at = time.monotonic()
        self.has_failed = False

    def add(self, item: object, result: ItemResult) -> None:
        """Add the result of one item."""
        self._results.append({self._names.key: item, **result._asdict()})
        self.has_failed = self.has_failed or result.action == FAILED
        if self._as_json:
            self._print_progress()
        elif result.action == FAILED:
            print_note(f"riverpy: {result.message}")
        else:
            click.echo(result.message)

    def finish(self) -> None:
        """Print the JSON object, even if it does not have the results of all items."""
        if self._as_json and self._results:
            print_json({self._names.plural: self._results})

    def _print_progress(self) -> None:
        if time.monotonic() - self._noted_at >= NOTE_INTERVAL:
            self._noted_at = time.monotonic()
            print_note(f"{len(self._results):,} of {self._total:,} {self._names.plural}")


def change_each(
    database: DatabaseSettings,
    names: ItemNames,
    items: Sequence[ItemT],
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemResult]],
    *,
    as_json: bool,
) -> None:
    """Apply `change` to each item in order. If one item fails, the others are still changed.

    Raises:
        Exit: with code 1, if an item failed.
        CommandError: the database failed. Only the items whose results are printed are changed.
    """
    printer = _ResultPrinter(names, len(items), as_json=as_json)

    async def change_all() -> None:
        async with connected(database) as (connection, schema, _state):
            client = Client(config=Config(schema=schema))
            for number, item in enumerate(items, 1):
                try:
                    result = await with_timeout("it", _change_one(client, item, connection, change))
                except DATABASE_ERRORS as error:
                    if _is_refused(error):
                        message = f"{names.singular} {item} cannot be changed: {describe(error)}"
                        printer.add(item, ItemResult(FAILED, message))
                        continue
                    show_traceback(error)
                    rest = "; those after it are unchanged" if number < len(items) else ""
                    raise CommandError(
                        f"changing {names.singular} {item} failed: {describe(error)}{rest}"
                    ) from error
                printer.add(item, result)

    try:
        run(change_all)
    finally:
        printer.finish()
    if printer.has_failed:
        raise click.exceptions.Exit(EXIT_FAILURE)


def _is_refused(error: Exception) -> bool:
    """Whether the database refuses to change this row, for example because of a trigger. A missing
    permission or table (class 42) affects all rows."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return is_refusal(error) and not sqlstate.startswith("42")


async def _change_one(
    client: Client,
    item: ItemT,
    connection: Connection,
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemResult]],
) -> ItemResult:
    try:
        async with connection.transaction():
            return await change(client, item, connection)
    except (JobDamagedError, NotFoundError, UniqueConflictError) as error:
        return ItemResult(FAILED, str(error))
