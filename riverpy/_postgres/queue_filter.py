"""Filters: a statement over all queues, over some, or over all but some."""

from __future__ import annotations

from typing import NamedTuple

from riverpy._postgres.sql_files import query


class QueueFilter(NamedTuple):
    """Which queues a statement is about."""

    queues: tuple[str, ...]
    is_only: bool
    """Whether it is about these, or about all others."""


def filtered(
    file: str,
    name: str,
    schema: str | None,
    within: QueueFilter | None,
    values: dict[str, object],
) -> tuple[str, list[object]]:
    """The text of the block `name`, or of its variant for this filter, and its arguments.

    Each variant is a text of its own. One that served all would hide from a generic plan that the
    queue leads into an index.
    """
    if within is not None:
        name += "_in_queues" if within.is_only else "_except_queues"
        values = {**values, "queues": within.queues}
    statement = query(file, name, schema)
    return statement.text, statement.arguments(values)
