"""Leases for user code: of the processes that compete for a name, exactly one acts under it.

A lease is a row with a time, given by the server's clock, and a rising epoch. Who holds it may act
until its trust ends; a write that is fenced commits under the lease or not at all.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from riverpy._clients.process import Opener
from riverpy._clock import SystemTimer
from riverpy._dsn import validate_url
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.lease import Lease, process_holder
from riverpy._leases.memory import MemoryLeases, MemoryTransaction
from riverpy._leases.store import UserLeaseTable
from riverpy._leases.timing import LeaseTiming, expect_wait
from riverpy._lifecycle import StopCause
from riverpy._names import validate_client_id, validate_lease_name, validate_schema
from riverpy.config import ELECT_JITTER_SHARE, LEASE_TTL_MAX
from riverpy.errors import ClientStateError, ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from riverpy._leases.store import LeaseStore
    from riverpy._postgres.driver import Pool, Transaction

__all__ = ["Lease", "LeaseManager", "MemoryLeases", "MemoryTransaction"]

TTL_LEAST = timedelta(milliseconds=100)


class LeaseManager:
    """Leases of this process, by themselves: `async with LeaseManager(url) as leases:`.

    A lease is either had by `hold`, which renews it in the background and cancels its block when it
    is lost; or by `try_acquire`, and then the caller renews it, stops when it is not held any more,
    and releases it.

    Used in one event loop; a forked process makes its own.
    """

    def __init__(
        self,
        database: str | Pool | Transaction | MemoryLeases,
        *,
        schema: str | None = None,
        holder: str | None = None,
        ttl: timedelta = timedelta(seconds=15),
        renew_interval: timedelta = timedelta(seconds=5),
        max_held: int | None = None,
        pooler: bool = False,
    ) -> None:
        """Make it; nothing is connected yet.

        Args:
            database: a `postgres://` URL, of which it makes up to two connections of its own; or an
                asyncpg pool or connection of the caller's, which is never closed, replaced or made
                again; or leases in memory. Two managers may share none but a pool, or the memory.
            schema: the schema of River's tables; None leaves it to the search path.
            holder: who holds the leases, 1 to 100 characters, not the same in two processes. None:
                the host, the process and a random part.
            ttl: how long a lease lasts that is not renewed: 100 milliseconds to a day.
            renew_interval: from one renewal, or bid, to the next. `ttl` is at least 2.4 times as
                long, so that a renewal may fail.
            max_held: how many leases `hold` keeps at once, at most; None: any number.
            pooler: whether the URL leads to a pooler in transaction mode.

        Raises:
            ConfigError: a name or a value is not allowed.
        """
        timing = _timing(ttl, renew_interval)
        if max_held is not None and (type(max_held) is not int or max_held < 1):
            raise ConfigError(f"max_held must be a number, 1 or more, or None, got {max_held!r}")
        _expect_texts(schema=schema, holder=holder)
        if not isinstance(pooler, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"pooler must be True or False, got {pooler!r}")
        if schema is not None:
            validate_schema(schema)
        if holder is not None:
            validate_client_id(holder)
        if isinstance(database, str):
            validate_url(database)
        self._holder = process_holder() if holder is None else holder
        store: LeaseStore = (
            database
            if isinstance(database, MemoryLeases)
            else UserLeaseTable(database, schema=schema, holder=self._holder, pooler=pooler)
        )
        self._engine = LeaseEngine(
            store, holder=self._holder, timing=timing, timer=SystemTimer(), max_held=max_held
        )
        self._opener: Opener | None = None
        self._is_closed = False
        self._given = WeakSet[Lease]()
        """The leases that its user keeps."""

    @property
    def holder(self) -> str:
        """Who holds its leases."""
        return self._holder

    async def __aenter__(self) -> Self:
        """Connect, and see that the table is there.

        Raises:
            SchemaMissingError: line `riverpy` is not migrated; the text has the command.
            ConfigError, DatabaseError, OSError, TimeoutError, asyncpg.PostgresError: the database
                cannot be used.
        """
        if self._opener is not None:
            raise ClientStateError("the manager of leases is open already, or was: make another")
        await self._engine.__aenter__()
        self._opener = Opener.current()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End what is held, and close what it owns. The blocks of `hold` that go on in other tasks
        are cancelled; leases of `try_acquire` that were not released are over, and lapse."""
        # Closing in a fork would end the sessions of its parent.
        if self._opener is not None and self._opener.is_this_process:
            self._is_closed = True
            for lease in self._given:
                lease.end("its manager is closed", cause=StopCause.CLIENT_STOP)
            await self._engine.close()

    async def try_acquire(self, name: str) -> Lease | None:
        """Bid once. None: somebody has the lease, this process included.

        Args:
            name: 1 to 100 printable ASCII characters, no space.

        Raises:
            ConfigError: the name is not allowed.
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: it is not known
                who has the lease. What was granted unheard lapses after the ttl.
            TransactionError: the caller's connection is in a transaction.
        """
        validate_lease_name(name)
        self._expect_open()
        lease, _wait = await self._engine.try_acquire(name)
        if lease is not None:
            self._given.add(lease)
            if self._is_closed:  # meanwhile
                lease.end("its manager is closed", cause=StopCause.CLIENT_STOP)
        return lease

    async def renew(self, lease: Lease) -> bool:
        """Extend a lease of this manager's by its ttl. False: it is over, stop now.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: it is not known
                whether it goes on. Try again, and stop when it is not held any more.
            TransactionError: the caller's connection is in a transaction.
        """
        self._expect_open()
        return await self._engine.renew(lease)

    async def release(self, lease: Lease) -> bool:
        """Give a lease up, when nothing is done under it any more. True only if that freed it;
        False: it was over before, or the database did not answer and it lapses, with a warning."""
        self._expect_open()
        return await self._engine.release(lease)

    def hold(
        self, name: str, *, wait: timedelta | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Stand by for a lease, then run the block under it, renewed in the background. When it is
        lost, the block is cancelled while there is still time for it to end.

        Args:
            name: 1 to 100 printable ASCII characters, no space.
            wait: how long to stand by, with one bid at least; None: for ever.

        Raises:
            ConfigError: the name, or `wait`, is not allowed.
            ClientStateError: the manager, or the pool or connection that it was given, is closed.
            TimeoutError: the lease was not free within `wait`.
            LeaseLostError: it was lost before the block had ended, whether or not that has noticed.
        """
        validate_lease_name(name)
        expect_wait(wait)
        self._expect_open()
        return self._engine.hold(name, wait=wait)

    def _expect_open(self) -> None:
        if self._opener is None:
            raise ClientStateError("the manager of leases is not open: use `async with manager:`")
        if self._is_closed:
            raise ClientStateError("the manager of leases is closed: make another")
        self._opener.check("the manager of leases")


def _expect_texts(**values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} takes a text, got {type(value).__name__}")


def _timing(ttl: timedelta, renew_interval: timedelta) -> LeaseTiming:
    for name, value in (("ttl", ttl), ("renew_interval", renew_interval)):
        if not isinstance(value, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{name} takes a timedelta, got {type(value).__name__}")
    least = 2 * (1 + ELECT_JITTER_SHARE) * min(renew_interval, LEASE_TTL_MAX)
    if renew_interval <= timedelta(0) or ttl < least:
        raise ConfigError(
            f"ttl must be at least 2.4 times renew_interval, which is more than zero, so that a "
            f"renewal may fail once: with renew_interval {renew_interval} at least {least}, got "
            f"{ttl}"
        )
    if not TTL_LEAST <= ttl <= LEASE_TTL_MAX:
        raise ConfigError(f"ttl must be between {TTL_LEAST} and {LEASE_TTL_MAX}, got {ttl}")
    return LeaseTiming(ttl.total_seconds(), renew_interval.total_seconds())
