"""CallerSession: the base class of the adapters for connections and sessions of other libraries."""

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
    """Return the error for a connection without an open transaction. `is_blocking` decides whether
    the example in the text has `with` or `async with`."""
    begin = "with" if is_blocking else "async with"
    return TransactionError(
        "the connection given as tx is in no transaction, so the call would commit by itself: "
        f"begin one, as with `{begin} connection.transaction():`, or leave tx out"
    )


class CallerTransactionState(Enum):
    """The state of a caller's transaction, as far as it is known without a round trip."""

    USABLE = auto()
    CLOSED = auto()
    NO_TRANSACTION = auto()
    ABORTED = auto()


class NestedTransaction(ABC):
    """A savepoint that SQLAlchemy or Django has begun. These libraries keep state in Python, such
    as the objects of a session. A rollback also restores this state if the library has begun the
    savepoint."""

    @abstractmethod
    async def end(self, *, keep: bool) -> None:
        """End the savepoint. If `keep` is False, undo the changes that were made since the
        savepoint was set. If the caller's code has already ended the savepoint, do nothing."""


class CallerSession(ABC):
    """The adapter of a connection or session of a library other than asyncpg. To run statements,
    riverpy calls the same methods on an adapter as on a connection of asyncpg.

    Errors of the library are raised as asyncpg's errors with the same SQLSTATE. Statements run in
    the caller's transaction, except if `commits_by_itself` is True.
    """

    library: str
    """The library's name, for error texts."""
    is_blocking = True
    """Whether `fetch` blocks the thread until the server has answered. Awaiting such a `fetch` does
    not let other tasks run."""
    commits_by_itself = False
    """Whether each statement commits by itself, because no transaction is open and the library
    allows statements without one (Django outside `atomic`)."""
    has_transaction_blocks = False
    """Whether the adapter supports the method `transaction`. If True, riverpy calls this method to
    begin a savepoint, so that the library knows the savepoint. If False, riverpy sends the SQL
    statement SAVEPOINT itself."""
    has_copy = False
    """Whether the adapter has a method `copy_to_table`, like asyncpg's."""
    pooler_remedy: str
    """The advice in error texts: what the caller must change if the connection goes through a
    pooler in transaction mode."""

    @property
    @abstractmethod
    def native_session(self) -> object:
        """The connection or session of the library."""

    @abstractmethod
    def get_state(self) -> CallerTransactionState:
        """Return the state of the transaction. This sends no statement."""

    @abstractmethod
    async def fetch(self, statement: str, *values: object) -> list[Record]:
        """Run a statement with the parameters `$1`, `$2`, … and return all rows."""

    async def fetchrow(self, statement: str, *values: object) -> Record | None:
        """Run a statement and return the first row, or None if there is no row."""
        rows = await self.fetch(statement, *values)
        return rows[0] if rows else None

    async def fetchval(self, statement: str, *values: object) -> Any:
        """Run a statement and return the first column of the first row, or None if there is no
        row."""
        row = await self.fetchrow(statement, *values)
        return None if row is None else row[0]

    async def execute(self, statement: str, *values: object) -> None:
        """Run a statement."""
        await self.fetch(statement, *values)

    async def flush(self) -> None:
        """Write the changed objects of an ORM session. On a connection, this does nothing."""
        return

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager in which the caller's code runs. For a session of SQLAlchemy or
        a connection of Django, it begins a savepoint with the library, so that a rollback also
        restores the library's state in Python. For any other connection, it does nothing."""
        return nullcontext()

    async def begin_nested(self) -> NestedTransaction | None:
        """For a session of SQLAlchemy or a connection of Django, begin a savepoint with the
        library, so that a rollback also restores the library's state in Python. For any other
        connection, begin no savepoint and return None."""
        return None

    def keep_connection_if_cancelled(self) -> AbstractContextManager[None]:
        """In the `with` block, keep the connection open if a statement on it is cancelled.
        By default, SQLAlchemy closes the connection. The caller must set a savepoint before the
        block, because a cancelled statement aborts the transaction."""
        return nullcontext()

    def transaction(self, **_: object) -> AbstractAsyncContextManager[None]:
        """Run the `async with` block in a transaction or savepoint of the library. Only adapters
        with `has_transaction_blocks` support this."""
        raise NotImplementedError

    def is_in_transaction(self) -> bool:
        """Whether a transaction is open. An aborted transaction counts as open."""
        return self.get_state() in (CallerTransactionState.USABLE, CallerTransactionState.ABORTED)

    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self.get_state() is CallerTransactionState.CLOSED
