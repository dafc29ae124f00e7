"""The adapters of connections and cursors of psycopg 3."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
from psycopg import sql
from psycopg.adapt import AdaptersMap
from psycopg.postgres import register_default_adapters, types
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.array import register_all_arrays
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.string import StrDumperUnknown, TextLoader

from riverpy._postgres.sessions.errors import make_asyncpg_error, make_encoding_error
from riverpy._postgres.sessions.records import make_records
from riverpy._postgres.sessions.session import (
    CallerSession,
    CallerTransactionState,
    make_no_transaction_error,
)
from riverpy._postgres.sessions.text import encode_value
from riverpy._without_loop import fail_after, make_async_context_manager
from riverpy.errors import ConfigError, InsertError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from riverpy._postgres.sessions.records import Record

if not hasattr(psycopg, "AsyncRawCursor"):
    raise ConfigError(f"tx takes psycopg 3.2 or newer, this is {psycopg.__version__}: update it")

_STATE_BY_STATUS = {
    TransactionStatus.IDLE: CallerTransactionState.NO_TRANSACTION,
    TransactionStatus.INERROR: CallerTransactionState.ABORTED,
    TransactionStatus.UNKNOWN: CallerTransactionState.CLOSED,
}


ResultT = TypeVar("ResultT")


def adapt(tx: object) -> CallerSession | None:
    """Return the adapter of a connection, or of the connection of a cursor. Return None for any
    other object.

    Raises:
        TransactionError: the cursor is closed.
    """
    if isinstance(tx, (psycopg.AsyncCursor, psycopg.Cursor)):
        cursor = cast("psycopg.AsyncCursor[Any] | psycopg.Cursor[Any]", tx)
        if cursor.closed and not cursor.connection.closed:
            raise TransactionError("the cursor given as tx is closed: nothing was done")
        tx = cursor.connection
    if isinstance(tx, psycopg.AsyncConnection):
        return AsyncPsycopgSession(cast("psycopg.AsyncConnection[Any]", tx))
    if isinstance(tx, psycopg.Connection):
        return PsycopgSession(cast("psycopg.Connection[Any]", tx))
    return None


class _UtcTimestampLoader(TimestamptzLoader):
    """Reads timestamps in UTC, not in the time zone of the session."""

    def load(self, data: Any) -> datetime:
        return super().load(data).astimezone(UTC)


class _Utf8TextLoader(TextLoader):
    """Reads text as UTF-8 if the encoding of the connection is SQL_ASCII. psycopg itself would
    return bytes."""

    def load(self, data: Any) -> Any:
        value = super().load(data)
        return value.decode() if isinstance(value, bytes) else value


def _make_psycopg_adapters() -> AdaptersMap:
    """Return psycopg's default adapters, with riverpy's loaders for text and timestamps."""
    adapters = AdaptersMap(types=types)
    register_default_adapters(adapters)
    register_all_arrays(adapters)
    adapters.register_dumper(str, StrDumperUnknown)
    for name in ("json", "jsonb", "text", "varchar", "name", "bpchar", 0):  # oid 0: all other types
        adapters.register_loader(name, _Utf8TextLoader)
    adapters.register_loader("timestamptz", _UtcTimestampLoader)
    return adapters


_ADAPTERS = _make_psycopg_adapters()
"""psycopg's adapters for the values of riverpy's statements. Adapters that the caller has
registered do not apply."""


class _CursorWithOwnAdapters:
    """A mixin for psycopg cursors. A cursor with this mixin uses riverpy's own adapters."""

    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class _DollarParameterCursor(_CursorWithOwnAdapters, psycopg.RawCursor[tuple[Any, ...]]):
    """A cursor for one statement, with parameters like `$1`."""


class _AsyncDollarParameterCursor(_CursorWithOwnAdapters, psycopg.AsyncRawCursor[tuple[Any, ...]]):
    """An async cursor for one statement, with parameters like `$1`."""


