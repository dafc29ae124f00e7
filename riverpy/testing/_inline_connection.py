"""InlineConnection: lets code that expects a `DedicatedConnection` use the connection of a test."""

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
        """Return a context manager that opens the savepoint or transaction. With the isolation
        `autocommit` it opens neither, so that the connection can be used for one statement."""
        ...


async def _refuse_connection() -> NoReturn:
    raise AssertionError("a test's connection is never made again")


class InlineConnection(DedicatedConnection):
    """A `DedicatedConnection` that uses the connection of a test and never opens another one."""

    def __init__(self, name: str, open_transaction: TransactionOpener) -> None:
        super().__init__(name, _refuse_connection, ConnectionOutageTracker(client_id="test"))
        self._open_transaction = open_transaction

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Connection]:
        """Return a context manager that opens a savepoint or transaction on the test's
        connection."""
        async with self._open_transaction() as connection:
            # The callers use only methods that the connection of a test has too.
            yield cast("Connection", connection)
