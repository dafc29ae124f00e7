"""Sessions and connections of SQLAlchemy, with the drivers asyncpg and psycopg.

Statements run through SQLAlchemy. On the driver's connection they would run before SQLAlchemy has
begun the transaction, and a rollback would not undo them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sqlalchemy.exc import (
    DBAPIError,
    InvalidRequestError,
    SQLAlchemyError,
    UnboundExecutionError,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from riverpy._postgres.driver import InterfaceError
from riverpy._postgres.sessions.errors import make_asyncpg_error
from riverpy._postgres.sessions.records import make_records
from riverpy._postgres.sessions.session import CallerSession, SessionState
from riverpy._postgres.sessions.text import encode_value, to_pyformat
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.sessions.records import Record

_DRIVERS = ("asyncpg", "psycopg")
_EXECUTION_OPTIONS = {"stream_results": False, "no_parameters": False}
"""The caller's engine may have other values. Our results are small and read at once, and `%%` needs
parameters."""


def adapt(tx: object) -> CallerSession | None:
    """Return the adapter of an async session or connection; None: it is something else."""
    if isinstance(tx, async_scoped_session):
        return SqlAlchemySession(cast("async_scoped_session[AsyncSession]", tx)())
    if isinstance(tx, (AsyncSession, AsyncConnection)):
        return SqlAlchemySession(tx)
    return None


class SqlAlchemySession(CallerSession):
    """An async session or connection of SQLAlchemy."""

    library = "SQLAlchemy"
    pooler_remedy = (
        "make the engine as SQLAlchemy's page on asyncpg and PgBouncer says, or for psycopg with "
        "connect_args={'prepare_threshold': None}"
    )

    def __init__(self, tx: AsyncSession | AsyncConnection) -> None:
        self._tx = tx
        self._connection: AsyncConnection | None = None

    def get_state(self) -> SessionState:
        connection = self._connection if isinstance(self._tx, AsyncSession) else self._tx
        if connection is not None and (
            connection.sync_connection is None or connection.closed or connection.invalidated
        ):
            return SessionState.CLOSED
        return SessionState.USABLE  # SQLAlchemy begins by itself

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        connection = self._connection
        if connection is None:
            connection = self._connection = await self._open()
        try:
            if connection.dialect.driver == "asyncpg":
                parameters: Any = values
            else:
                statement = to_pyformat(statement)
                parameters = {
                    f"p{number}": encode_value(value) for number, value in enumerate(values, 1)
                }
            result = await connection.exec_driver_sql(
                statement, parameters, execution_options=_EXECUTION_OPTIONS
            )
        except SQLAlchemyError as error:
            raise self._translate(error) from error
        if not result.returns_rows:
            return []
        return make_records(list(result.keys()), [tuple(row) for row in result.all()])

    async def flush(self) -> None:
        if isinstance(self._tx, AsyncSession):
            await self._tx.flush()

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        if isinstance(self._tx, AsyncSession):
            return self._tx.begin_nested()
        return super().savepoint()

    async def _open(self) -> AsyncConnection:
        """Return the connection of the session, which begins a transaction if none is open.

        Raises:
            TransactionError: the session has no usable connection, or one that commits by itself.
            TypeError: riverpy does not know the driver.
        """
        try:
            connection = (
                self._tx if isinstance(self._tx, AsyncConnection) else await self._tx.connection()
            )
            raw_connection = await connection.get_raw_connection()
        except UnboundExecutionError as error:
            raise TransactionError(
                "the session given as tx has several engines and no default: pass the connection "
                "of one, as in tx=await session.connection(bind_arguments={'mapper': Model})"
            ) from error
        except InvalidRequestError as error:
            raise TransactionError(
                f"the session given as tx has no usable transaction: {error}"
            ) from error
        except SQLAlchemyError as error:
            raise self._translate(error) from error
        dialect = connection.dialect
        if dialect.name != "postgresql" or dialect.driver not in _DRIVERS:
            raise TypeError(
                "tx must use PostgreSQL with the driver asyncpg or psycopg, got "
                f"{dialect.name}+{dialect.driver}"
            )
        if getattr(raw_connection.dbapi_connection, "autocommit", False):
            raise TransactionError(
                "the session given as tx has the isolation level AUTOCOMMIT, so the call would "
                "commit by itself: use another isolation level, or leave tx out"
            )
        return connection

    def _translate(self, error: SQLAlchemyError) -> Exception:
        if isinstance(error, InvalidRequestError):  # SQLAlchemy has sent nothing
            return InterfaceError(str(error))
        is_lost = isinstance(error, DBAPIError) and error.connection_invalidated
        return make_asyncpg_error(error, is_connection_closed=is_lost)
