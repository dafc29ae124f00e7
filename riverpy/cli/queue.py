"""`riverpy queue`: list, pause and resume queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from riverpy.cli._changes import ACTION_UNCHANGED, ItemChangeResult, change_items
from riverpy.cli._connected import open_command_connection, wait_for_statement
from riverpy.cli._options import database_options, json_option, limit_option
from riverpy.cli._output import format_time, print_json, print_note, print_table
from riverpy.cli._run import run_async
from riverpy.cli._types import NONEMPTY_TEXT_TYPE
from riverpy.client import Client
from riverpy.config import Config
from riverpy.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.driver import Transaction
    from riverpy.cli._options import DatabaseSettings
    from riverpy.queue import Queue

_ALL_QUEUES = "*"

_names_argument = click.argument(
    "names", metavar="NAME...", type=NONEMPTY_TEXT_TYPE, nargs=-1, required=True
)


@click.group
def queue() -> None:
    """List, pause and resume queues."""


@queue.command("list")
@limit_option
@json_option
@database_options
def list_(database: DatabaseSettings, *, limit: int, as_json: bool) -> None:
    """List queues by name. Times are UTC.

    A queue is listed while clients work it and for some time afterwards. Clients that work a queue
    update its row regularly. LAST USED is the time of the last such update, or of the last change
    of the queue, such as a pause. `riverpy top` shows the number of waiting jobs.
    """
    found = run_async(_list_queues, database, limit + 1)
    queues = found[:limit]
    if as_json:
        print_json({"queues": queues})
    else:
        print_table(
            ("QUEUE", "PAUSED SINCE", "LAST USED", "CREATED"),
            [
                (one.name, *map(format_time, (one.paused_at, one.updated_at, one.created_at)))
                for one in queues
            ],
        )
    if len(found) > limit:
        print_note(f"there are more than {limit:,} queues: raise --limit")


@queue.command
@_names_argument
@json_option
@database_options
def pause(database: DatabaseSettings, *, names: Sequence[str], as_json: bool) -> None:
    """Pause queues: no client claims their jobs until they are resumed. '*' means all queues.

    Running jobs keep running, and jobs can still be inserted. Clients that listen react at once,
    others within 2 seconds. The exit code is 1 if a queue does not exist; the others are paused.
    """
    change_items(database, "queue", "name", names, _pause_queue, as_json=as_json)


@queue.command
@_names_argument
@json_option
@database_options
def resume(database: DatabaseSettings, *, names: Sequence[str], as_json: bool) -> None:
    """Resume paused queues. '*' means all queues.

    The exit code is 1 if a queue does not exist; the others are resumed.
    """
    change_items(database, "queue", "name", names, _resume_queue, as_json=as_json)


async def _list_queues(database: DatabaseSettings, limit: int) -> list[Queue]:
    async with open_command_connection(database) as found, found.connection.transaction():
        client = Client(config=Config(schema=found.schema))
        reading = client.queue_list(limit=limit, tx=found.connection)
        return await wait_for_statement("reading queues", reading)


async def _pause_queue(client: Client, name: str, tx: Transaction) -> ItemChangeResult:
    before = await _read_queue(client, name, tx)
    await client.queue_pause(name, tx=tx)
    if before is None:
        return ItemChangeResult("paused", "all queues are paused; running jobs keep running")
    if before.paused_at is not None:
        since = format_time(before.paused_at)
        return ItemChangeResult(ACTION_UNCHANGED, f"queue {name} has been paused since {since} UTC")
    return ItemChangeResult("paused", f"queue {name} is paused; running jobs keep running")


async def _resume_queue(client: Client, name: str, tx: Transaction) -> ItemChangeResult:
    before = await _read_queue(client, name, tx)
    await client.queue_resume(name, tx=tx)
    if before is None:
        return ItemChangeResult("resumed", "all queues are resumed")
    if before.paused_at is None:
        return ItemChangeResult(ACTION_UNCHANGED, f"queue {name} is not paused")
    return ItemChangeResult("resumed", f"queue {name} is resumed")


async def _read_queue(client: Client, name: str, tx: Transaction) -> Queue | None:
    """Return the queue with this name; for `*`, return None. Raise NotFoundError if the queue does
    not exist or, for `*`, if there is no queue at all."""
    if name != _ALL_QUEUES:
        return await client.queue_get(name, tx=tx)
    if not await client.queue_list(limit=1, tx=tx):
        raise NotFoundError("there is no queue: one exists after a client has worked it")
    return None