class PsycopgSession(CallerSession):
    """The adapter of a psycopg connection. psycopg's blocking and async classes have the same
    methods, so the code here serves both. `AsyncPsycopgSession` overrides only the methods that
    differ."""

    library = "psycopg"
    has_copy = True
    pooler_remedy = "make the connection given as tx with prepare_threshold=None"

    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self._connection: Any = connection

    def _make_cursor(self) -> Any:
        return _DollarParameterCursor(self._connection, row_factory=tuple_row)

    async def _await_if_async(self, result: Awaitable[ResultT] | ResultT) -> ResultT:
        """Return the result of a method of psycopg. `AsyncPsycopgSession` awaits it first."""
        return cast("ResultT", result)

    def _make_async_context(
        self, context: AbstractAsyncContextManager[ResultT] | AbstractContextManager[ResultT]
    ) -> AbstractAsyncContextManager[ResultT]:
        """Return an async context manager that does the same as psycopg's `context`."""
        return make_async_context_manager(cast("AbstractContextManager[ResultT]", context))

    @property
    def native_session(self) -> object:
        return self._connection

    def get_state(self) -> CallerTransactionState:
        if self._connection.closed:
            return CallerTransactionState.CLOSED
        if self._is_pipelined():  # the server has not answered earlier statements
            return CallerTransactionState.USABLE
        return _STATE_BY_STATUS.get(
            self._connection.info.transaction_status, CallerTransactionState.USABLE
        )

    def _is_pipelined(self) -> bool:
        return self._connection.pgconn.pipeline_status != PipelineStatus.OFF

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        cursor = self._make_cursor()
        is_pipelined = self._is_pipelined()
        if is_pipelined:
            await self._await_pipelined_results()
        try:
            parameters = [encode_value(value) for value in values]
            if is_pipelined:
                # The caller's connection is in pipeline mode. psycopg waits for the results of all
                # statements at the end of this inner `pipeline()` block.
                async with self._make_async_context(self._connection.pipeline()):
                    await self._await_if_async(cursor.execute(statement.encode(), parameters))
            else:
                await self._await_if_async(cursor.execute(statement.encode(), parameters))
            result = cursor.pgresult
            if result is None or not result.nfields:
                return []
            rows = await self._await_if_async(cursor.fetchall())
        except psycopg.Error as error:
            raise self._translate_error(error) from error
        except UnicodeEncodeError as error:
            raise make_encoding_error(error) from error
        # `cursor.description` would make an object for each column, which takes longer.
        names = (result.fname(column) or b"" for column in range(result.nfields))
        return make_records([name.decode() for name in names], rows)

    async def _await_pipelined_results(self) -> None:
        """Wait for the results of the statements that the caller has already sent in the pipeline.
        Only then is the state of the transaction known.

        Raises:
            TransactionError: one of these statements failed, or no transaction is open.
        """
        try:
            async with self._make_async_context(self._connection.pipeline()):
                pass
        except psycopg.Error as error:
            raise TransactionError(
                f"a statement before this call, in the same pipeline, has failed: {error}"
            ) from error
        if self._connection.info.transaction_status == TransactionStatus.IDLE:
            raise make_no_transaction_error(is_blocking=self.is_blocking)

    async def copy_to_table(
        self,
        table_name: str,
        *,
        schema_name: str | None,
        columns: Sequence[str],
        source: AsyncIterable[bytes],
        format: str,  # noqa: A002 (asyncpg's name)
        timeout: float,
    ) -> None:
        """Insert rows with COPY. `source` yields the rows in UTF-8."""
        if self._is_pipelined():
            raise InsertError(
                "insert_many_fast uses COPY, which a pipeline cannot: use insert_many"
            )
        table = sql.Identifier(*filter(None, (schema_name, table_name)))
        statement = sql.SQL("copy {} ({}) from stdin (format {}, encoding 'UTF8')").format(
            table,
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.Identifier(format),
        )
        cursor = self._make_cursor()
        reason = f"COPY took longer than {timeout:g} s"
        try:
            with fail_after(timeout, reason):
                async with self._make_async_context(cursor.copy(statement)) as copy:
                    async for lines in source:
                        await self._await_if_async(copy.write(lines))
        except psycopg.Error as error:
            raise self._translate_error(error) from error

    def _translate_error(self, error: psycopg.Error) -> Exception:
        return make_asyncpg_error(error, is_connection_closed=self._connection.closed)


class AsyncPsycopgSession(PsycopgSession):
    """The adapter of an async psycopg connection."""

    is_blocking = False

    def _make_cursor(self) -> Any:
        return _AsyncDollarParameterCursor(self._connection, row_factory=tuple_row)

    async def _await_if_async(self, result: Awaitable[ResultT] | ResultT) -> ResultT:
        return await cast("Awaitable[ResultT]", result)

    def _make_async_context(
        self, context: AbstractAsyncContextManager[ResultT] | AbstractContextManager[ResultT]
    ) -> AbstractAsyncContextManager[ResultT]:
        return cast("AbstractAsyncContextManager[ResultT]", context)
