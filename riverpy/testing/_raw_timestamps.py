"""RawTimestampConnection: an adapter that runs statements of a running client on a test's
connection.

These statements read and write timestamps as integers, but a test's connection uses `datetime`. The
adapter converts between the two.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from riverpy._postgres.transactions import savepoint
from riverpy._timestamps import decode_timestamp, encode_timestamp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Connection, Transaction

CACHED_STATEMENTS_MAX = 100
"""The maximum number of statements whose timestamp parameters are cached."""
_TIMESTAMP_PARAMETER_PATTERN = re.compile(r"\$(\d+)::timestamptz\b")


@lru_cache(maxsize=CACHED_STATEMENTS_MAX)
def find_timestamp_parameters(statement: str) -> frozenset[int]:
    """Return the positions of the parameters that are timestamps or arrays of timestamps. The
    parameter `$1` has the position 0."""
    return frozenset(int(number) - 1 for number in _TIMESTAMP_PARAMETER_PATTERN.findall(statement))


class RawTimestampConnection:
    """An adapter of a connection that reads and writes timestamps as integers: microseconds since
    the beginning of 2000."""

    def __init__(self, connection: Transaction) -> None:
        """Create the adapter. `connection` is an asyncpg connection, or riverpy's own adapter of a
        session of another library."""
        self._connection = connection

    @classmethod
    def wrap(cls, connection: Transaction) -> Connection:
        """Return an adapter of `connection`. For the type checker its type is `Connection`, but it
        has only those methods of a connection that riverpy's statements use."""
        return cast("Connection", cls(connection))

    async def fetch(self, statement: str, *values: object) -> list[Any]:
        """Run a statement with the parameters `$1`, `$2`, … and return all rows."""
        at = find_timestamp_parameters(statement)
        given = [
            _to_datetime(value) if index in at else value for index, value in enumerate(values)
        ]
        rows = await self._connection.fetch(statement, *given)
        return [tuple(map(_to_raw_timestamp, row)) for row in rows]

    async def execute(self, statement: str, *values: object) -> None:
        """Run a statement and ignore its rows."""
        await self.fetch(statement, *values)

    def transaction(self) -> AbstractAsyncContextManager[None]:
        """Open a savepoint."""
        return savepoint(self._connection)


def _to_datetime(value: object) -> object:
    if isinstance(value, list):
        return [decode_timestamp(one) for one in cast("Sequence[int]", value)]
    return decode_timestamp(cast("int | None", value))


def _to_raw_timestamp(value: object) -> object:
    return encode_timestamp(value) if isinstance(value, datetime) else value
