"""Types of the engines and pools that a blocking client accepts. They are protocols, so that
SQLAlchemy and psycopg need not be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from riverpy._postgres.sessions.protocols import (
    BlockingPsycopgConnection,
    BlockingSqlAlchemyConnection,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class SqlAlchemyEngine(Protocol):
    """SQLAlchemy's `Engine`."""

    def begin(self) -> AbstractContextManager[BlockingSqlAlchemyConnection]:
        """Open a transaction for a `with` block, on a connection of the engine."""
        ...

    def dispose(self) -> None:
        """Close the connections of the pool."""
        ...


class PsycopgPool(Protocol):
    """psycopg's `ConnectionPool`."""

    def connection(self) -> AbstractContextManager[BlockingPsycopgConnection]:
        """Borrow a connection of the pool for a `with` block."""
        ...


Database: TypeAlias = str | SqlAlchemyEngine | PsycopgPool | BlockingPsycopgConnection
"""The types that `riverpy.sync.Client` accepts as its database."""
