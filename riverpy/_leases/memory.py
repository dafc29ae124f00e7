"""MemoryLeases: the leases of one process, for tests and for development without a database."""

from __future__ import annotations

import math
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from riverpy._clock import Timer
from riverpy._leases.store import ACQUIRE_LOCK_TIMEOUT, LeaseStore
from riverpy._postgres.leases import LeaseAcquireResult
from riverpy.errors import ConfigError, LeaseLostError, TransactionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable


ACQUIRE_POLL_INTERVAL = 0.01
"""Seconds between two checks while an attempt to acquire a lease waits for the end of a fenced
transaction."""


class _LeaseRow:
    """A lease in memory, with its current or last holder."""

    def __init__(self, epoch: int, holder: str, ttl: float, now: float) -> None:
        self.epoch, self.holder, self.ttl = epoch, holder, ttl
        self.acquired_at = datetime.now(UTC)
        self.expires_at = now + ttl
        self.fenced_transactions: set[MemoryTransaction] = set()
        """The transactions that `Lease.fence` has bound to the holder's term. Some may have
        ended."""


class MemoryTransaction:
    """A transaction that `Lease.fence` can bind to a lease in memory. At the commit, all functions
    that were passed to `on_commit` are called. If the transaction is rolled back, none is
    called."""

    def __init__(self, timer: Timer) -> None:
        """Create an open transaction. Only `MemoryLeases.transaction` does this."""
        self._timer = timer
        self._ends_at = math.inf
        self.effects: list[Callable[[], object]] = []
        """The functions to call at the commit."""

    @property
    def is_open(self) -> bool:
        """Whether the transaction is still open. A fenced transaction ends at its time limit."""
        return self._timer.seconds_since_boot() < self._ends_at

    def require_open(self) -> None:
        """Raise TransactionError if the transaction has ended."""
        if not self.is_open:
            raise TransactionError("the transaction has ended, or reached its limit: begin another")

    def on_commit(self, effect: Callable[[], object]) -> None:
        """Call `effect` at the commit.

        Raises:
            TransactionError: the transaction has ended.
        """
        self.require_open()
        self.effects.append(effect)

    def end_within(self, seconds: float) -> None:
        """Limit the transaction to the next `seconds`. An earlier limit stays in force."""
        self._ends_at = min(self._ends_at, self._timer.seconds_since_boot() + seconds)


class MemoryLeases(LeaseStore):
    """Keeps leases in the memory of this process. All lease managers that compete for these leases
    must share this object.

    Use this class in tests, and for development without a database. Other processes do not see
    these leases, and the leases end with the process.
    """

    def __init__(self, *, timer: Timer | None = None) -> None:
        """Create the memory leases.

        Args:
            timer: the clock by which leases expire; None: the machine's clock.
        """
        self._timer = Timer() if timer is None else timer
        self._rows: dict[str, _LeaseRow] = {}
        self._last_epoch = 0
        self._lock = threading.RLock()  # reentrant: an `on_commit` function may call `forget`

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[MemoryTransaction]:
        """Open a transaction for `Lease.fence`. It commits at the end of the `async with` block. If
        the block raises an error, it is rolled back.

        Raises:
            LeaseLostError: the fenced transaction lasted longer than its limit. It was rolled back.
        """
        transaction = MemoryTransaction(self._timer)
        try:
            yield transaction
            with self._lock:
                if not transaction.is_open:
                    raise LeaseLostError(
                        "the transaction lasted longer than its fence allows: nothing happened"
                    )
                transaction.end_within(0)
                for effect in transaction.effects:
                    effect()
        finally:
            transaction.end_within(0)

    def forget(self) -> None:
        """Delete all leases, as if the table in a database was emptied."""
        with self._lock:
            self._rows.clear()

    # -- the methods of LeaseStore

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        give_up_at = self._timer.seconds_since_boot() + min(
            timeout, ACQUIRE_LOCK_TIMEOUT.total_seconds()
        )
        while True:
            with self._lock:
                answer = self._try_acquire(name, holder, ttl.total_seconds())
            if answer is not None or self._timer.seconds_since_boot() >= give_up_at:
                return answer
            await self._timer.sleep(ACQUIRE_POLL_INTERVAL)

    def _try_acquire(self, name: str, holder: str, ttl: float) -> LeaseAcquireResult | None:
        row, now = self._rows.get(name), self._timer.seconds_since_boot()
        if row is not None:
            if row.expires_at >= now:
                left = row.expires_at - now
                return LeaseAcquireResult(False, row.holder, row.epoch, row.acquired_at, left)
            if any(transaction.is_open for transaction in row.fenced_transactions):
                return None
        micros = int(datetime.now(UTC).timestamp() * 1_000_000)
        self._last_epoch = max(self._last_epoch + 1, micros)
        made = self._rows[name] = _LeaseRow(self._last_epoch, holder, ttl, now)
        return LeaseAcquireResult(True, holder, made.epoch, made.acquired_at, None)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        renewed: dict[str, bool] = {}  # never False: no row in memory is locked
        with self._lock:
            for name, epoch in terms:
                row = self._find_held_row(name, epoch)
                if row is not None and row.holder == holder:
                    row.expires_at = self._timer.seconds_since_boot() + row.ttl
                    renewed[name] = True
        return renewed

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        with self._lock:
            row = self._find_held_row(name, epoch)
            if row is None or row.holder != holder:
                return False
            row.expires_at = -math.inf
            return True

    async def fence(
        self,
        transaction: object,
        name: str,
        epoch: int,
        *,
        timeout: timedelta,
        lock_timeout: timedelta,
    ) -> bool:
        if not isinstance(transaction, MemoryTransaction):
            raise TransactionError(
                "a fence of a lease in memory takes a transaction of MemoryLeases.transaction(), "
                f"got {type(transaction).__name__}"
            )
        with self._lock:
            transaction.require_open()
            row = self._find_held_row(name, epoch)
            if row is None:
                return False
            transaction.end_within(timeout.total_seconds())
            row.fenced_transactions = {
                other for other in row.fenced_transactions if other.is_open
            } | {transaction}
            return True

    async def make_wrong_database_error(self, transaction: object, name: str) -> TransactionError:
        return TransactionError(f"lease {name!r} is kept by other leases in memory")

    def fence_statement(self, name: str, epoch: int, *, timeout: timedelta) -> str:
        raise ConfigError(
            "a lease in memory has no statement: give LeaseManager a database, or fence with "
            "MemoryLeases.transaction()"
        )

    def _find_held_row(self, name: str, epoch: int) -> _LeaseRow | None:
        """Return the row of the lease if this term has not ended or expired, otherwise None."""
        row = self._rows.get(name)
        if row is None or row.epoch != epoch or row.expires_at < self._timer.seconds_since_boot():
            return None
        return row
