"""Protocols for the engines and pools that a blocking client accepts. They describe classes of
other libraries, which need not be imported."""

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
        """Open a transaction for a `with` block."""
        ...

    def dispose(self) -> None:
        """Close the connections of the pool."""
        ...


class PsycopgPool(Protocol):
    """psycopg's `ConnectionPool`."""

    def connection(self) -> AbstractContextManager[BlockingPsycopgConnection]:
        """Take a connection for a `with` block."""
        ...


Database: TypeAlias = str | SqlAlchemyEngine | PsycopgPool | BlockingPsycopgConnection
"""The types that `riverpy.sync.Client` accepts as its database."""
