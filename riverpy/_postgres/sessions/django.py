"""The adapter of Django's database connections, with psycopg 3 or psycopg2.

Statements run through Django's cursor. So Django's transactions, its wrappers of `execute` and its
log of queries also apply to them.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error as DjangoError
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionProxy

from riverpy._postgres.driver import InterfaceError
from riverpy._postgres.sessions.errors import make_asyncpg_error, make_encoding_error
from riverpy._postgres.sessions.records import make_records
from riverpy._postgres.sessions.session import (
    CallerSession,
    CallerTransactionState,
    NestedTransaction,
)
from riverpy._postgres.sessions.text import encode_value, to_pyformat
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Generator, Sequence
    from contextlib import AbstractAsyncContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from riverpy._postgres.sessions.records import Record

_IN_ERROR, _UNKNOWN = 3, 4
"""Two values of `transaction_status` in psycopg 3 and psycopg2. `_IN_ERROR`: the transaction is
aborted. `_UNKNOWN`: there is no connection."""


class ServerVersion(NamedTuple):
    """The version of a PostgreSQL server."""

    major: int
    minor: int


_ASYNC_ERROR_TEXT = (
    "Django's connections are for code that is not async: in an async view use `await "
    "riverpy.django.ainsert(…)`, or call a function with `sync_to_async` that does it all in "
    "`transaction.atomic()`"
)


def adapt(tx: object) -> CallerSession | None:
    """Return the adapter of a Django connection, or of an alias of DATABASES. Return None for any
    other object.

    Raises:
        TransactionError: there is no such alias, the database is not PostgreSQL, or the connection
            is not the one that Django uses in this thread.
    """
    alias = tx if isinstance(tx, str) else getattr(tx, "alias", None)
    if not isinstance(alias, str):
        return None
    if alias not in connections:
        raise TransactionError(
            f"{alias!r}, given as tx, is no alias of DATABASES: it has {', '.join(connections)}"
        )
    connection = connections[alias]
    if not isinstance(tx, str) and _resolve_proxy(tx) is not connection:
        raise TransactionError(
            f"the connection given as tx is not the one of this thread: pass {alias!r}, or "
            f"`transaction.get_connection({alias!r})`"
        )
    if connection.vendor != "postgresql":
        raise TransactionError(
            f"the database {alias!r}, given as tx, is not PostgreSQL but {connection.vendor}"
        )
    return DjangoSession(connection)


def _resolve_proxy(tx: object) -> object:
    """If `tx` is `django.db.connection`, return the connection behind it. Otherwise return `tx`
    itself."""
    return connections[cast("Any", tx).alias] if isinstance(tx, ConnectionProxy) else tx


class DjangoSession(CallerSession):
    """The adapter of a Django connection. Outside `atomic`, each statement commits by itself, as in
    Django."""

    library = "Django"
    has_copy = True
    has_transaction_blocks = True
    pooler_remedy = "remove prepare_threshold from the OPTIONS of the database"

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection: Any = connection

    @property
    def native_session(self) -> object:
        return self._connection

    @property
    def commits_by_itself(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        connection = self._connection
        if connection.connection is None:  # Django connects at the first statement
            return connection.settings_dict["AUTOCOMMIT"]
        return connection.autocommit

    def get_server_version(self) -> ServerVersion:
        """Return the version of the server, like asyncpg's method of this name."""
        with self._translate_errors():
            self._connection.ensure_connection()
        return ServerVersion(*self._connection.get_database_version())

    def get_state(self) -> CallerTransactionState:
        connection = self._connection
        raw = connection.connection
        if connection.closed_in_transaction or (raw is None and connection.in_atomic_block):
            return CallerTransactionState.CLOSED
        status = None if raw is None else int(raw.info.transaction_status)
        if status == _UNKNOWN:
            return CallerTransactionState.CLOSED
        if status == _IN_ERROR or (connection.in_atomic_block and connection.needs_rollback):
            return CallerTransactionState.ABORTED
        return (
            CallerTransactionState.NO_TRANSACTION
            if self.commits_by_itself
            else CallerTransactionState.USABLE
        )

    async def fetch(self, statement: str, *values: object) -> list[Record]:
        parameters = {f"p{number}": encode_value(value) for number, value in enumerate(values, 1)}
        with self._translate_errors(), self._connection.cursor() as cursor:
            if parameters:
                cursor.execute(to_pyformat(statement), parameters)
            else:
                cursor.execute(statement)
            description = cursor.description  # psycopg builds it at each read
            if description is None:
                return []
            columns = [column[0] for column in description]
            rows = [tuple(map(_decode_value, row)) for row in cursor.fetchall()]
        return make_records(columns, rows)

    def savepoint(self) -> AbstractAsyncContextManager[object]:
        return self.transaction()

    @asynccontextmanager
    async def transaction(self, **_: object) -> AsyncGenerator[None]:
        """Run the `async with` block in Django's `atomic`. This begins a transaction, or a
        savepoint if a transaction is open."""
        block = transaction.atomic(using=self._connection.alias)
        with self._translate_errors():
            block.__enter__()
        try:
            yield
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        with self._translate_errors():
            block.__exit__(None, None, None)

    async def begin_nested(self) -> NestedTransaction | None:
        block = transaction.atomic(using=self._connection.alias)
        with self._translate_errors():
            block.__enter__()
        return _NestedAtomic(self, block)

    def end_nested(self, block: transaction.Atomic, *, keep: bool) -> None:
        """End a block of Django's `atomic`. If `keep` is False, undo its changes."""
        if not keep:
            transaction.set_rollback(True, using=self._connection.alias)
        with self._translate_errors():
            block.__exit__(None, None, None)

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
        """Insert rows with COPY. `source` yields the rows in UTF-8. The server's timeouts apply."""
        quote = self._connection.ops.quote_name
        table = ".".join(map(quote, filter(None, (schema_name, table_name))))
        names = ", ".join(map(quote, columns))
        statement = f"copy {table} ({names}) from stdin (format {format}, encoding 'UTF8')"
        with (
            self._translate_errors(),
            self._connection.wrap_database_errors,
            self._connection.cursor() as cursor,
        ):
            if not hasattr(cursor, "copy"):  # psycopg2 does not have it
                lines = [line async for line in source]
                cursor.copy_expert(statement, BytesIO(b"".join(lines)))
                return
            with cursor.copy(statement) as copy:
                async for line in source:
                    copy.write(line)

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        """Replace Django's errors in the `with` block with asyncpg's errors. After an error of
        the database, the caller must roll back the transaction, or roll back to a savepoint of
        Django. Django requires the same after errors of its own queries."""
        try:
            yield
        except SynchronousOnlyOperation as error:
            raise TransactionError(_ASYNC_ERROR_TEXT) from error
        except TransactionManagementError as error:  # Django has sent no statement
            raise InterfaceError(str(error)) from error
        except DjangoError as error:
            connection = self._connection
            if connection.in_atomic_block:
                connection.needs_rollback = True
            raw = connection.connection
            is_closed = raw is None or int(raw.info.transaction_status) == _UNKNOWN
            raise make_asyncpg_error(error, is_connection_closed=is_closed) from error
        except UnicodeEncodeError as error:
            raise make_encoding_error(error) from error


class _NestedAtomic(NestedTransaction):
    """A block of Django's `atomic` that riverpy uses as a savepoint."""

    def __init__(self, session: DjangoSession, block: transaction.Atomic) -> None:
        self._session, self._block = session, block

    async def end(self, *, keep: bool) -> None:
        self._session.end_nested(self._block, keep=keep)


def _decode_value(value: object) -> object:
    """Convert a value that Django returned to the value that asyncpg would return: a `datetime` in
    UTC, and `bytes` instead of a memoryview. Without USE_TZ, Django's times have no time zone and
    are local times of the process."""
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return bytes(cast("memoryview", value)) if isinstance(value, memoryview) else value
