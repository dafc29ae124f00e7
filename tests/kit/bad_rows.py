"""Job rows that a trigger makes slow, or that it refuses with errors of many classes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.kit.server_faults import row_trigger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SLOW_SHARE = 50
"""One job in so many is slow."""
REFUSED_SHARE = 199
"""One job in so many is refused."""
SLOWEST = 15
"""Seconds for each update of one row: longer than a statement may take."""
SQLSTATES = (
    *("40001", "53200", "55000", "57014", "58030", "08006", "XX001"),
    *("23514", "22023"),
)
"""Serialization, memory, object state, cancelled, I/O, connection, corrupt data; and two of data
that cannot be stored."""


@asynccontextmanager
async def slow_rows(url: str, slowest_id: int) -> AsyncGenerator[None]:
    """Each update of some job rows takes 1 to 100 ms, and of one row `SLOWEST`."""
    body = (
        f"PERFORM pg_sleep(CASE WHEN OLD.id = {slowest_id} THEN {SLOWEST}"
        " ELSE 0.001 + random() * 0.099 END);"
    )
    when = f"OLD.id % {SLOW_SHARE} = 0 OR OLD.id = {slowest_id}"
    async with row_trigger(url, "slow_rows", when=when, body=body):
        yield


@asynccontextmanager
async def refused_rows(url: str) -> AsyncGenerator[None]:
    """Each update of some job rows is refused, with one error for each row."""
    states = ", ".join(f"'{state}'" for state in SQLSTATES)
    body = (
        f"RAISE EXCEPTION 'this row is refused' USING ERRCODE = (ARRAY[{states}])"
        f"[1 + (OLD.id / {REFUSED_SHARE}) % {len(SQLSTATES)}];"
    )
    when = f"OLD.id % {REFUSED_SHARE} = 0"
    async with row_trigger(url, "refused_rows", when=when, body=body):
        yield
