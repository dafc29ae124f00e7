"""DoctorSession: the database connection of doctor, with a timeout for each read."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, close_connection, connect, describe_error
from riverpy._tools.doctor.statements import set_transaction_timeouts
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.passwords import PasswordSource

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")

STATEMENT_TIMEOUT = timedelta(seconds=4)
"""The server cancels a statement of doctor after this time."""
LOCK_TIMEOUT = timedelta(seconds=1)
"""The server cancels the wait for a locked table after this time."""
READ_TIMEOUT = 8.0
"""The timeout for one read, in seconds."""


class SessionLostError(Exception):
    """The connection was lost, and no new connection could be made. The text has the reason."""


class DoctorSession:
    """The database connection of doctor. It reads in short read-only transactions, so that doctor
    does not hold an old snapshot. It also works through a pooler in transaction mode."""

    def __init__(self, url: str, password: PasswordSource | None = None) -> None:
        self.url, self._password = url, password
        self._connection: Connection | None = None

    async def ensure_connection(self) -> Connection:
        """Return the connection. If the connection was lost, connect again.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the first connection failed.
            SessionLostError: a later connection failed.
        """
        is_first = self._connection is None
        if self._connection is None or self._connection.is_closed():
            try:
                self._connection = await self.open_extra_connection(self.url)
            except (*DATABASE_ERRORS, RiverError) as error:
                if is_first:
                    raise
                raise SessionLostError(describe_error(error)) from error
        return self._connection

    async def open_extra_connection(self, url: str) -> Connection:
        """Open one more connection, with the password of this session.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the connection failed.
        """
        return await connect(url, through_pooler=True, password=self._password)

    @asynccontextmanager
    async def read_only_transaction(self) -> AsyncGenerator[Connection]:
        """Run the `async with` block in a read-only transaction.

        Raises:
            TimeoutError: the block took longer than READ_TIMEOUT.
            Exception: an error of `ensure_connection`, or one of DATABASE_ERRORS.
        """
        connection = await self.ensure_connection()
        try:
            with anyio.fail_after(READ_TIMEOUT, reason=f"no answer within {READ_TIMEOUT:g} s"):
                async with connection.transaction(readonly=True):
                    await set_transaction_timeouts(
                        connection, statement_timeout=STATEMENT_TIMEOUT, lock_timeout=LOCK_TIMEOUT
                    )
                    yield connection
        except TimeoutError:
            connection.terminate()  # do not use this connection again: a statement may still run
            raise

    async def read(
        self,
        statement: Callable[Concatenate[Connection, ArgsT], Awaitable[ResultT]],
        *args: ArgsT.args,
        **kwargs: ArgsT.kwargs,
    ) -> ResultT:
        """Run one statement in a read-only transaction of its own, and return its result. This
        raises the errors of `read_only_transaction`."""
        async with self.read_only_transaction() as connection:
            return await statement(connection, *args, **kwargs)

    async def await_with_timeout(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Wait for a statement that runs outside a transaction, and return its result. The
        session's own timeout settings apply: doctor sets other timeouts only in transactions.

        Raises:
            TimeoutError: there was no result within READ_TIMEOUT.
        """
        with anyio.fail_after(READ_TIMEOUT, reason=f"no answer within {READ_TIMEOUT:g} s"):
            return await awaitable

    async def close(self) -> None:
        """Close the connection within the driver's timeout."""
        if self._connection is not None:
            await close_connection(self._connection)
