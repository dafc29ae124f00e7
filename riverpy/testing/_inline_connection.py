"""InlineConnection: gives a test's connection to code that expects a DedicatedConnection."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from riverpy._calls.base import TransactionIsolation
    from riverpy._postgres.driver import Connection, Transaction


class TransactionOpener(Protocol):
    """Opens a savepoint in the transaction of a test, or a transaction on the pool of a client."""

    def __call__(
        self, *, isolation: TransactionIsolation | None = "read_committed"
    ) -> AbstractAsyncContextManager[Transaction]:
        """Open it. With the isolation `autocommit`, give the connection itself, for one
        statement."""
        ...


async def _refuse_connection() -> NoReturn:
    raise AssertionError("a test's connection is never made again")


class InlineConnection(DedicatedConnection):
    """A connection of a test."""

    def __init__(self, name: str, open_transaction: TransactionOpener) -> None:
        super().__init__(name, _refuse_connection, ConnectionOutageTracker(client_id="test"))
        self._open_transaction = open_transaction

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Connection]:
        """Use the connection in the `async with` block, in a savepoint or a transaction."""
        async with self._open_transaction() as connection:
            # The statements use only methods that a caller's connection has too.
            yield cast("Connection", connection)
