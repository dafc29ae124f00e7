"""The types of the objects that a caller may pass as `tx=`. Protocols describe the classes of other
libraries, so riverpy need not import those libraries."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from riverpy._postgres.driver import Transaction


class PsycopgConnection(Protocol):
    """A protocol that matches psycopg's `AsyncConnection`."""

    @property
    def pgconn(self) -> object:
        """psycopg's wrapper of the libpq connection."""
        ...

    async def set_autocommit(self, value: bool, /) -> None:
        """Set whether each statement commits by itself."""
        ...


class PsycopgCursor(Protocol):
    """A protocol that matches psycopg's `AsyncCursor`."""

    @property
    def connection(self) -> PsycopgConnection:
        """The connection of the cursor."""
        ...

    async def fetchone(self) -> object:
        """Return the next row."""
        ...


class SqlAlchemySession(Protocol):
    """A protocol that matches SQLAlchemy's `AsyncSession` and `async_scoped_session`."""

    async def connection(self) -> SqlAlchemyConnection:
        """Return the connection of the session's transaction."""
        ...

    async def flush(self) -> None:
        """Write changed objects to the database."""
        ...


class SqlAlchemyConnection(Protocol):
    """A protocol that matches SQLAlchemy's `AsyncConnection`."""

    async def get_raw_connection(self) -> object:
        """Return the driver's connection."""
        ...

    async def exec_driver_sql(self, statement: str, /) -> object:
        """Run a statement."""
        ...


class BlockingPsycopgConnection(Protocol):
    """A protocol that matches psycopg's `Connection`."""

    @property
    def pgconn(self) -> object:
        """psycopg's wrapper of the libpq connection."""
        ...

    def set_autocommit(self, value: bool, /) -> None:
        """Set whether each statement commits by itself."""
        ...


class BlockingPsycopgCursor(Protocol):
    """A protocol that matches psycopg's `Cursor`."""

    @property
    def connection(self) -> BlockingPsycopgConnection:
        """The connection of the cursor."""
        ...

    def fetchone(self) -> object:
        """Return the next row."""
        ...


class BlockingSqlAlchemySession(Protocol):
    """A protocol that matches SQLAlchemy's `Session` and `scoped_session`."""

    def connection(self) -> BlockingSqlAlchemyConnection:
        """Return the connection of the session's transaction."""
        ...

    def flush(self) -> None:
        """Write changed objects to the database."""
        ...


class BlockingSqlAlchemyResult(Protocol):
    """A protocol that matches the result of `exec_driver_sql` on SQLAlchemy's `Connection`."""

    @property
    def returns_rows(self) -> bool:
        """Whether the statement has a result set, which may be empty."""
        ...


class BlockingSqlAlchemyConnection(Protocol):
    """A protocol that matches SQLAlchemy's `Connection`."""

    def exec_driver_sql(self, statement: str, /) -> BlockingSqlAlchemyResult:
        """Run a statement."""
        ...


class DjangoConnection(Protocol):
    """A protocol that matches a Django connection, as `transaction.get_connection()` returns it."""

    @property
    def alias(self) -> str:
        """The alias of this connection's database in Django's setting DATABASES."""
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
"""What a caller passes as `tx=` to `riverpy.sync.Client`. A str is the alias of a database in
Django's setting DATABASES."""
