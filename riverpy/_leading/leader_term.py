"""LeaderTerm: one term of a leader, as the user's functions get it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.transactions import (
    CHECK_TIMEOUT,
    elsewhere_error,
    expect_fenceable,
    expect_outermost,
    expect_read_committed,
)

if TYPE_CHECKING:
    from riverpy._leading.term_fence import TermFence
    from riverpy._postgres.driver import Transaction


class LeaderTerm:
    """One term in which this client is the leader of its domain."""

    def __init__(self, fence: TermFence) -> None:
        """Made by the client."""
        self._fence = fence

    @property
    def is_held(self) -> bool:
        """Whether this client may act as the leader now."""
        return self._fence.is_valid

    def expect_held(self) -> None:
        """Check the term before a step that is not fenced.

        Raises:
            FencedOutError: the term has ended, or reached its local deadline.
        """
        self._fence.expect_valid()

    async def fence(self, connection: Transaction) -> None:
        """Bind the transaction that is open on `connection` to this term: the transaction commits
        only while no other term can begin.

        Call this method before the transaction writes, and in the outermost transaction: the
        rollback of a savepoint would undo the fence. The server ends a transaction that lasts
        longer than 5 seconds, or than `Config.leader_ttl`.

        Args:
            connection: a connection of asyncpg in a transaction. In the domain `default` the
                isolation level must be read committed.

        Raises:
            FencedOutError: the term has ended: roll back.
            TransactionError: no transaction is open there; or it has another isolation level, or
                belongs to another database or schema; or a savepoint is open, as in the function of
                `run_once(tx=…)`.
            Exception: one of DATABASE_ERRORS.
        """
        expect_fenceable(connection)
        fence = self._fence
        fence.expect_valid()
        is_rivers_row = fence.lease.name == DEFAULT_DOMAIN
        if is_rivers_row:
            await expect_read_committed(connection)
        with anyio.fail_after(CHECK_TIMEOUT, reason="passing the fence of a leader term took long"):
            is_held = await fence.passes(connection)
        if not is_held:
            if await fence.lease.is_held_by_the_server():
                raise await elsewhere_error(connection, "this leader term")
            raise fence.fenced_out_error()
        if is_rivers_row:
            await expect_outermost(connection)
