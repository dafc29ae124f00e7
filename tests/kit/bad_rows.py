"""Rows that a trigger makes slow, or that it refuses with errors of many classes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tests.kit.server_faults import row_trigger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SLOWEST = 15
"""Seconds for each update of one row: longer than a statement may take."""
SQLSTATES = (
    *("40001", "53200", "55000", "57014", "58030", "08006", "XX001"),
    *("23514", "22023"),
)
"""Serialization, memory, object state, cancelled, I/O, connection, corrupt data; and two of data
that cannot be stored."""


class Table(NamedTuple):
    """A table, and which of its rows are hit; conditions and numbers are SQL about OLD."""

    name: str
    slow: str
    refused: str
    number: str
    """It chooses the error of a row."""


JOBS = Table("river_job", "OLD.id % 50 = 0", "OLD.id % 199 = 0", "OLD.id / 199")
LEASES = Table(
    "riverpy_lease", "true", "OLD.name IN ('s:one', 's:projection')", "(random() * 1000)::int"
)


@asynccontextmanager
async def slow_rows(url: str, table: Table, slowest: str = "false") -> AsyncGenerator[None]:
    """Each update of some rows takes 1 to 100 ms, and of those of a condition `SLOWEST`."""
    seconds = f"CASE WHEN {slowest} THEN {SLOWEST} ELSE 0.001 + random() * 0.099 END"
    body = f"PERFORM pg_sleep({seconds});"
    when = f"{table.slow} OR {slowest}"
    async with row_trigger(url, "slow_rows", table=table.name, when=when, body=body):
        yield


@asynccontextmanager
async def refused_rows(url: str, table: Table) -> AsyncGenerator[None]:
    """Each update of some rows is refused."""
    states = ", ".join(f"'{state}'" for state in SQLSTATES)
    body = (
        f"RAISE EXCEPTION 'this row is refused' USING ERRCODE = (ARRAY[{states}])"
        f"[1 + ({table.number}) % {len(SQLSTATES)}];"
    )
    async with row_trigger(url, "refused_rows", table=table.name, when=table.refused, body=body):
        yield
