"""LeaderTerm and TermFence: one term (the time of a client as leader), and transactions that commit
only during the term. The user's leader functions receive a LeaderTerm. The maintenance services use
a TermFence."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, overload

import anyio

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.transactions import (
    TRANSACTION_CHECK_TIMEOUT,
    make_wrong_database_error,
    require_no_savepoint,
    require_read_committed,
    run_at_once_if_blocking,
    validate_and_adapt_fence_connection,
)
from riverpy._without_loop import fail_after
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from riverpy._leases.lease import Lease
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection, Transaction
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

FENCED_TRANSACTION_TIMEOUT = timedelta(seconds=5)
"""The timeout of a fenced transaction (a transaction that commits only during its term). If a
leader dies, its open transaction delays the next leader by at most this time."""
WRITE_REFUSED_REASON = "the database refused a write of its term"
LOCK_WAIT_SHARE_OF_TIMEOUT = 1 / 5
"""A statement may wait for a locked row for at most this fraction of its transaction's timeout."""
ROLLBACK_TIMEOUT = 0.5
"""The timeout for the rollback of a stopped or failed transaction, in seconds. When it expires, the
connection is closed."""


class FenceTimeoutError(TimeoutError):
    """A fenced transaction did not begin. Another session has locked the row of the leader's
    lease, or the database does not answer. The cause is not a lock on a row that the transaction
    would write."""


class LeaderTerm:
    """One term in which this client is the leader of its domain."""

    def __init__(self, lease: Lease) -> None:
        """Create the term of a held lease. Only a riverpy client creates terms."""
        self.lease = lease
        self.transaction_timeout = min(FENCED_TRANSACTION_TIMEOUT, lease.ttl)

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

    @overload
    def fence(self, connection: BlockingTransaction) -> None: ...
    @overload
    def fence(self, connection: CallerTransaction) -> Coroutine[object, None, None]: ...
    def fence(
        self, connection: BlockingTransaction | CallerTransaction
    ) -> Coroutine[object, None, None] | None:
        """Bind the transaction that is open on `connection` to this term. If the term has ended,
        the call raises FencedOutError. Otherwise the next term begins only after the transaction
        has ended.

        Call this method before the transaction writes, and in the outermost transaction: the
        rollback of a savepoint would undo the fence. The server ends a transaction that lasts
        longer than 5 seconds or `Config.leader_ttl`, whichever is shorter. With a blocking session,
        the call needs no `await`, as for `Lease.fence`.

        Args:
            connection: your connection or session, in a transaction. In the domain `default` the
                isolation level must be read committed.

        Raises:
            FencedOutError: the term has ended: roll back.
            TransactionError: `connection` has no open transaction. Or the transaction has another
                isolation level, database or schema, or an open savepoint. `client.run_once(…,
                tx=…)` runs its function in a savepoint, so call `fence` before `run_once`.
            Exception: one of DATABASE_ERRORS.
        """
        return run_at_once_if_blocking(connection, self._fence(connection))

    async def _fence(self, connection: object) -> None:
        transaction = validate_and_adapt_fence_connection(connection)
        self.expect_held()
        is_rivers_row = self.lease.name == DEFAULT_DOMAIN
        if is_rivers_row:
            await require_read_committed(transaction)
        with fail_after(TRANSACTION_CHECK_TIMEOUT, "passing the fence of a leader term took long"):
            is_held = await self._try_to_fence_transaction(transaction)
        if not is_held:
            if await self.lease.confirm_held_or_end(WRITE_REFUSED_REASON):
                raise await make_wrong_database_error(transaction, "this leader term")
            raise _make_fenced_out_error()
        if is_rivers_row:
            await require_no_savepoint(transaction)

    async def _try_to_fence_transaction(self, connection: Transaction) -> bool:
        """Bind the open transaction of `connection` to the term. Return False if the term has
        ended, or if the transaction is in another database."""
        return await self.lease.try_fence(
            connection,
            timeout=self.transaction_timeout,
            lock_timeout=self.transaction_timeout * LOCK_WAIT_SHARE_OF_TIMEOUT,
        )

    def _end_fenced_out_term(self) -> FencedOutError:
        """End the term, because the database did not bind a transaction to the term. Return the
        error to raise."""
        self.lease.end(WRITE_REFUSED_REASON, may_be_held=False)
        return _make_fenced_out_error()


def _make_fenced_out_error() -> FencedOutError:
    return FencedOutError("another process is the leader, or may be")


class TermFence(LeaderTerm):
    """A leader term that can also open transactions that commit only during the term. The
    maintenance services write to the database only in these transactions."""

    @asynccontextmanager
    async def transaction(
        self, connection: DedicatedConnection, purpose: str
    ) -> AsyncGenerator[Connection]:
        """Open a transaction that commits only during the term. No other term begins before the
        transaction ends.

        Raises:
            FencedOutError: the term has ended; nothing was written.
            FenceTimeoutError: the `async with` block was not entered; nothing was written.
            TimeoutError: the transaction took longer than `FENCED_TRANSACTION_TIMEOUT`. The error
                text contains `purpose`.
            Exception: one of DATABASE_ERRORS, raised by the block or by the commit.
        """
        self.expect_held()
        is_entered, timeout = False, self.transaction_timeout.total_seconds()
        try:
            async with (
                connection.acquire(purpose, timeout) as open_connection,
                _read_committed_transaction(open_connection),
            ):
                if not await self._try_to_fence_transaction(open_connection):
                    raise self._end_fenced_out_term()
                is_entered = True
                yield open_connection
        except DATABASE_ERRORS as error:
            if is_entered:
                raise
            text = describe_error(error)
            raise FenceTimeoutError(
                text if text.startswith(purpose) else f"{purpose}: {text}"
            ) from error


@asynccontextmanager
async def _read_committed_transaction(connection: Connection) -> AsyncGenerator[None]:
    """Open a transaction for an `async with` block. After an error in the block, roll the
    transaction back, so that it ends on the server too. If the connection was only closed, a
    statement could keep running, and its locks would delay the next term.

    The isolation level is always read committed. At a higher level, the fence would fail if the
    lease is renewed during the transaction.
    """
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
        await transaction.commit()
    except BaseException:
        with (
            suppress(*DATABASE_ERRORS),  # after an error, the next use opens a new connection
            anyio.move_on_after(ROLLBACK_TIMEOUT, shield=True) as scope,
        ):
            await transaction.rollback()
        if scope.cancelled_caught:  # the rollback timed out, so the connection cannot be used again
            connection.terminate()
        raise
