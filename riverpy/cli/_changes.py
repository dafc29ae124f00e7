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


class ItemResult(NamedTuple):
    """The result of changing one item."""

    action: str
    """The change, for programs. `UNCHANGED`: no change was needed. `FAILED`: the change failed."""
    message: str


def change_each(
    database: DatabaseSettings,
    noun: str,
    key: str,
    items: Sequence[ItemT],
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemResult]],
    *,
    as_json: bool,
) -> None:
    """Apply `change` to each item in order. If one item fails, the others are still changed.

    Each result is printed at once, or with `--json` all results as one object at the end.

    Args:
        noun: the word for an item, in messages.
        key: the key of an item in the `--json` output.

    Raises:
        Exit: with code 1, if an item failed.
        CommandError: the database failed. Only the items whose results are printed are changed.
    """
    results: list[dict[str, object]] = []
    noted_at = time.monotonic()

    def report(item: ItemT, result: ItemResult) -> None:
        nonlocal noted_at
        results.append({key: item, **result._asdict()})
        if not as_json and result.action == FAILED:
            print_note(f"riverpy: {result.message}")
        elif not as_json:
            click.echo(result.message)
        elif time.monotonic() - noted_at >= NOTE_INTERVAL:
            noted_at = time.monotonic()
            print_note(f"{len(results):,} of {len(items):,} {noun}s")

    async def change_all() -> None:
        async with connected(database) as found:
            client = Client(config=Config(schema=found.schema))
            for number, item in enumerate(items, 1):
                try:
                    report(item, await _change_one(client, noun, item, found.connection, change))
                except DATABASE_ERRORS as error:
                    show_traceback(error)
                    rest = "; those after it are unchanged" if number < len(items) else ""
                    text = f"changing {noun} {item} failed: {describe(error)}{rest}"
                    raise CommandError(text) from error

    try:
        run(change_all)
    finally:
        if as_json and results:
            print_json({f"{noun}s": results})
    if any(result["action"] == FAILED for result in results):
        raise click.exceptions.Exit(EXIT_FAILURE)


def _is_refused(error: Exception) -> bool:
    """Whether the database refuses to change this row, for example because of a trigger. A missing
    permission or table (class 42) affects all rows."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return is_refusal(error) and not sqlstate.startswith("42")


async def _change_one(
    client: Client,
    noun: str,
    item: ItemT,
    connection: Connection,
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemResult]],
) -> ItemResult:
    async def change_in_transaction() -> ItemResult:
        async with connection.transaction():
            return await change(client, item, connection)

    try:
        return await with_timeout("it", change_in_transaction())
    except (JobDamagedError, NotFoundError, UniqueConflictError) as error:
        return ItemResult(FAILED, str(error))
    except DATABASE_ERRORS as error:
        if not _is_refused(error):
            raise
        return ItemResult(FAILED, f"{noun} {item} cannot be changed: {describe(error)}")
