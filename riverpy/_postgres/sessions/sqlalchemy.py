"""The adapters of sessions and connections of SQLAlchemy, with the drivers asyncpg, psycopg and
psycopg2.

Statements run through SQLAlchemy. If they ran on the driver's connection, SQLAlchemy might not have
begun the transaction yet, and a rollback would not undo them.

An async session of SQLAlchemy runs a blocking session in a greenlet. So all code here is for
blocking sessions, and the async adapter runs it with SQLAlchemy's `run_sync`.
"""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import (
    DBAPIError,
    InvalidRequestError,
    SQLAlchemyError,
    UnboundExecutionError,
)
from sqlalchemy.orm import Session, scoped_session

from riverpy._postgres.driver import InterfaceError
from riverpy._postgres.sessions.errors import make_asyncpg_error, make_encoding_error
from riverpy._postgres.sessions.records import make_records
from riverpy._postgres.sessions.session import (
    CallerSession,
    CallerTransactionState,
    NestedTransaction,
)
from riverpy._postgres.sessions.text import encode_value, to_pyformat
from riverpy._without_loop import make_async_context_manager
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractAsyncContextManager

    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import SessionTransaction

    from riverpy._postgres.sessions.records import Record

ResultT = TypeVar("ResultT")

_SUPPORTED_DRIVERS = ("asyncpg", "psycopg", "psycopg2")
_EXECUTION_OPTIONS = {"stream_results": False, "yield_per": None, "no_parameters": False}
"""The execution options of riverpy's statements. They override the same options of the caller's
engine. Results are small and are read at once, so they are not streamed. If `no_parameters`
were True, psycopg would send `%%` instead of `%` in a statement without parameters."""
_OTHER_ENGINE_ADVICE = (
    "pass the connection of the engine that has the job's data, as in "
    "tx=session.connection(bind_arguments={'mapper': Model}), with `await` if the session is async"
)


def adapt(tx: object) -> CallerSession | None:
    """Return the adapter of a session or connection. Return None for any other object.

    Raises:
        TransactionError: `tx` is an AsyncConnection that was never opened.
    """
    if isinstance(tx, scoped_session):
        tx = cast("scoped_session[Session]", tx)()
    if isinstance(tx, (Session, Connection)):
        return SqlAlchemySession(tx)
    return _adapt_async(tx)


def _adapt_async(tx: object) -> CallerSession | None:
    # The import below needs greenlet. A program without async sessions may not have greenlet.
    if not any(base.__module__.startswith("sqlalchemy.ext.asyncio") for base in type(tx).__mro__):
        return None
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    if isinstance(tx, async_scoped_session):
        tx = cast("async_scoped_session[AsyncSession]", tx)()
    if isinstance(tx, AsyncSession):
        return AsyncSqlAlchemySession(tx, tx.sync_session)
    if isinstance(tx, AsyncConnection):
        if tx.sync_connection is None:
            raise TransactionError(
                "the AsyncConnection given as tx is not open: use `tx = await engine.connect()`, "
                "or `async with engine.connect() as tx:`"
            )
        return AsyncSqlAlchemySession(tx, tx.sync_connection)
    return None


def _copy_buffer_to_bytes(value: object) -> object:
    """Convert a memoryview to bytes, and return any other value unchanged. psycopg2 returns values
    of type `bytea` as memoryviews."""
    return bytes(cast("memoryview[int]", value)) if isinstance(value, memoryview) else value


@contextmanager
def _use_plain_cursor_class(connection: Connection) -> Generator[None]:
    """In the `with` block, make psycopg2 use its default cursor class. The caller may have set a
    cursor class that requires a name for each column."""
    is_psycopg2 = connection.dialect.driver == "psycopg2"
    raw_connection: Any = connection.connection.dbapi_connection if is_psycopg2 else None
    if raw_connection is None or raw_connection.cursor_factory is None:
        yield
        return
    before, raw_connection.cursor_factory = raw_connection.cursor_factory, None
    try:
        yield
    finally:
        raw_connection.cursor_factory = before


