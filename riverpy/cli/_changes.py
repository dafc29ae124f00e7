"""Shared code of commands that change several jobs, queues or other items, each in its own
transaction."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from riverpy._postgres.driver import DATABASE_ERRORS, is_permanent_statement_error
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._output import print_json, print_note
from riverpy.cli._run import (
    EXIT_FAILURE,
    CommandError,
    error_to_one_line,
    print_traceback_if_debug,
    run_async,
)
from riverpy.client import Client
from riverpy.config import Config
from riverpy.errors import (
    JobDamagedError,
    JobRunningError,
    NotFoundError,
    UniqueConflictError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings

ItemT = TypeVar("ItemT", int, str)

ACTION_UNCHANGED = "none"
ACTION_FAILED = "failed"
PROGRESS_NOTE_INTERVAL = 2.0
"""The minimum number of seconds between two notes on stderr about how many items are changed. Only
commands with `--json` print these notes."""


class ItemChangeResult(NamedTuple):
    """The result of the change of one job, queue or other item of a command."""

    action: str
    """A word for the change. `ACTION_UNCHANGED` means that no change was needed, and
    `ACTION_FAILED` that the item could not be changed."""
    message: str


def change_items(
    database: DatabaseSettings,
    noun: str,
    json_key: str,
    items: Sequence[ItemT],
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemChangeResult]],
    *,
    as_json: bool,
) -> None:
    """Change each item in order. If one item fails, the next items are still changed.

    The result of an item is printed as soon as the item was handled. With `--json`, one object with
    all results is printed at the end instead.

    Args:
        database: the database of the command.
        noun: the word for an item in messages, such as `job`.
        json_key: the key of an item in the `--json` output, such as `id`.
        items: the ids or names of the items.
        change: changes one item in a transaction, and returns the result.
        as_json: whether the user has given the option `--json`.

    Raises:
        Exit: with code 1, if an item failed.
        CommandError: the database failed. The items after the failed item are unchanged.
    """
    results: list[dict[str, object]] = []
    noted_at = time.monotonic()

    def report_result(item: ItemT, result: ItemChangeResult) -> None:
        nonlocal noted_at
        results.append({json_key: item, **result._asdict()})
        if not as_json and result.action == ACTION_FAILED:
            print_note(f"riverpy: {result.message}")
        elif not as_json:
            click.echo(result.message)
        elif time.monotonic() - noted_at >= PROGRESS_NOTE_INTERVAL:
            noted_at = time.monotonic()
            print_note(f"{len(results):,} of {len(items):,} {noun}s")

    async def change_all_items() -> None:
        async with open_command_connection(database) as found:
            client = Client(config=Config(schema=found.schema))
            for number, item in enumerate(items, 1):
                try:
                    result = await _change_item(client, noun, item, found.connection, change)
                    report_result(item, result)
                except DATABASE_ERRORS as error:
                    print_traceback_if_debug(error)
                    rest = "; those after it are unchanged" if number < len(items) else ""
                    text = f"changing {noun} {item} failed: {error_to_one_line(error)}{rest}"
                    raise CommandError(text) from error

    try:
        run_async(change_all_items)
    finally:
        if as_json and results:
            print_json({f"{noun}s": results})
    if any(result["action"] == ACTION_FAILED for result in results):
        raise click.exceptions.Exit(EXIT_FAILURE)


def _is_error_of_one_row(error: Exception) -> bool:
    """Return whether an error affects only one row, for example an error that a trigger raised.
    Errors of class 42, such as a missing permission or table, affect all rows."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return is_permanent_statement_error(error) and not sqlstate.startswith("42")


async def _change_item(
    client: Client,
    noun: str,
    item: ItemT,
    connection: Connection,
    change: Callable[[Client, ItemT, Transaction], Awaitable[ItemChangeResult]],
) -> ItemChangeResult:
    async def change_in_transaction() -> ItemChangeResult:
        async with connection.transaction():
            return await change(client, item, connection)

    try:
        return await wait_for_statement("it", change_in_transaction())
    except (JobDamagedError, JobRunningError, NotFoundError, UniqueConflictError) as error:
        return ItemChangeResult(ACTION_FAILED, str(error))
    except DATABASE_ERRORS as error:
        if not _is_error_of_one_row(error):
            raise
        message = f"{noun} {item} cannot be changed: {error_to_one_line(error)}"
        return ItemChangeResult(ACTION_FAILED, message)
