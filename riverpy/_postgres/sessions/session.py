"""CallerSession: the base of the adapters of other libraries' connections and sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from riverpy._postgres.sessions.records import Record


def make_no_transaction_error(*, is_blocking: bool) -> TransactionError:
    """Return the error for a connection that is in no transaction."""
    begin = "with" if is_blocking else "async with"
    return TransactionError(
        "the connection given as tx is in no transaction, so the call would commit by itself: "
        f"begin one, as with `{begin} connection.transaction():`, or leave tx out"
    )


class SessionState(Enum):
    """The state of a caller's transaction, as far as it is known without a round trip."""

    USABLE = auto()
    CLOSED = auto()
    NO_TRANSACTION = auto()
    ABORTED = auto()


class NestedTransaction(ABC):
    """A savepoint of a library that must know about savepoints."""

    @abstractmethod
    async def end(self, *, keep: bool) -> None:
        """End the savepoint: keep what was done since its begin, or undo it. If the caller has
        ended it already, this does nothing."""


class CallerSession(ABC):
    """A connection or session of another library than asyncpg, with the methods of asyncpg's
    connection that riverpy's statements use.

    Errors of the library are raised as asyncpg's errors with the same SQLSTATE. A statement is sent
    only in the caller's transaction.
    """

    library: str
    """The library's name, for error texts."""
    is_blocking = True
    """Whether `fetch` blocks the thread until the server has answered. Then no `await` waits."""
    commits_by_itself = False
    """Whether no transaction is open, but statements are allowed: each one commits by itself."""
    has_transaction_blocks = False
    """Whether riverpy begins savepoints, and its own transactions, with `transaction`."""
    has_copy = False
    """Whether there is a method `copy_to_table`, like asyncpg's."""
    pooler_remedy: str
    """What to set for a pooler in transaction mode."""

    @property
    @abstractmethod
    def native_session(self) -> object:
        """The connection or session of the library."""

    @abstractmethod
    def get_state(self) -> SessionState:
        """Return the state of the transaction. No statement is sent."""

    @abstractmethod
    async def fetch(self, statement: str, *values: object) -> list[Record]:
        """Run a statement with the parameters `$1`, `$2`, … and return all rows."""

    async def fetchrow(self, statement: str, *values: object) -> Record | None:
        """Run a statement and return the first row."""
        rows = await self.fetch(statement, *values)
        return rows[0] if rows else None

    async def fetchval(self, statement: str, *values: object) -> Any:
        """Run a statement and return the first column of the first row."""
        row = await self.fetchrow(statement, *values)
        return None if row is None else row[0]

    async def execute(self, statement: str, *values: object) -> None:
        """Run a statement."""
        await self.fetch(statement, *values)

    async def flush(self) -> None:
        """Write the changed objects of an ORM session. On a connection, this does nothing."""
        return

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        """Return a savepoint of the library for the caller's code, if the library must know what a
        rollback undoes. On a connection without objects, the context manager does nothing."""
        return nullcontext()

    async def begin_nested(self) -> NestedTransaction | None:
        """Begin a savepoint of the library. None: the library need not know about savepoints."""
        return None

    def keep_connection_if_cancelled(self) -> AbstractContextManager[None]:
        """During a `with` block, keep the connection if a statement on it is cancelled, also if the
        library would close it. A savepoint was set before."""
        return nullcontext()

    def transaction(self, **_: object) -> AbstractAsyncContextManager[None]:
        """Run an `async with` block in the library's transaction or savepoint, if
        `has_transaction_blocks` is true."""
        raise NotImplementedError

    def is_in_transaction(self) -> bool:
        """Whether a transaction is open, aborted or not."""
        return self.get_state() in (SessionState.USABLE, SessionState.ABORTED)

    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self.get_state() is SessionState.CLOSED
