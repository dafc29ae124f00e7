"""Mandate: what a service of one term needs to act as a leader, and is refused when the term is
over."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._db.leaders import leader_fence
from riverpy.drivers.asyncpg import DATABASE_ERRORS
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy._cluster.lease import Lease, Term
    from riverpy._db.connection import DedicatedConnection
    from riverpy.drivers.asyncpg import Connection

TRANSACTION_LIMIT = timedelta(seconds=5)
"""What one fenced transaction may take: a dead holder delays a takeover by no more than that."""
ROLLBACK_LIMIT = 0.5
"""Seconds that a stopped or failed transaction may take to be rolled back; then its connection is
cut."""


class Mandate:
    """The right of one term. Whatever its services write goes through `transaction`."""

    def __init__(
        self, term: Term, lease: Lease, *, schema: str | None, fenced_out: Callable[[Term], None]
    ) -> None:
        """Make it.

        Args:
            term: whose right it is.
            lease: this process's belief about its leadership.
            schema: the schema of River's tables.
            fenced_out: told when the server says that the term is over.
        """
        self.term = term
        self._lease, self._schema = lease, schema
        self._fenced_out = fenced_out
        self._limit = min(TRANSACTION_LIMIT, lease.timing.ttl_delta)

    @property
    def is_trusted(self) -> bool:
        """Whether the term may be acted under now."""
        return self._lease.is_trusted(self.term)

    def expect_trusted(self) -> None:
        """Before a step that is not fenced.

        Raises:
            FencedOutError: the term is over, or in doubt.
        """
        if not self.is_trusted:
            raise FencedOutError("this process does not lead any more")

    @asynccontextmanager
    async def transaction(
        self, connection: DedicatedConnection, purpose: str
    ) -> AsyncGenerator[Connection]:
        """A transaction that commits only under the term: no other term begins until its end.

        Raises:
            FencedOutError: the term is over; nothing was written.
            TimeoutError: it took longer than `TRANSACTION_LIMIT`; the text has the purpose.
            Exception: one of DATABASE_ERRORS.
        """
        self.expect_trusted()
        async with (
            connection.use(purpose, self._limit.total_seconds()) as open_connection,
            _transaction(open_connection),
        ):
            is_held = await leader_fence(
                open_connection,
                self._schema,
                leader_id=self.term.leader_id,
                elected_at=self.term.elected_at,
                bound=self._limit,
            )
            if not is_held:
                self._fenced_out(self.term)
                raise FencedOutError("another process leads, or may lead")
            yield open_connection


@asynccontextmanager
async def _transaction(connection: Connection) -> AsyncGenerator[None]:
    """A transaction that has ended on the server, too, when its block is left: a cut connection
    alone would let a statement go on for a while, and its locks would hold up the term's end."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
        await transaction.commit()
    except BaseException:
        with (
            suppress(*DATABASE_ERRORS),  # whatever uses the connection next makes a new one
            anyio.move_on_after(ROLLBACK_LIMIT, shield=True),
        ):
            await transaction.rollback()
        raise
