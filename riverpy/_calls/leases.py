"""LeaseMethods: the methods of a client that use leases and singletons."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from riverpy._calls.events import EventMethods
from riverpy._clock import Timer
from riverpy._leases.client_leases import ClientLeaseEngine
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.store import UserLeaseTable
from riverpy._leases.timing import LeaseTiming, validate_wait
from riverpy._names import validate_lease_name
from riverpy.config import LEASE_TTL_MAX
from riverpy.errors import ClientStateError, ConfigError
from riverpy.singletons import LeaderFunction, Singleton, SingletonRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from datetime import timedelta

    from riverpy.leases import Lease
    from riverpy.singletons import LeaderFn, RestartPolicy, SingletonFn


class LeaseMethods(EventMethods):
    """The methods of a client that use leases and singletons."""

    def singleton(
        self,
        name: str,
        fn: SingletonFn,
        *,
        restart: RestartPolicy = "on_error",
        candidate: bool = True,
    ) -> None:
        """Register a function that runs in one process at a time. All other processes that register
        the function wait. When the process that runs it releases or loses the lease, another one
        takes over.

        `await fn(lease)` begins when this process has acquired the lease. When the lease is lost,
        or the client stops, `fn` is cancelled once, so that it can await its cleanup. Writes are
        always safe if each transaction begins with `await lease.fence(connection)`. If the function
        returns, this process does not run it again until the client is started again. Another
        process that waits for the lease runs it. If a function ignores its cancellation for a fifth
        of `Config.leader_ttl`, this is logged every 10 seconds. It does not start in this process
        again until it ends.

        Args:
            name: the name of the lease: 1 to 100 printable ASCII characters without a space. All
                processes that register this name compete, whatever their functions do.
            fn: a coroutine function or a plain function. A plain function runs in its own thread
                and cannot be cancelled. It must check `lease.is_held` or call `lease.expect_held()`
                before each step.
            restart: "on_error": after an error, the lease is released. This process waits for the
                lease again after a delay, which doubles from 1 up to 30 seconds. "never": this
                process does not wait again. Default "on_error".
            candidate: whether this process may run the function. Default True.

        Raises:
            ConfigError: the name is already registered or not allowed, or a value is not allowed.
            ClientStateError: the client runs.
        """
        if self.is_running:
            raise ClientStateError("singletons are registered before the client runs")
        self._singleton_registry.add_singleton(Singleton(name, fn, restart, candidate))

    def leader_only(self, name: str, fn: LeaderFn) -> None:
        """Register a function that runs while this client is the leader of its domain. The function
        needs no lease besides the leader's.

        `await fn(term)` begins soon after the client became leader. It is cancelled once when the
        term, the client's time as leader, ends. Each transaction that writes begins with `await
        term.fence(connection)`. A function that returns does not run again in this term. A function
        that raises runs again after a delay of 1 to 8 seconds. While a function ignores its
        cancellation, this client does not become leader again.

        Args:
            name: the name of the function in the log: 1 to 100 printable ASCII characters without a
                space.
            fn: a coroutine function; gets the term.

        Raises:
            ConfigError: the name is already registered or not allowed, or `fn` is no coroutine
                function.
            ClientStateError: the client runs.
        """
        if self.is_running:
            raise ClientStateError("leader functions are registered before the client runs")
        self._singleton_registry.add_leader_function(LeaderFunction(name, fn))

    @asynccontextmanager
    async def lease(self, name: str, *, wait: timedelta | None = None) -> AsyncGenerator[Lease]:
        """Run an `async with` block under a lease: `async with client.lease("stream-7") as lease:`.
        The client waits for the lease, renews it during the block, and releases it. The block is
        cancelled when the lease is lost.

        Args:
            name: the name of the lease: 1 to 100 printable ASCII characters without a space. A
                singleton of this name competes for the same lease.
            wait: how long to wait. Zero: try once. Default None: without limit.

        Raises:
            LeaseLostError: the lease was lost before the block ended.
            TimeoutError: the client did not acquire the lease within `wait`.
            ConfigError: the name, `wait` or `Config.leader_ttl` is not allowed.
            SchemaMissingError: the migration line `riverpy` is not applied; the error text has the
                command.
            ClientStateError: the client is not open, or is closed during the block.
            Exception: one of DATABASE_ERRORS, when the client first uses leases.
        """
        validate_lease_name(name)
        validate_wait(wait)
        self._get_open_pool()
        engine = await self._lease_engine.open()
        async with engine.hold(name, wait=wait) as lease:
            yield lease

    @cached_property
    def _singleton_registry(self) -> SingletonRegistry:
        return SingletonRegistry()

    @cached_property
    def _lease_engine(self) -> ClientLeaseEngine:
        return ClientLeaseEngine(self._make_lease_engine)

    def _make_lease_engine(self, unfinished_leases: list[Lease]) -> LeaseEngine:
        config, holder = self._config, self.id
        if self._database is None:
            raise ConfigError('give the client a database: Client("postgres://…")')
        if config.leader_ttl > LEASE_TTL_MAX:
            raise ConfigError(
                f"leader_ttl must be {LEASE_TTL_MAX} or less for leases and singletons, got "
                f"{config.leader_ttl}"
            )
        return LeaseEngine(
            UserLeaseTable(
                self._database,
                schema=config.schema,
                holder=holder,
                pooler=config.pooler,
                password=self._password,
            ),
            holder=holder,
            timing=LeaseTiming.from_config(config),
            timer=Timer(),
            max_held=config.max_leases,
            unfinished_leases=unfinished_leases,
            publish_event=self._subscription_manager.publish_event,
            should_spread=config.spread_leases,
        )
