"""Opens transactions of a blocking client on a psycopg connection or pool."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from riverpy._postgres.sessions.errors import make_asyncpg_error
from riverpy._postgres.sessions.psycopg import PsycopgSession
from riverpy.errors import ClientStateError, TransactionError
from riverpy.sync._database import (
    BlockingDatabase,
    make_connect_error,
    translate_context_manager_errors,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    from riverpy.sync._database import Isolation

_ISOLATION_LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "repeatable_read": IsolationLevel.REPEATABLE_READ,
}


@contextmanager
def open_transaction(
    connection: psycopg.Connection[Any], isolation: Isolation
) -> Generator[PsycopgSession]:
    """Open a transaction with an isolation level. The connection must not be in a transaction.
    After the transaction, the isolation level that the connection had before is restored."""
    before = connection.isolation_level
    level = before if isolation is None else _ISOLATION_LEVELS[isolation]
    if level != before:  # psycopg sends the isolation level with the next BEGIN, not now
        connection.isolation_level = level

    def translate(error: psycopg.Error) -> Exception:
        return make_asyncpg_error(error, is_connection_closed=connection.closed)

    try:
        with translate_context_manager_errors(connection.transaction(), psycopg.Error, translate):
            yield PsycopgSession(connection)
    finally:
        status = connection.pgconn.transaction_status
        if level != before and status == TransactionStatus.IDLE:
            connection.isolation_level = before


class PsycopgConnectionDatabase(BlockingDatabase):
    """Opens the transactions of a blocking client on the caller's psycopg connection. Only one
    thread at a time can have a transaction open."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # reentrant: the function of `run_once` may call the client

    @contextmanager
    def transaction(self, isolation: Isolation) -> Generator[PsycopgSession]:
        with self._lock:
            connection = self._connection
            if connection.closed:
                raise ClientStateError("the connection of the client is closed")
            if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                raise TransactionError(
                    "the connection of the client is in a transaction, so the call would not "
                    "commit: pass it as tx, or end the transaction first"
                )
            with open_transaction(connection, isolation) as session:
                yield session


class TypedPsycopgPool(Protocol):
    """The type of a pool of psycopg connections, such as `psycopg_pool.ConnectionPool`."""

    def connection(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Borrow a connection of the pool for a `with` block."""
        ...


class PsycopgPoolDatabase(BlockingDatabase):
    """Opens the transactions of a blocking client on the caller's psycopg pool. Never closes the
    pool."""

    def __init__(self, pool: TypedPsycopgPool) -> None:
        self._pool = pool

    @contextmanager
    def transaction(self, isolation: Isolation) -> Generator[PsycopgSession]:
        pooled = translate_context_manager_errors(
            self._pool.connection(), psycopg.Error, make_connect_error
        )
        with pooled as connection, open_transaction(connection, isolation) as session:
            yield session
