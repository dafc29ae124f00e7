"""MemoryLeases: leases of one process, for tests and for development without a database."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from riverpy._clock import SystemTimer
from riverpy._leases.store import BID_LOCK_LIMIT
from riverpy._postgres.leases import LeaseBid
from riverpy.errors import ConfigError, LeaseLostError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from riverpy._clock import Timer

LOOK = 0.01
"""Seconds between two looks of a bid that waits for a transaction."""


class _Row:
    """Who holds a lease, or held it last."""

    def __init__(self, epoch: int, holder: str, ttl: float, now: float) -> None:
        self.epoch, self.holder, self.ttl = epoch, holder, ttl
        self.acquired_at = datetime.now(UTC)
        self.expires_at = now + ttl
        self.fenced: set[MemoryTransaction] = set()
        """What may still commit under this term."""


class MemoryTransaction:
    """What a fence of a lease in memory ties to its term: effects that happen at the commit, all or
    none."""

    def __init__(self, timer: Timer) -> None:
        """Made by `MemoryLeases.transaction`."""
        self._timer = timer
        self._effects: list[Callable[[], object]] = []
        self._ends_at: float | None = None
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether it goes on: one that is fenced ends when its time is over."""
        return self._is_open and (self._ends_at is None or self._timer.boottime() < self._ends_at)

    def on_commit(self, effect: Callable[[], object]) -> None:
        """Call this at the commit.

        Raises:
            TransactionError: it has ended.
        """
        self.expect_open()
        self._effects.append(effect)

    def expect_open(self) -> None:
        """Raise TransactionError if it has ended."""
        if not self.is_open:
            raise TransactionError("the transaction has ended, or its time is over: begin another")

    def limit(self, seconds: float) -> None:
        """Let it end after so many seconds. A shorter limit stays."""
        ends_at = self._timer.boottime() + seconds
        self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    def commit(self) -> None:
        """Let the effects happen, unless its time is over."""
        self.expect_open()
        self._is_open = False
        for effect in self._effects:
            effect()

    def roll_back(self) -> None:
        """Let nothing happen."""
        self._is_open = False


class MemoryLeases:
    """Leases in memory: one object for all managers of the process that compete.

    They are gone with the process, and hold nobody else off: for tests, and for development without
    a database.
    """

    def __init__(self, *, timer: Timer | None = None) -> None:
        """Make it.

        Args:
            timer: by which leases expire; None: the machine's.
        """
        self._timer = SystemTimer() if timer is None else timer
        self._rows: dict[str, _Row] = {}
        self._last_epoch = 0
        self._lock = threading.RLock()  # what happens at a commit may forget all

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[MemoryTransaction]:
        """A transaction, for `Lease.fence`. It commits at the end of the block, and is rolled back
        if that raises.

        Raises:
            LeaseLostError: it was fenced, and went on for longer than it may: nothing happened.
        """
        transaction = MemoryTransaction(self._timer)
        try:
            yield transaction
            with self._lock:
                if not transaction.is_open:
                    raise LeaseLostError(
                        "the transaction went on for longer than a fence lets it: nothing happened"
                    )
                transaction.commit()
        finally:
            transaction.roll_back()

    def forget(self) -> None:
        """Lose every row, as a table that was emptied."""
        with self._lock:
            self._rows.clear()

    # -- the store

    async def open(self) -> None:
        """There is always a place."""

    @property
    def is_gone(self) -> bool:
        """It never is."""
        return False

    def rest(self, *, bids: bool, renewals: bool) -> None:
        """Nothing is ever lost."""

    async def close(self) -> None:
        """Others use it, too."""

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, bound: float
    ) -> LeaseBid | None:
        """Bid. None: a transaction of the last term goes on."""
        give_up_at = self._timer.boottime() + min(bound, BID_LOCK_LIMIT.total_seconds())
        while True:
            with self._lock:
                bid = self._bid(name, holder, ttl.total_seconds())
            if bid is not None or self._timer.boottime() >= give_up_at:
                return bid
            await self._timer.wait(asyncio.Event(), LOOK)

    def _bid(self, name: str, holder: str, ttl: float) -> LeaseBid | None:
        row, now = self._rows.get(name), self._timer.boottime()
        if row is not None:
            if row.expires_at >= now:
                left = row.expires_at - now
                return LeaseBid(False, row.holder, row.epoch, row.acquired_at, left)
            if any(transaction.is_open for transaction in row.fenced):
                return None
        micros = int(datetime.now(UTC).timestamp() * 1_000_000)
        self._last_epoch = max(self._last_epoch + 1, micros)
        made = self._rows[name] = _Row(self._last_epoch, holder, ttl, now)
        return LeaseBid(True, holder, made.epoch, made.acquired_at, None)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, bound: float
    ) -> dict[str, bool]:
        """Extend terms, each a name and an epoch. Returns the names of those that go on, each with
        True: nobody keeps a row locked."""
        held: dict[str, bool] = {}
        with self._lock:
            now = self._timer.boottime()
            for name, epoch in terms:
                row = self._held(name, epoch)
                if row is not None and row.holder == holder:
                    row.expires_at = now + row.ttl
                    held[name] = True
        return held

    async def release(self, name: str, epoch: int, holder: str, *, bound: float) -> bool:
        """End a term. False: it was over before."""
        with self._lock:
            row = self._held(name, epoch)
            if row is None or row.holder != holder:
                return False
            row.expires_at = float("-inf")
            return True

    async def fence(self, transaction: object, name: str, epoch: int, *, bound: timedelta) -> bool:
        """Tie an open transaction, which may last for `bound`, to a term. False: it is over.

        Raises:
            TransactionError: that is no open transaction of leases in memory.
        """
        if not isinstance(transaction, MemoryTransaction):
            raise TransactionError(
                "a fence of a lease in memory takes what MemoryLeases.transaction() gives, got "
                f"{type(transaction).__name__}"
            )
        with self._lock:
            transaction.expect_open()
            row = self._held(name, epoch)
            if row is None:
                return False
            transaction.limit(bound.total_seconds())
            row.fenced = {other for other in row.fenced if other.is_open} | {transaction}
            return True

    async def elsewhere_error(self, transaction: object, name: str) -> TransactionError:
        """What to raise if a term is held that a fence there does not find."""
        return TransactionError(f"lease {name!r} is kept by other leases in memory")

    def fence_statement(self, name: str, epoch: int, *, bound: timedelta) -> str:
        """There is none."""
        raise ConfigError(
            "a lease in memory has no statement: give LeaseManager a database, or fence with "
            "MemoryLeases.transaction()"
        )

    def _held(self, name: str, epoch: int) -> _Row | None:
        row = self._rows.get(name)
        if row is None or row.epoch != epoch or row.expires_at < self._timer.boottime():
            return None
        return row
