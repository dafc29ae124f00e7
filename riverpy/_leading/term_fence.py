"""TermFence: gives the services of one term transactions that commit only until the term ends."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._leases.lease import Lease
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection, Transaction

TRANSACTION_LIMIT = timedelta(seconds=5)
"""The timeout of one fenced transaction. The open transaction of a dead leader delays the next
leader by at most this time."""
LOCK_SHARE = 1 / 5
"""The share of `TRANSACTION_LIMIT` for which a statement may wait for a locked row."""
ROLLBACK_LIMIT = 0.5
"""The timeout for the rollback of a stopped or failed transaction, in seconds. When it expires, the
connection is closed."""


class FenceBusyError(TimeoutError):
    """A transaction did not begin, because another session has locked the leader's row, or the
    database does not answer. The rows to write are not the cause."""


class TermFence:
    """The fence of one term. The services of the term write through `transaction`."""

    def __init__(self, lease: Lease) -> None:
        """Create the fence of the term that holds this lease."""
        self.lease = lease
        self.limit = min(TRANSACTION_LIMIT, lease.ttl)
        """The timeout of a fenced transaction."""

    @property
    def is_valid(self) -> bool:
        """Whether a service may act under the term now."""
        return self.lease.is_held

    def expect_valid(self) -> None:
        """Check the term before a step that is not fenced.

        Raises:
            FencedOutError: the term has ended, or reached its local deadline.
        """
        if not self.is_valid:
            raise FencedOutError("this process is not the leader any more")

    @asynccontextmanager
    async def transaction(
        self, connection: DedicatedConnection, purpose: str
    ) -> AsyncGenerator[Connection]:
        """Open a transaction that commits only under the term: no other term begins before the end
        of the transaction.

        Raises:
            FencedOutError: the term has ended; nothing was written.
            FenceBusyError: the block was not entered; nothing was written.
            TimeoutError: the transaction took longer than `TRANSACTION_LIMIT`; the text has the
                purpose.
            Exception: one of DATABASE_ERRORS, of the block or of the commit.
        """
        self.expect_valid()
        is_entered = False
        try:
            async with (
                connection.acquire(purpose, self.limit.total_seconds()) as open_connection,
                _transaction(open_connection),
            ):
                if not await self.passes(open_connection):
                    raise self.fenced_out_error()
                is_entered = True
                yield open_connection
        except DATABASE_ERRORS as error:
            if is_entered:
                raise
            text = describe(error)
            raise FenceBusyError(
                text if text.startswith(purpose) else f"{purpose}: {text}"
            ) from error

    async def passes(self, connection: Transaction) -> bool:
        """Bind a transaction on any connection to the term. Returns False if the term has ended, or
        if the connection leads to another database.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        return await self.lease.passes_fence(
            connection, timeout=self.limit, lock_timeout=self.limit * LOCK_SHARE
        )

    def fenced_out_error(self) -> FencedOutError:
        """End the term, and return the error to raise."""
        self.lease.end("the database refused a write of its term", may_be_held=False)
        return FencedOutError("another process is the leader, or may be")


@asynccontextmanager
async def _transaction(connection: Connection) -> AsyncGenerator[None]:
    """Open a transaction that has ended on the server too when the block ends. If the connection
    was only closed, a statement could keep running, and its locks would delay the next term.

    The isolation level is read committed, whatever the session's default is: in a snapshot the
    fence would fail for a lease that was renewed during the transaction."""
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
        await transaction.commit()
    except BaseException:
        with (
            suppress(*DATABASE_ERRORS),  # the next use of the connection makes a new one
            anyio.move_on_after(ROLLBACK_LIMIT, shield=True) as scope,
        ):
            await transaction.rollback()
        if scope.cancelled_caught:  # a refused statement alone keeps the session usable
            connection.terminate()
        raise
