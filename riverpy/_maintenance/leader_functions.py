"""A service that runs a user's function while this client is the leader."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import cancelled_once
from riverpy._log_events import LEADER_FUNCTION_ENDED
from riverpy._maintenance.base import MaintenanceService
from riverpy._postgres.transactions import (
    CHECK_TIMEOUT,
    elsewhere_error,
    expect_fenceable,
    expect_outermost,
    expect_read_committed,
)

if TYPE_CHECKING:
    from riverpy._leading.term_fence import TermFence
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext
    from riverpy._postgres.driver import Transaction
    from riverpy.singletons import LeaderFunction


class LeaderTerm:
    """One term in which this client leads its domain, for code of the user's."""

    def __init__(self, fence: TermFence) -> None:
        """Made by the client."""
        self._fence = fence

    @property
    def is_held(self) -> bool:
        """Whether the term may be acted under now."""
        return self._fence.is_valid

    def expect_held(self) -> None:
        """Before a step that is not fenced.

        Raises:
            FencedOutError: the term is over, or in doubt.
        """
        self._fence.expect_valid()

    async def fence(self, connection: Transaction) -> None:
        """Tie the transaction that is open on `connection` to this term: it commits under it or not
        at all. Call it before the transaction writes, and in the outermost one: a savepoint that is
        rolled back would undo it. The server ends a transaction that goes on for longer than 5
        seconds, or than `Config.leader_ttl`.

        Args:
            connection: asyncpg's, in a transaction; without a domain one that is read committed.

        Raises:
            FencedOutError: the term is over: roll back.
            TransactionError: no transaction is open there, or one of another isolation, or it leads
                to another database or schema; or a savepoint is open, as in the function of
                `run_once(tx=…)`.
            Exception: one of DATABASE_ERRORS.
        """
        expect_fenceable(connection)
        fence = self._fence
        fence.expect_valid()
        is_rivers = fence.term.epoch == 0  # the row
        if is_rivers:
            await expect_read_committed(connection)
        with anyio.fail_after(CHECK_TIMEOUT, reason="passing the fence of a lead took long"):
            is_held = await fence.passes(connection)
        if not is_held:
            if await fence.is_held_by_the_server():
                raise await elsewhere_error(connection, "this lead")
            raise fence.fenced_out_error()
        if is_rivers:
            await expect_outermost(connection)


class LeaderFunctionService(MaintenanceService):
    """Runs it in each term, once if it returns and again after a delay if it raises."""

    def __init__(self, context: TermContext, function: LeaderFunction) -> None:
        """Make it, for one term."""
        self.name = f"leader function {function.name}"
        super().__init__(context)
        self._function = function

    async def run_once(self, scope: StopScope) -> float:
        """Run it to its end.

        Raises:
            Exception: what it raised.
        """
        term = LeaderTerm(self.context.fence)
        await cancelled_once(self.name, lambda: self._function.fn(term))
        self.log.info(LEADER_FUNCTION_ENDED)
        return math.inf
