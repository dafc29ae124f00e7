"""TermFence: what a service of one term needs to act as a leader, and is refused when the term is
over."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, describe
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy._leading.elector import LeaderStore
    from riverpy._leases.validity import LeaseValidity, Term
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection, Transaction

TRANSACTION_LIMIT = timedelta(seconds=5)
"""What one fenced transaction may take: a dead holder delays a takeover by no more than that."""
LOCK_SHARE = 1 / 5
"""Of that, how long a statement may wait for a row that somebody has locked."""
ASK_MOST = 5.0
"""Seconds that a question whether the term goes on may take."""
ROLLBACK_LIMIT = 0.5
"""Seconds that a stopped or failed transaction may take to be rolled back; then its connection is
cut."""


class FenceBusyError(TimeoutError):
    """A transaction did not begin: another session has locked the leader's row, or the database
    does not answer. The rows that were to be written are not the cause."""


class TermFence:
    """The right of one term. Whatever its services write goes through `transaction`."""

    def __init__(
        self,
        term: Term,
        trust: LeaseValidity,
        *,
        store: LeaderStore,
        fenced_out: Callable[[Term], None],
    ) -> None:
        """Make it.

        Args:
            term: whose right it is.
            trust: this process's belief about its leadership.
            store: the row of the lead.
            fenced_out: told when the server says that the term is over.
        """
        self.term = term
        self._trust, self._store = trust, store
        self._fenced_out = fenced_out
        self._limit = min(TRANSACTION_LIMIT, trust.timing.ttl_delta)

    @property
    def limit(self) -> timedelta:
        """How long a fenced transaction may take."""
        return self._limit

    @property
    def is_valid(self) -> bool:
        """Whether the term may be acted under now."""
        return self._trust.is_valid(self.term)

    def expect_valid(self) -> None:
        """Before a step that is not fenced.

        Raises:
            FencedOutError: the term is over, or in doubt.
        """
        if not self.is_valid:
            raise FencedOutError("this process does not lead any more")

    @asynccontextmanager
    async def transaction(
        self, connection: DedicatedConnection, purpose: str
    ) -> AsyncGenerator[Connection]:
        """A transaction that commits only under the term: no other term begins until its end.

        Raises:
            FencedOutError: the term is over; nothing was written.
            FenceBusyError: the block was not entered; nothing was written.
            TimeoutError: it took longer than `TRANSACTION_LIMIT`; the text has the purpose.
            Exception: one of DATABASE_ERRORS, of the block or of the commit.
        """
        self.expect_valid()
        is_entered = False
        try:
            async with (
                connection.use(purpose, self._limit.total_seconds()) as open_connection,
                _transaction(open_connection),
            ):
                await self.fence(open_connection)
                is_entered = True
                yield open_connection
        except DATABASE_ERRORS as error:
            if is_entered:
                raise
            text = describe(error)
            raise FenceBusyError(
                text if text.startswith(purpose) else f"{purpose}: {text}"
            ) from error

    async def fence(self, connection: Transaction) -> None:
        """Tie the transaction that is open on `connection`, a leader's own, to the term.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        if not await self.passes(connection):
            raise self.fenced_out_error()

    async def passes(self, connection: Transaction) -> bool:
        """The same for any connection. False: the term is over, or not known in that database."""
        return await self._store.fence(
            connection, self.term, bound=self._limit, lock_bound=self._limit * LOCK_SHARE
        )

    async def is_held_by_the_server(self) -> bool:
        """Whether the lead's own row says that the term goes on. False: also if that is unknown."""
        ttl = self._trust.timing.ttl_delta
        try:
            return await self._store.renew(self.term, ttl, ASK_MOST)
        except DATABASE_ERRORS:  # a row that is locked, too
            return False

    def fenced_out_error(self) -> FencedOutError:
        """End the term, and say what to raise."""
        self._fenced_out(self.term)
        return FencedOutError("another process leads, or may lead")


@asynccontextmanager
async def _transaction(connection: Connection) -> AsyncGenerator[None]:
    """A transaction that has ended on the server, too, when its block is left: a cut connection
    alone would let a statement go on for a while, and its locks would hold up the term's end.

    Read committed, whatever the session's default: under a snapshot the fence would fail on a lease
    that was renewed meanwhile."""
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
        await transaction.commit()
    except BaseException:
        with (
            suppress(*DATABASE_ERRORS),  # whatever uses the connection next makes a new one
            anyio.move_on_after(ROLLBACK_LIMIT, shield=True) as scope,
        ):
            await transaction.rollback()
        if scope.cancelled_caught:  # a refused statement alone does not leave it in doubt
            connection.terminate()
        raise
