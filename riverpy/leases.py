"""Leases for user code. A lease has a name, and at most one process holds it at a time.

In the database a lease is a row. It contains the expiry time by the server's clock, and the epoch,
a number that increases with each acquisition. The holder may act until its local deadline, which is
a little before the expiry time. A fenced write is a transaction that commits only if the process
still holds the lease."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from riverpy._clients.process import ProcessAndLoop
from riverpy._clock import Timer
from riverpy._dsn import validate_url
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.lease import Lease
from riverpy._leases.memory import MemoryLeases, MemoryTransaction
from riverpy._leases.store import UserLeaseTable
from riverpy._leases.timing import LeaseTiming, validate_wait_argument
from riverpy._lifecycle import StopCause
from riverpy._names import (
    make_unique_id,
    validate_client_id,
    validate_lease_name,
    validate_schema_name,
)
from riverpy._postgres.passwords import make_password_source
from riverpy.config import ELECT_JITTER_FRACTION, LEASE_TTL_MAX
from riverpy.errors import ClientStateError, ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from riverpy._leases.store import LeaseStore
    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._postgres.passwords import PasswordFunction

__all__ = ["Lease", "LeaseManager", "MemoryLeases", "MemoryTransaction"]

LEASE_TTL_MIN = timedelta(milliseconds=100)


class LeaseManager:
    """Acquires leases in programs without a riverpy client: `async with LeaseManager(url) as
    leases:`.

    `hold` renews a lease in the background, and cancels its `async with` block when the lease is
    lost. After `try_acquire`, the caller must renew and release the lease, and must stop its work
    when the lease is lost.

    A manager belongs to one event loop. A forked process needs its own manager.
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
        password: PasswordFunction | None = None,
    ) -> None:
        """Create the lease manager. It opens no connection.

        Args:
            database: a `postgres://` URL, an asyncpg pool or connection of the caller, or a
                `MemoryLeases`. With a URL, the manager opens up to two connections. It never closes
                or replaces the caller's pool or connection. Two managers may share a pool or a
                `MemoryLeases`, but not a connection.
            schema: the schema of River's tables; None: the search path decides.
            holder: the name under which this manager holds leases, 1 to 100 characters, different
                for each manager. None: the host, the process id and a random part.
            ttl: how long a lease lasts without a renewal: 100 milliseconds to a day.
            renew_interval: the time from one renewal to the next, and from one attempt to acquire a
                lease to the next. `ttl` must be at least 2.4 times as long, so that one renewal may
                fail.
            max_held: the maximum number of leases that `hold` holds at once; None: no limit.
            pooler: whether the URL is the address of a connection pooler in transaction mode.
            password: a function that returns the password for each connection, as for `Client`.

        Raises:
            ConfigError: a name or a value is not allowed.
        """
        timing = _make_lease_timing(ttl, renew_interval)
        if max_held is not None and (type(max_held) is not int or max_held < 1):
            raise ConfigError(f"max_held must be a number, 1 or more, or None, got {max_held!r}")
        if not isinstance(pooler, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"pooler must be True or False, got {pooler!r}")
        if schema is not None:
            validate_schema_name(schema)
        if holder is not None:
            validate_client_id(holder, "a holder")
        if isinstance(database, str):
            validate_url(database)
        source = make_password_source(password, database)
        self._holder = make_unique_id(None) if holder is None else holder
        store: LeaseStore = (
            database
            if isinstance(database, MemoryLeases)
            else UserLeaseTable(
                database, schema=schema, holder=self._holder, pooler=pooler, password=source
            )
        )
        self._engine = LeaseEngine(
            store, holder=self._holder, timing=timing, timer=Timer(), max_held=max_held
        )
        self._opened_in: ProcessAndLoop | None = None
        self._is_closed = False
        self._acquired_leases = WeakSet[Lease]()
        """The leases that `try_acquire` has returned."""

    @property
    def holder(self) -> str:
        """The name of this manager as a holder of leases."""
        return self._holder

    async def __aenter__(self) -> Self:
        """Connect to the database, and check that riverpy's table of leases exists.

        Raises:
            SchemaMissingError: the migrations of riverpy's own tables are not applied. The error
                text contains the command that applies them.
            ConfigError, DatabaseError, OSError, TimeoutError, asyncpg.PostgresError: the database
                cannot be used.
        """
        if self._opened_in is not None:
            raise ClientStateError("the manager of leases is open already, or was: make another")
        await self._engine.__aenter__()
        self._opened_in = ProcessAndLoop.current()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End all leases of the manager in this process, and close the connections that the manager
        has opened.

        `async with hold(…)` blocks that still run in other tasks are cancelled, and their leases
        are released. If such a block does not end within 2 seconds, its lease is not released but
        expires. Leases from `try_acquire` that the caller has not released are not released here
        either: they end in this process, and expire in the database."""
        # Closing in a forked process would end the database sessions of its parent.
        if self._opened_in is not None and self._opened_in.is_current_process:
            self._is_closed = True
            for lease in self._acquired_leases:
                lease.end("its lease manager was closed", cause=StopCause.CLIENT_STOP)
            await self._engine.close()

    async def try_acquire(self, name: str) -> Lease | None:
        """Try once to acquire a lease. Returns None if this process or another one already holds
        the lease.

        Args:
            name: 1 to 100 printable ASCII characters, no space.

        Raises:
            ConfigError: the name is not allowed.
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: the database
                failed, so the result is unknown. If the lease was acquired, it expires after its
                ttl.
            TransactionError: the caller's connection is in a transaction.
        """
        validate_lease_name(name)
        self._require_open()
        lease, _wait = await self._engine.try_acquire(name)
        if lease is not None:
            self._acquired_leases.add(lease)
            if self._is_closed:  # another task has closed the manager
                lease.end("its lease manager was closed", cause=StopCause.CLIENT_STOP)
        return lease

    async def renew(self, lease: Lease) -> bool:
        """Extend a lease of this manager by its ttl. Returns False if the lease has ended: then
        stop the work.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: the database
                failed, so the result is unknown. Try again, and stop the work when the lease is
                lost.
            TransactionError: the caller's connection is in a transaction.
        """
        self._require_open()
        return await self._engine.renewer.renew_lease(lease)

    async def release(self, lease: Lease) -> bool:
        """Release a lease after the work has ended. Returns whether it was released.

        Returns False if the lease had ended before, or if the database did not answer. If the
        database did not answer, a warning is logged and the lease expires."""
        self._require_open()
        return await self._engine.release(lease)

    def hold(
        self, name: str, *, wait: timedelta | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Return a context manager that waits for a lease, and holds it during the `async with`
        block.

        The lease is renewed in the background. If the lease is lost, the block is cancelled early
        enough to end before another process can acquire the lease.

        Args:
            name: 1 to 100 printable ASCII characters, no space.
            wait: how long to wait for the lease; None: no limit. The manager tries to acquire it at
                least once.

        Raises:
            ConfigError: the name, or `wait`, is not allowed.
            ClientStateError: the manager, or the caller's pool or connection, is closed.
            TimeoutError: the lease was not free within `wait`.
            LeaseLostError: the lease was lost before the block ended.
        """
        validate_lease_name(name)
        validate_wait_argument(wait)
        self._require_open()
        return self._engine.hold(name, wait=wait)

    def _require_open(self) -> None:
        if self._opened_in is None:
            raise ClientStateError("the manager of leases is not open: use `async with manager:`")
        if self._is_closed:
            raise ClientStateError("the manager of leases is closed: make another")
        self._opened_in.require_current("the manager of leases")


def _make_lease_timing(ttl: timedelta, renew_interval: timedelta) -> LeaseTiming:
    for name, value in (("ttl", ttl), ("renew_interval", renew_interval)):
        if not isinstance(value, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{name} takes a timedelta, got {type(value).__name__}")
    least = 2 * (1 + ELECT_JITTER_FRACTION) * min(renew_interval, LEASE_TTL_MAX)
    if renew_interval <= timedelta(0) or ttl < least:
        raise ConfigError(
            f"ttl must be at least 2.4 times renew_interval, which is more than zero, so that a "
            f"renewal may fail once: with renew_interval {renew_interval} at least {least}, got "
            f"{ttl}"
        )
    if not LEASE_TTL_MIN <= ttl <= LEASE_TTL_MAX:
        raise ConfigError(f"ttl must be between {LEASE_TTL_MIN} and {LEASE_TTL_MAX}, got {ttl}")
    return LeaseTiming(ttl.total_seconds(), renew_interval.total_seconds())
