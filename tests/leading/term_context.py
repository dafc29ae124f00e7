"""HeldTerm: the context of a term's services, with a held term on a real schema."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio.lowlevel

from riverpy import Config, Workers
from riverpy._clock import Timer
from riverpy._leading.leader_stores import LeaderRowStore
from riverpy._leading.queue_scope import ALL_QUEUES
from riverpy._leading.term_context import TermContext
from riverpy._leading.term_fence import TermFence
from riverpy._leases.lease import Lease
from riverpy._leases.timing import LeaseTiming
from riverpy._lifecycle import StopScope
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.connection import (
    ConnectionOutageTracker,
    DedicatedConnection,
    close_connections,
    connect_for_maintenance,
)
from riverpy._postgres.leaders import leader_elect

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator

    from riverpy._leading.queue_scope import QueueScope
    from riverpy._maintenance.base import MaintenanceService
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.leases import LeaseAcquireResult
    from tests._database import Schema

TTL = timedelta(days=30)


class QuickTimer(Timer):
    """A timer without waiting: a sleep returns at once, and a wait lasts until its event."""

    def __init__(self) -> None:
        self.skipped = 0.0
        """Seconds that `seconds_since_boot` is ahead."""
        self.sleeps: list[float] = []
        self.waits: list[float] = []

    def seconds_since_boot(self) -> float:
        return super().seconds_since_boot() + self.skipped

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await anyio.lowlevel.checkpoint()

    async def wait_for_event(self, event: asyncio.Event, timeout: float) -> bool:
        self.waits.append(timeout)
        await event.wait()
        return True


class StillTimer(QuickTimer):
    """Time that a test advances."""

    def seconds_since_boot(self) -> float:
        return self.skipped


class HeldTerm:
    """A term context, and operations on its term. `timer` and `lease` are those of `context`."""

    def __init__(self, schema: Schema, leader_id: str, timer: Timer) -> None:
        self.schema = schema
        self.leader_id = leader_id
        self.timer = timer
        self.context: TermContext
        self.lease: Lease
        self.term: LeaseAcquireResult
        """The answer of the database that granted the lease."""
        self.store: LeaderRowStore
        self.scope: QueueScope = ALL_QUEUES
        """The queue scope that the context returns."""

    async def run(self, service: MaintenanceService, scope: StopScope | None = None) -> float:
        """Run one pass of a service."""
        return await service.run_once(scope or StopScope())

    async def take_over(self) -> None:
        """Let another client hold the row. This process is not notified."""
        await self.schema.execute(
            "UPDATE river_leader SET leader_id = 'another', elected_at = now(),"
            " expires_at = now() + interval '1 hour'"
        )

    def pass_deadline(self) -> None:
        """Let the local deadline pass. The row does not change."""
        self.lease.extend(attempted_at=float("-inf"))

    def renew(self) -> None:
        """Move the local deadline as after a renewal."""
        self.lease.extend(attempted_at=self.timer.seconds_since_boot())

    @property
    def is_refused(self) -> bool:
        """Whether the database has refused a write, which ended the term."""
        return self.lease.cause is not None and not self.lease.may_be_held

    async def _ask_scope(self) -> QueueScope:
        return self.scope

    async def _connect(self) -> Connection:
        return await connect_for_maintenance(
            self.schema.url, f"context {self.leader_id}", through_pooler=False
        )


@asynccontextmanager
async def held_term(
    schema: Schema,
    *,
    leader_id: str = "leader",
    workers: Workers | None = None,
    timer: Timer | None = None,
    term: LeaseAcquireResult | None = None,
    **settings: Any,
) -> AsyncGenerator[HeldTerm]:
    """A context whose term is held for a month, with these settings of Config.

    `TermContext.all_services_started` is set. The default timer is a QuickTimer. With the `term` of
    another HeldTerm, both processes and the server treat it as their own.
    """
    held = HeldTerm(schema, leader_id, timer or QuickTimer())
    async with AsyncExitStack() as stack:
        outage = ConnectionOutageTracker()
        connections = [
            DedicatedConnection(name, held._connect, outage) for name in ("maintenance", "cleaning")
        ]
        stack.push_async_callback(close_connections, connections)
        held.store = LeaderRowStore(connections[0], schema.name, leader_id=leader_id, ttl=TTL)
        held.term = term or await _elected(schema, leader_id)
        held.lease = lease_of(held, TTL.total_seconds())
        held.context = TermContext(
            fence=TermFence(held.lease),
            config=Config(schema=schema.name, **settings),
            workers=workers or Workers(),
            connection=connections[0],
            long_statement_connection=connections[1],
            timer=held.timer,
            open_direct_connection=None,
            read_queue_scope=held._ask_scope,
        )
        held.context.all_services_started.set()
        yield held


def lease_of(held: HeldTerm, ttl: float, timer: Timer | None = None) -> Lease:
    """Return a lease of the same term that lasts this many seconds."""
    timer = timer or held.timer
    return Lease(
        DEFAULT_DOMAIN,
        held.term,
        attempted_at=timer.seconds_since_boot(),
        store=held.store,
        timing=LeaseTiming(ttl=ttl, attempt_interval=min(ttl / 3, 5.0)),
        timer=timer,
    )


async def _elected(schema: Schema, leader_id: str) -> LeaseAcquireResult:
    async with schema.connected() as connection:
        answer = await leader_elect(connection, schema.name, leader_id=leader_id, ttl=TTL)
    assert answer is not None
    assert answer.is_granted, f"{answer.holder} leads"
    return answer
