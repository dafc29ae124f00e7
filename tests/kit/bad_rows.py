"""Rows that a trigger makes slow, or refuses with errors of many classes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tests.kit.server_faults import row_trigger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SLOWEST = 15
"""Seconds for each update of one row. It is longer than the statement timeout."""
SQLSTATES = (
    *("40001", "53200", "55000", "57014", "58030", "08006", "XX001"),
    *("23514", "22023"),
)
"""Serialization, memory, object state, cancelled, I/O, connection and corrupt data; and two for
data that cannot be stored."""


class Table(NamedTuple):
    """A table and the condition for its bad rows. Conditions and numbers are SQL about OLD."""

    name: str
    slow: str
    refused: str
    number: str
    """SQL for the number that selects the error of a row."""


JOBS = Table("river_job", "OLD.id % 50 = 0", "OLD.id % 199 = 0", "OLD.id / 199")
LEASES = Table(
    "riverpy_lease", "true", "OLD.name IN ('s:one', 's:projection')", "(random() * 1000)::int"
)


@asynccontextmanager
async def slow_rows(url: str, table: Table, slowest: str = "false") -> AsyncGenerator[None]:
    """Make each update of some rows take 1 to 100 ms, and `SLOWEST` for the rows of the
    condition."""
    seconds = f"CASE WHEN {slowest} THEN {SLOWEST} ELSE 0.001 + random() * 0.099 END"
    body = f"PERFORM pg_sleep({seconds});"
    when = f"{table.slow} OR {slowest}"
    async with row_trigger(url, "slow_rows", table=table.name, when=when, body=body):
        yield


@asynccontextmanager
async def refused_rows(url: str, table: Table) -> AsyncGenerator[None]:
    """Refuse each update of some rows."""
    states = ", ".join(f"'{state}'" for state in SQLSTATES)
    body = (
        f"RAISE EXCEPTION 'this row is refused' USING ERRCODE = (ARRAY[{states}])"
        f"[1 + ({table.number}) % {len(SQLSTATES)}];"
    )
    async with row_trigger(url, "refused_rows", table=table.name, when=table.refused, body=body):
        yield
