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
from riverpy._leases.timing import LeaseTiming, validate_wait_argument
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
        the function wait. When the process that runs it releases or loses the lease, another
        process runs it.

        `await fn(lease)` begins when this process has acquired the lease. When the lease is lost or
        the client stops, `fn` is cancelled once, so that it can await its cleanup. Writes are
        always safe if each transaction begins with `await lease.fence(connection)`. If the function
        returns, another process that waits for the lease runs it. This process does not run it
        again until the client is started again. If a function ignores its cancellation for a fifth
        of `Config.leader_ttl`, this is logged every 10 seconds. Until that call of the function has
        ended, this process does not start the function again.

        Args:
            name: the name of the lease: 1 to 100 printable ASCII characters without a space. All
                processes that register this name compete for the lease, even if their functions
                differ.
            fn: a coroutine function or a plain function. A plain function runs in its own thread
                and cannot be cancelled. It must check `lease.is_held` or call `lease.expect_held()`
                before each step.
            restart: "on_error": after an error, the lease is released. This process waits for the
                lease again after a delay, which doubles from 1 up to 30 seconds. "never": this
                process does not wait again. Default "on_error".
            candidate: whether this process may run the function. Default True.

        Raises:
            ConfigError: the name is already registered or not allowed, or a value is not allowed.
            ClientStateError: the client is running.
        """
        if self.is_running:
            raise ClientStateError("singletons are registered before the client runs")
        self._singleton_registry.add_singleton(Singleton(name, fn, restart, candidate))

    def leader_only(self, name: str, fn: LeaderFn) -> None:
        """Register a function that runs while this client is the leader of its domain. The function
        needs no lease of its own.

        `await fn(term)` begins soon after the client has become leader. A term is the time during
        which the client is the leader. When the term ends, the function is cancelled once. Each
        transaction that writes must begin with `await term.fence(connection)`. If the function
        returns, it does not run again in this term. If it raises, it runs again after a delay of 1
        to 8 seconds. While a function ignores its cancellation, this client does not become leader
        again.

        Args:
            name: the name of the function in the log: 1 to 100 printable ASCII characters without a
                space.
            fn: a coroutine function. It receives the term.

        Raises:
            ConfigError: the name is already registered or not allowed, or `fn` is not a coroutine
                function.
            ClientStateError: the client is running.
        """
        if self.is_running:
            raise ClientStateError("leader functions are registered before the client runs")
        self._singleton_registry.add_leader_function(LeaderFunction(name, fn))

    @asynccontextmanager
    async def lease(self, name: str, *, wait: timedelta | None = None) -> AsyncGenerator[Lease]:
        """Hold a lease during an `async with` block: `async with client.lease("stream-7") as lease:
        …`. The client waits for the lease, renews it during the block, and releases it at the end.
        If the lease is lost, the block is cancelled.

        Args:
            name: the name of the lease: 1 to 100 printable ASCII characters without a space. A
                singleton with this name competes for the same lease.
            wait: how long to wait for the lease. Zero: try once. Default None: no limit.

        Raises:
            LeaseLostError: the lease was lost before the block ended.
            TimeoutError: the client did not acquire the lease within `wait`.
            ConfigError: the name, `wait` or `Config.leader_ttl` is not allowed.
            SchemaMissingError: the migration line `riverpy` is not applied. The error text contains
                the command that applies it.
            ClientStateError: the client is not open, or is closed during the block.
            Exception: one of DATABASE_ERRORS, when the client uses a lease for the first time.
        """
        validate_lease_name(name)
        validate_wait_argument(wait)
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

    def _make_lease_engine(self, leases_with_running_work: list[Lease]) -> LeaseEngine:
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
            leases_with_running_work=leases_with_running_work,
            publish_event=self._subscription_manager.publish_event,
            should_spread=config.spread_leases,
        )
