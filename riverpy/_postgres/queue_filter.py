"""Queue filters: run a statement for all queues, for some queues, or for all but some."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from asyncpg import Record

    from riverpy._postgres.driver import Transaction


class QueueFilter(NamedTuple):
    """The queues that a statement handles."""

    queues: tuple[str, ...]
    is_only: bool
    """True: the statement handles `queues`. False: it handles all other queues."""


async def fetch_filtered(
    connection: Transaction,
    file: str,
    name: str,
    schema: str | None,
    within: QueueFilter | None,
    /,
    **values: object,
) -> list[Record]:
    """Run the block `name` for the queues of a filter, and return all rows. None: all queues."""
    if within is not None:
        name += "_in_queues" if within.is_only else "_except_queues"
        values["queues"] = within.queues
    return await query(file, name, schema).fetch(connection, **values)
