"""LeaderTerm and TermFence: one term (the time of a client as leader), and transactions that commit
only until the term ends. The user's functions get a LeaderTerm, and the maintenance services a
TermFence."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.transactions import (
    CHECK_TIMEOUT,
    expect_fenceable,
    expect_outermost,
    expect_read_committed,
    wrong_database_error,
)
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._leases.lease import Lease
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection, Transaction

TRANSACTION_LIMIT = timedelta(seconds=5)
"""The timeout of one fenced transaction, which commits only during its term. The open transaction
of a dead leader delays the next leader by at most this time."""
LOCK_TIMEOUT_SHARE = 1 / 5
"""A statement may wait for a locked row for this fraction of its transaction's timeout."""
ROLLBACK_LIMIT = 0.5
"""The timeout for the rollback of a stopped or failed transaction, in seconds. When it expires, the
connection is closed."""


class FenceBusyError(TimeoutError):
    """A transaction did not begin, because another session has locked the leader's row, or the
    database does not answer. The rows to write are not the cause."""


class LeaderTerm:
    """One term in which this client is the leader of its domain."""

    def __init__(self, lease: Lease) -> None:
        """Only the client calls this."""
        self.lease = lease
        self.limit = min(TRANSACTION_LIMIT, lease.ttl)  # the timeout of a fenced transaction

    @property
    def is_held(self) -> bool:
        """Whether this client may act as the leader now."""
        return self.lease.is_held

    def expect_held(self) -> None:
        """Check that the term has not ended, before a step outside a fenced transaction.

        Raises:
            FencedOutError: the term has ended, or reached its local deadline.
        """
        if not self.is_held:
            raise FencedOutError("this process is not the leader any more")

    async def fence(self, connection: Transaction) -> None:
        """Bind the transaction that is open on `connection` to this term: the transaction commits
        only while no other term can begin.

        Call this method before the transaction writes, and in the outermost transaction: the
        rollback of a savepoint would undo the fence. The server ends a transaction that lasts
        longer than 5 seconds or `Config.leader_ttl`, whichever is shorter.

        Args:
            connection: a connection of asyncpg in a transaction. In the domain `default` the
                isolation level must be read committed.

        Raises:
            FencedOutError: the term has ended: roll back.
            TransactionError: `connection` has no open transaction, or one with another isolation
                level, database or schema. Or a savepoint is open, as in the function of
                `run_once(tx=…)`.
            Exception: one of DATABASE_ERRORS.
        """
        expect_fenceable(connection)
        self.expect_held()
        is_rivers_row = self.lease.name == DEFAULT_DOMAIN
        if is_rivers_row:
            await expect_read_committed(connection)
        with anyio.fail_after(CHECK_TIMEOUT, reason="passing the fence of a leader term took long"):
            is_held = await self._try_fence(connection)
        if not is_held:
            if await self.lease.renew_in_store():
                raise await wrong_database_error(connection, "this leader term")
            raise self._fenced_out_error()
        if is_rivers_row:
            await expect_outermost(connection)

    async def _try_fence(self, connection: Transaction) -> bool:
        """Bind a transaction to the term. Returns False if the term has ended, or if the connection
        leads to another database."""
        return await self.lease.try_fence(
            connection, timeout=self.limit, lock_timeout=self.limit * LOCK_TIMEOUT_SHARE
        )

    def _fenced_out_error(self) -> FencedOutError:
        """End the term, and return the error to raise."""
        self.lease.end("the database refused a write of its term", may_be_held=False)
        return FencedOutError("another process is the leader, or may be")


class TermFence(LeaderTerm):
    """The term object of the maintenance services, which write through `transaction`."""

    @asynccontextmanager
    async def transaction(
        self, connection: DedicatedConnection, purpose: str
    ) -> AsyncGenerator[Connection]:
        """Open a transaction that commits only during the term. No other term begins before the
        transaction ends.

        Raises:
            FencedOutError: the term has ended; nothing was written.
            FenceBusyError: the `async with` block was not entered; nothing was written.
            TimeoutError: the transaction took longer than `TRANSACTION_LIMIT`; the text has the
                purpose.
            Exception: one of DATABASE_ERRORS, raised by the block or by the commit.
        """
        self.expect_held()
        is_entered = False
        try:
            async with (
                connection.acquire(purpose, self.limit.total_seconds()) as open_connection,
                _transaction(open_connection),
            ):
                if not await self._try_fence(open_connection):
                    raise self._fenced_out_error()
                is_entered = True
                yield open_connection
        except DATABASE_ERRORS as error:
            if is_entered:
                raise
            text = describe_error(error)
            raise FenceBusyError(
                text if text.startswith(purpose) else f"{purpose}: {text}"
            ) from error


@asynccontextmanager
async def _transaction(connection: Connection) -> AsyncGenerator[None]:
    """Open a transaction for an `async with` block. After the block, it has ended on the server
    too. If the connection was only closed, a statement could keep running, and its locks would
    delay the next term.

    The isolation level is always read committed. At a higher level, the fence would fail if the
    lease was renewed during the transaction."""
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
        await transaction.commit()
    except BaseException:
        with (
            suppress(*DATABASE_ERRORS),  # after an error, the next use opens a new connection
            anyio.move_on_after(ROLLBACK_LIMIT, shield=True) as scope,
        ):
            await transaction.rollback()
        if scope.cancelled_caught:  # the rollback timed out; otherwise the session stays usable
            connection.terminate()
        raise