def _has_other_connection(session: Session, connection: Connection) -> bool:
    """Whether the session's transaction also uses a connection other than `connection`."""
    transaction: Any = session.get_transaction()
    if hasattr(transaction, "connections"):
        held = transaction.connections
    else:  # SQLAlchemy 2.0 keeps connections and engines in a private attribute
        held = getattr(transaction, "_connections", ())
    return any(isinstance(key, Connection) and key is not connection for key in held)


class SqlAlchemySession(CallerSession):
    """The adapter of a blocking session or connection of SQLAlchemy."""

    library = "SQLAlchemy"
    pooler_remedy = (
        "make the engine as SQLAlchemy's page on asyncpg and PgBouncer says, or for psycopg with "
        "connect_args={'prepare_threshold': None}"
    )

    def __init__(self, tx: Session | Connection) -> None:
        self._tx = tx
        self._connection: Connection | None = None

    @property
    def native_session(self) -> object:
        return self._tx

    def get_state(self) -> CallerTransactionState:
        connection = self._connection
        if connection is None:
            # A connection that was lost can be used again: after a rollback, SQLAlchemy connects at
            # the next statement.
            is_closed = isinstance(self._tx, Connection) and self._tx.closed
        else:
            is_closed = connection.closed or connection.invalidated
        if is_closed:
            return CallerTransactionState.CLOSED
        return CallerTransactionState.USABLE  # SQLAlchemy begins a transaction by itself

    async def _run_blocking(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function that may block. `AsyncSqlAlchemySession` calls it in a greenlet."""
        return function()

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        return await self._run_blocking(lambda: self._fetch_blocking(statement, values))

    def _fetch_blocking(self, statement: str, values: tuple[object, ...]) -> list[Record]:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._get_connection()
        try:
            if connection.dialect.driver == "asyncpg":
                parameters: Any = values
            else:
                statement = to_pyformat(statement)
                parameters = {
                    f"p{number}": encode_value(value) for number, value in enumerate(values, 1)
                }
            with _use_plain_cursor_class(connection):
                result = connection.exec_driver_sql(
                    statement, parameters, execution_options=_EXECUTION_OPTIONS
                )
        except SQLAlchemyError as error:
            raise self._translate_error(error) from error
        except UnicodeEncodeError as error:
            raise make_encoding_error(error) from error
        if not result.returns_rows:
            return []
        rows = [tuple(row) for row in result.all()]
        if connection.dialect.driver == "psycopg2":
            rows = [tuple(map(_copy_buffer_to_bytes, row)) for row in rows]
        return make_records(list(result.keys()), rows)

    async def flush(self) -> None:
        if isinstance(session := self._tx, Session):
            await self._run_blocking(session.flush)

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        if isinstance(self._tx, Session):
            return make_async_context_manager(self._tx.begin_nested())
        return super().savepoint()

    async def begin_nested(self) -> NestedTransaction | None:
        session = self._tx
        if not isinstance(session, Session):
            return None

        def begin_now() -> SessionTransaction:
            nested = session.begin_nested()
            # Open the connection now, so that SQLAlchemy sends SAVEPOINT at once. Otherwise
            # SQLAlchemy would send it before the next statement of this session. By then a
            # savepoint of another session on the same connection may be open.
            self._connection = self._get_connection()
            return nested

        return _NestedSessionTransaction(self, session, await self._run_blocking(begin_now))

    @contextmanager
    def keep_connection_if_cancelled(self) -> Generator[None]:
        connection = self._connection
        assert connection is not None  # noqa: S101 (a savepoint was set)

        def keep(context: ExceptionContext) -> None:
            if isinstance(context.original_exception, CancelledError) and (
                context.connection is connection
            ):
                context.is_disconnect = False  # only the statement was cancelled

        event.listen(connection.engine, "handle_error", keep)
        try:
            yield
        finally:
            event.remove(connection.engine, "handle_error", keep)

    async def end_nested(self, session: Session, nested: SessionTransaction, *, keep: bool) -> None:
        """End a nested transaction, i.e. a savepoint, unless the caller has ended it. If `keep` is
        False, undo its changes."""
        if nested not in _iterate_nested_transactions(session):
            return
        try:
            await self._run_blocking(
                nested.commit if keep and nested.is_active else nested.rollback
            )
        except SQLAlchemyError as error:
            raise self._translate_error(error) from error

    def _get_connection(self) -> Connection:
        """Return the connection of the session. If no transaction is open, SQLAlchemy begins one.

        Raises:
            TransactionError: the session has no usable connection, or its connection commits each
                statement by itself (AUTOCOMMIT).
            TypeError: riverpy does not know the driver.
        """
        try:
            connection = self._tx.connection() if isinstance(self._tx, Session) else self._tx
            raw_connection = connection.connection
        except UnboundExecutionError as error:
            raise TransactionError(
                "the session given as tx has no default engine: make it with bind=engine, or "
                f"if it has several engines {_OTHER_ENGINE_ADVICE}"
            ) from error
        except InvalidRequestError as error:
            kind = "session" if isinstance(self._tx, Session) else "connection"
            raise TransactionError(
                f"the {kind} given as tx has no usable transaction: {error}"
            ) from error
        except SQLAlchemyError as error:
            raise self._translate_error(error) from error
        dialect = connection.dialect
        if dialect.name != "postgresql" or dialect.driver not in _SUPPORTED_DRIVERS:
            raise TypeError(
                "tx must use PostgreSQL with the driver asyncpg, psycopg or psycopg2, got "
                f"{dialect.name}+{dialect.driver}"
            )
        if getattr(raw_connection.dbapi_connection, "autocommit", False):
            raise TransactionError(
                "the session given as tx has the isolation level AUTOCOMMIT, so the call would "
                "commit by itself: use another isolation level, or leave tx out"
            )
        if isinstance(self._tx, Session) and _has_other_connection(self._tx, connection):
            raise TransactionError(
                "the session given as tx has connections of several engines in its transaction, "
                "which commit one after the other, so a job could be stored without its data: "
                f"{_OTHER_ENGINE_ADVICE}"
            )
        return connection

    def _translate_error(self, error: SQLAlchemyError) -> Exception:
        if isinstance(error, InvalidRequestError):  # SQLAlchemy has sent no statement
            return InterfaceError(str(error))
        is_lost = isinstance(error, DBAPIError) and error.connection_invalidated
        return make_asyncpg_error(error, is_connection_closed=is_lost)


class _NestedSessionTransaction(NestedTransaction):
    """A nested transaction of a SQLAlchemy session, i.e. a savepoint."""

    def __init__(
        self, adapter: SqlAlchemySession, session: Session, nested: SessionTransaction
    ) -> None:
        self._adapter, self._session, self._nested = adapter, session, nested

    async def end(self, *, keep: bool) -> None:
        await self._adapter.end_nested(self._session, self._nested, keep=keep)


def _iterate_nested_transactions(session: Session) -> Iterator[SessionTransaction]:
    """Yield the open nested transactions of a session, the innermost first."""
    nested = session.get_nested_transaction()
    while nested is not None and nested.nested:
        yield nested
        nested = nested.parent


class AsyncSqlAlchemySession(SqlAlchemySession):
    """The adapter of an async session or connection of SQLAlchemy."""

    is_blocking = False

    def __init__(
        self, tx: AsyncSession | AsyncConnection, blocking_tx: Session | Connection
    ) -> None:
        """Create the adapter of `tx`. `blocking_tx` is the blocking session or connection that `tx`
        uses."""
        super().__init__(blocking_tx)
        self._async_tx = tx

    @property
    def native_session(self) -> object:
        return self._async_tx

    async def _run_blocking(self, function: Callable[[], ResultT]) -> ResultT:
        return await self._async_tx.run_sync(lambda _: function())

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        if isinstance(self._tx, Session):
            return self._async_tx.begin_nested()
        return super().savepoint()
