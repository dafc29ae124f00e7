"""The types that a caller may pass as `tx=`. They describe classes of other libraries, so that
riverpy need not import these libraries."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from riverpy._postgres.driver import Transaction


class PsycopgConnection(Protocol):
    """psycopg's `AsyncConnection`."""

    @property
    def pgconn(self) -> object:
        """The connection of libpq."""
        ...

    async def set_autocommit(self, value: bool, /) -> None:
        """Set whether each statement commits by itself."""
        ...


class PsycopgCursor(Protocol):
    """psycopg's `AsyncCursor`."""

    @property
    def connection(self) -> PsycopgConnection:
        """The connection of the cursor."""
        ...

    async def fetchone(self) -> object:
        """Return the next row."""
        ...


class SqlAlchemySession(Protocol):
    """SQLAlchemy's `AsyncSession` and `async_scoped_session`."""

    async def connection(self) -> SqlAlchemyConnection:
        """Return the connection of the session's transaction."""
        ...

    async def flush(self) -> None:
        """Write changed objects to the database."""
        ...


class SqlAlchemyConnection(Protocol):
    """SQLAlchemy's `AsyncConnection`."""

    async def get_raw_connection(self) -> object:
        """Return the driver's connection."""
        ...

    async def exec_driver_sql(self, statement: str, /) -> object:
        """Run a statement."""
        ...


class BlockingPsycopgConnection(Protocol):
    """psycopg's `Connection`."""

    @property
    def pgconn(self) -> object:
        """The connection of libpq."""
        ...

    def set_autocommit(self, value: bool, /) -> None:
        """Set whether each statement commits by itself."""
        ...


class BlockingPsycopgCursor(Protocol):
    """psycopg's `Cursor`."""

    @property
    def connection(self) -> BlockingPsycopgConnection:
        """The connection of the cursor."""
        ...

    def fetchone(self) -> object:
        """Return the next row."""
        ...


class BlockingSqlAlchemySession(Protocol):
    """SQLAlchemy's `Session` and `scoped_session`."""

    def connection(self) -> BlockingSqlAlchemyConnection:
        """Return the connection of the session's transaction."""
        ...

    def flush(self) -> None:
        """Write changed objects to the database."""
        ...


class BlockingSqlAlchemyResult(Protocol):
    """The result of a statement that SQLAlchemy's `Connection` has run."""

    @property
    def returns_rows(self) -> bool:
        """Whether the statement returned rows."""
        ...


class BlockingSqlAlchemyConnection(Protocol):
    """SQLAlchemy's `Connection`."""

    def exec_driver_sql(self, statement: str, /) -> BlockingSqlAlchemyResult:
        """Run a statement."""
        ...


class DjangoConnection(Protocol):
    """A connection of Django, as `transaction.get_connection()` returns it."""

    @property
    def alias(self) -> str:
        """The alias in DATABASES."""
        ...

    @property
    def in_atomic_block(self) -> bool:
        """Whether a block of Django's `atomic` is open."""
        ...

    @property
    def needs_rollback(self) -> bool:
        """Whether the transaction can only be rolled back."""
        ...


CallerTransaction: TypeAlias = (
    Transaction | PsycopgConnection | PsycopgCursor | SqlAlchemySession | SqlAlchemyConnection
)
"""What a caller passes as `tx=` to a client with an event loop: a connection, cursor or session
with an open transaction."""
BlockingTransaction: TypeAlias = (
    BlockingPsycopgConnection
    | BlockingPsycopgCursor
    | BlockingSqlAlchemySession
    | BlockingSqlAlchemyConnection
    | DjangoConnection
    | str
)
"""What a caller passes as `tx=` to `riverpy.sync.Client`. A text is the alias of a database in
Django's setting DATABASES."""
