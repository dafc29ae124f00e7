"""The types of what a caller passes as `tx=`. They describe classes of other libraries, so that
these need not be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import TypeAlias

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
        """Write changed objects."""
        ...


class SqlAlchemyConnection(Protocol):
    """SQLAlchemy's `AsyncConnection`."""

    async def get_raw_connection(self) -> object:
        """Return the driver's connection."""
        ...

    async def exec_driver_sql(self, statement: str, /) -> object:
        """Run a statement."""
        ...


if TYPE_CHECKING:
    CallerTransaction: TypeAlias = (
        Transaction | PsycopgConnection | PsycopgCursor | SqlAlchemySession | SqlAlchemyConnection
    )
    """What a caller passes as `tx=`: a connection, cursor or session with an open transaction."""
