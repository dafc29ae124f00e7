"""Lease: one term of this process, what it may believe of it, and its fence."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import anyio

from riverpy._leases.validity import LeaseValidity, Term
from riverpy._lifecycle import StopCause
from riverpy._log import get_logger
from riverpy._log_events import LEASE_CHECK_FAILED
from riverpy._names import process_id
from riverpy._postgres.driver import PostgresError
from riverpy.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._clock import Timer
    from riverpy._leases.memory import MemoryTransaction
    from riverpy._leases.store import LeaseStore
    from riverpy._leases.validity import LeaseTiming
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.leases import LeaseBid

ASK_MOST = 5.0
"""Seconds that a question to the store may take."""
_SERIALIZATION_FAILURE = "40001"
_holder: tuple[int, str] | None = None


def process_holder() -> str:
    """Host, process and a random part, made once a process: a forked one has its own."""
    global _holder
    pid = os.getpid()
    if _holder is None or _holder[0] != pid:
        _holder = pid, process_id(None)
    return _holder[1]


class Lease:
    """One term of a lease: `name`, and the `epoch` that no other term of it has.

    It is made by a `LeaseManager` or a client. It is a token for code in threads, too: whatever is
    not said to be a coroutine may be asked from any thread.
    """

    def __init__(
        self,
        name: str,
        holder: str,
        bid: LeaseBid,
        *,
        asked_at: float,
        store: LeaseStore,
        timing: LeaseTiming,
        timer: Timer,
    ) -> None:
        """Make it.

        Args:
            name: of the lease, as the user calls it.
            holder: who has been granted it.
            bid: what the server answered.
            asked_at: when the attempt began, by boottime.
            store: where the lease is.
            timing: how long it lasts, and how often it is renewed.
            timer: by which its time is measured.
        """
        self.name, self.epoch, self.holder = name, bid.epoch, holder
        self._pid = os.getpid()
        self.cause: StopCause | None = None
        """Why it is over; None while that is not known."""
        self.may_be_held = True
        """Whether the row may still be this term's."""
        self.is_used = True
        """Whether something may still be done under it, held or not. Set from any thread."""
        self._term = Term(holder, bid.acquired_at, bid.epoch)
        self._trust = LeaseValidity(timing, timer)
        self._trust.granted(self._term, asked_at=asked_at)
        self._store, self._timing, self._timer = store, timing, timer
        self._over = asyncio.Event()
        self.why = "it could not be renewed in time"
        """What ended it, in words."""
        self.waited = 0.0
        """Seconds that its holder stood by for it."""
        self._callbacks: list[Callable[[], object]] = []
        self._fence_statement: str | None = None

    def __repr__(self) -> str:
        state = "held" if self.is_held else "over"
        return f"<Lease {self.name!r} epoch={self.epoch} {state}>"

    @property
    def is_held(self) -> bool:
        """Whether this process may act under it now. By a clock that counts the time of a suspended
        machine, and never for longer than no other can have it. Never in a process that was forked
        from the holder's."""
        return self._pid == os.getpid() and self._trust.is_valid(self._term)

    @property
    def trust_left(self) -> float:
        """Seconds for which it may be acted under if it is not renewed; 0 once it is over."""
        return self._trust.left if self._pid == os.getpid() else 0.0

    def expect_held(self) -> None:
        """Before a step that is not fenced.

        Raises:
            LeaseLostError: the lease is over, or in doubt.
        """
        if not self.is_held:
            raise self.lost_error()

    async def wait_lost(self) -> None:
        """Return when the lease is over, whatever ended it."""
        while (left := self.trust_left) > 0:
            await self._timer.wait(self._over, min(left, self._timing.watch_step))

    async def fence(self, connection: Transaction | MemoryTransaction) -> None:
        """Tie the transaction that is open on `connection` to this term: it commits under it or not
        at all, for the lease passes to nobody before its end.

        Call it before the transaction writes, and in the outermost one: a savepoint that is rolled
        back would undo it. The server ends a transaction that goes on for longer than the lease's
        ttl; before PostgreSQL 17 one of which a statement, or a pause, does. A transaction of any
        isolation may be fenced; renewals go on meanwhile.

        Args:
            connection: asyncpg's, in a transaction; for a lease in memory a transaction of that.

        Raises:
            LeaseLostError: the lease is over: roll back.
            TransactionError: no transaction is open there, or it leads to another database or
                schema; or a savepoint is open, as in the function of `run_once(tx=…)`.
            TimeoutError: no answer in the time for which the lease may be acted under.
            asyncpg.PostgresError: the transaction has failed.
        """
        self.expect_held()
        try:
            with anyio.fail_after(
                self.trust_left,
                reason=f"passing the fence of lease {self.name!r} took longer than it is trusted",
            ):
                is_held = await self._store.fence(
                    connection, self.name, self.epoch, bound=self._timing.ttl_delta
                )
        except PostgresError as error:
            if getattr(error, "sqlstate", None) != _SERIALIZATION_FAILURE:
                raise
            if await self._is_held_by_the_server():  # its own snapshot is what failed
                raise
            self.end("the database says so", may_be_held=False)
        else:
            if not is_held and await self._is_held_by_the_server():
                raise await self._store.elsewhere_error(connection, self.name)
            if not is_held:
                self.end("the database says so", may_be_held=False)
        self.expect_held()

    @property
    def fence_statement(self) -> str:
        """The fence as one statement, for a driver that works in threads. Execute it in the
        outermost transaction, before that writes, and without parameters; roll back unless it
        returns true. No row: the lease is over; false: a savepoint is open, which would undo the
        fence. Where the transaction is repeatable read or serializable, a term that is over passes
        until another begins, which then waits.

        Raises:
            LeaseLostError: the lease is over, or in doubt.
            ConfigError: the lease is kept in memory.
        """
        self.expect_held()
        if self._fence_statement is None:
            self._fence_statement = self._store.fence_statement(
                self.name, self.epoch, bound=self._timing.ttl_delta
            )
        return self._fence_statement

    # -- for those who keep it

    def granted(self, *, asked_at: float) -> None:
        """The server renewed it, to an attempt that began at `asked_at` by boottime."""
        if self.cause is None:
            self._trust.granted(self._term, asked_at=asked_at)

    def end(
        self, why: str, *, cause: StopCause = StopCause.LEASE_LOST, may_be_held: bool = True
    ) -> bool:
        """This process believes no more that it holds it, at once. The first reason counts; returns
        whether it is this one."""
        if self.cause is not None:
            self.may_be_held = self.may_be_held and may_be_held
            return False
        self.cause, self.may_be_held, self.why = cause, may_be_held, why
        self._trust.ended()
        self._over.set()
        for callback in self._callbacks:
            callback()
        return True

    def when_over(self, callback: Callable[[], object]) -> None:
        """Call this as soon as it is over, in the event loop."""
        if self.cause is None:
            self._callbacks.append(callback)
        else:
            callback()

    def lost_error(self) -> LeaseLostError:
        """What to raise where the lease is used although it is over."""
        why = (
            self.why if self._pid == os.getpid() else "it is of the process that this is a fork of"
        )
        return LeaseLostError(
            f"lease {self.name!r} is not held any more (epoch {self.epoch}: {why}): stop what "
            "was done under it, and roll back what is not committed"
        )

    async def _is_held_by_the_server(self) -> bool:
        asked_at = self._timer.boottime()
        try:
            held = await self._store.renew(self.holder, [(self.name, self.epoch)], bound=ASK_MOST)
        except Exception as error:  # in doubt, and the first error tells more
            get_logger().debug(
                LEASE_CHECK_FAILED,
                lease=self.name,
                error_type=type(error).__name__,
            )
            return False
        if held.get(self.name):
            self.granted(asked_at=asked_at)
        return self.name in held
