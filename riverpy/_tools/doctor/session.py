"""Session: the connection that a doctor reads through, with a bound on each look."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, close, connect, describe
from riverpy._tools.doctor.statements import doctor_limits
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from riverpy._postgres.driver import Connection

ResultT = TypeVar("ResultT")

STATEMENT_LIMIT = timedelta(seconds=4)
"""After which the server ends a statement of ours."""
LOCK_LIMIT = timedelta(seconds=1)
"""After which the server ends the wait for a table that somebody has locked."""
READ_TIMEOUT = 8.0
"""Seconds that one look may take in all."""


class SessionLostError(Exception):
    """The connection was lost, and cannot be made again. The text says why."""


class Session:
    """Reads, and never writes: each look is a read-only transaction of its own, so that the doctor
    holds no snapshot, and nothing that a pooler would lose."""

    def __init__(self, url: str) -> None:
        """Make it.

        Args:
            url: the database, perhaps through a pooler in transaction mode.
        """
        self.url = url
        self._connection: Connection | None = None

    async def connection(self) -> Connection:
        """The connection, made again if it was lost.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the first cannot be made.
            SessionLostError: a later one cannot be.
        """
        if self._connection is None:
            self._connection = await connect(self.url, pooled=True)
        elif self._connection.is_closed():
            try:
                self._connection = await connect(self.url, pooled=True)
            except (*DATABASE_ERRORS, RiverError) as error:
                raise SessionLostError(describe(error)) from error
        return self._connection

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[Connection]:
        """A read-only transaction.

        Raises:
            Exception: as `connection`; one of DATABASE_ERRORS, TimeoutError after READ_TIMEOUT.
        """
        connection = await self.connection()
        try:
            with anyio.fail_after(READ_TIMEOUT, reason=f"no answer within {READ_TIMEOUT:g} s"):
                async with connection.transaction(readonly=True):
                    await doctor_limits(connection, statement=STATEMENT_LIMIT, lock=LOCK_LIMIT)
                    yield connection
        except TimeoutError:
            connection.terminate()  # what it still does is not known
            raise

    async def bounded(self, answer: Awaitable[ResultT]) -> ResultT:
        """The answer to one statement in no transaction of ours, so that the session's settings are
        seen as they are.

        Raises:
            TimeoutError: none came within READ_TIMEOUT.
        """
        with anyio.fail_after(READ_TIMEOUT, reason=f"no answer within {READ_TIMEOUT:g} s"):
            return await answer

    async def close(self) -> None:
        """Say goodbye within the driver's limit, or cut."""
        if self._connection is not None:
            await close(self._connection)
