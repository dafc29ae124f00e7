"""The client of the workers of `scripts/chaos leases`: `riverpy worker
tests.kit.lease_chaos_worker:client`.

It holds leases directly, runs singletons and takes part in the election of a domain. In each term
it records that its lease is valid, and writes through the fence. Under leases it writes even if the
lease is no longer valid locally, like code that has not noticed the loss, until the fence refuses.
As a control it also writes without the fence, after a check of the lease.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import asyncpg
import msgspec

import riverpy
from riverpy._leases.timing import LeaseTiming
from riverpy._maintenance import base
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._work import elections as candidacy
from tests.kit.fleet import SETTINGS_VARIABLE, end_with_the_fleet
from tests.kit.lease_chaos import DisabledProtection, LeaseChaosSettings
from tests.kit.lease_history import STATEMENTS, Note

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from anyio.abc import TaskGroup

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

LOOK_INTERVAL = 0.03
WRITE_INTERVAL = 0.05
RETRY = 0.1
HOLD_MAX = 0.3
"""Maximum seconds between the fence and the commit of a transaction, or between the check of the
lease and an unfenced write, so that faults hit some of them."""
KEPT = 6.0
"""Lease times for which a lease is usually held before it is released."""

settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=LeaseChaosSettings)
TTL = timedelta(seconds=settings.leader_ttl)
INTERVAL = timedelta(seconds=settings.elect_interval)
PROCESS = f"{settings.name}:{os.getpid()}"
DATABASE_URL = sys.argv[sys.argv.index("--database-url") + 1]
notes = os.open(settings.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
numbers = count(1)
workers = riverpy.Workers()
usual_services = candidacy.make_domain_services
# Even a short term makes a pass.
base.FIRST_RUN_DELAY_MAX = min(base.FIRST_RUN_DELAY_MAX, settings.leader_ttl / 15)


class Nothing(msgspec.Struct, frozen=True):
    """A job that is never inserted. A worker needs at least one kind."""

    kind: ClassVar[str] = "nothing"


@workers.job
async def nothing(_job: riverpy.Job[Nothing]) -> None:
    """Do nothing; this job is never worked."""


def note(what: str, lease: str, epoch: int, *, at: float | None = None, number: int = 0) -> None:
    """Append a record to the file and sync it."""
    line = Note(at or time.time(), what, PROCESS, lease, epoch, number)
    os.write(notes, msgspec.json.encode(line) + b"\n")


async def write(
    connection: asyncpg.Connection, lease: str, epoch: int, number: int, *, is_fenced: bool = True
) -> None:
    """Write a row under a term."""
    await connection.execute(STATEMENTS["write"], lease, is_fenced, epoch, PROCESS, number)


@asynccontextmanager
async def connected() -> AsyncGenerator[asyncpg.Connection]:
    """Open a connection for the writes."""
    connection = await asyncpg.connect(DATABASE_URL, timeout=5, command_timeout=10)
    try:
        yield connection
    finally:
        connection.terminate()


class HeldLongError(Exception):
    """A singleton ran for a while and leaves its lease to another process."""


class Holding:
    """The work under one term of a lease."""

    def __init__(self, lease: riverpy.Lease) -> None:
        self._lease = lease
        self._term = f"s:{lease.name}", lease.epoch
        self._fence = lease.fence_statement
        self._is_over = False

    async def run(self, late: TaskGroup) -> None:
        """Write until the lease is lost, or for a while."""
        late.start_soon(self._again, self._write_fenced)
        try:
            with anyio.move_on_after(random.expovariate(1 / (KEPT * settings.leader_ttl))):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._again, self._write_unfenced)
                    while True:
                        self._look()
                        await anyio.sleep(LOOK_INTERVAL)
        finally:
            self._is_over = True

    def _look(self) -> None:
        """Read the time before the validity of the lease, since the process may be frozen between
        the two."""
        at = time.time()
        if self._lease.is_held:
            note("held", *self._term, at=at)

    async def _again(self, write: Callable[[asyncpg.Connection], Awaitable[bool]]) -> None:
        while True:
            try:
                async with connected() as connection:
                    while await write(connection):
                        await anyio.sleep(WRITE_INTERVAL)
                return
            except DATABASE_ERRORS:
                await anyio.sleep(RETRY)

    async def _write_fenced(self, connection: asyncpg.Connection) -> bool:
        number = next(numbers)
        async with connection.transaction():
            if settings.broken is not DisabledProtection.FENCE:
                if not await connection.fetchval(self._fence):
                    note("refused", *self._term)
                    return False
            elif self._is_over and not self._lease.is_held and random.random() < 0.1:
                return False
            await anyio.sleep(random.random() ** 3 * HOLD_MAX)
            await write(connection, *self._term, number)
        note("wrote", *self._term, number=number)
        return True

    async def _write_unfenced(self, connection: asyncpg.Connection) -> bool:
        if self._lease.is_held:
            await anyio.sleep(random.random() ** 3 * HOLD_MAX)
            await write(connection, *self._term, next(numbers), is_fenced=False)
        return True


class LeadWriter(base.MaintenanceService):
    """Writes in each term as leader of the domain."""

    name = "lead writer"
    _began_at: float

    async def _run_once_and_log_errors(self, scope: StopScope) -> float:
        """Read the time before the validity of the term, since the process may be frozen between
        the two."""
        self._began_at = time.time()
        return await super()._run_once_and_log_errors(scope)

    async def run_once(self, scope: StopScope) -> float:
        """Record that the term is valid, and write one row."""
        fence = self.context.fence
        term = f"d:{settings.domain}", fence.lease.epoch
        note("held", *term, at=self._began_at)
        number = next(numbers)
        async with fence.transaction(self.context.connection, "a write of the lead") as connection:
            await anyio.sleep(random.random() ** 3 * HOLD_MAX)
            await write(connection, *term, number)
        note("wrote", *term, number=number)
        return WRITE_INTERVAL


def with_lead_writer(context: TermContext, *arguments: Any) -> list[base.MaintenanceService]:
    """Return the services of a term and one more."""
    return [*usual_services(context, *arguments), LeadWriter(context)]


async def hold_again(manager: riverpy.LeaseManager, name: str, late: TaskGroup) -> None:
    """Wait for the lease, hold it, release or lose it, and repeat."""
    while True:
        try:
            async with manager.hold(name) as lease:
                await Holding(lease).run(late)
        except (riverpy.LeaseLostError, *DATABASE_ERRORS):
            await anyio.sleep(RETRY)


async def hold_all(late: TaskGroup) -> None:
    """Wait for the database, then acquire every lease."""
    while True:
        try:
            async with (
                riverpy.LeaseManager(DATABASE_URL, ttl=TTL, renew_interval=INTERVAL) as manager,
                anyio.create_task_group() as tasks,
            ):
                note("up", "", 0)
                for name in settings.leases:
                    tasks.start_soon(hold_again, manager, name, late)
        except DATABASE_ERRORS:
            await anyio.sleep(RETRY)


candidacy.make_domain_services = with_lead_writer


def make_client(late: TaskGroup) -> riverpy.Client:
    """Create the client from the settings."""
    domain = settings.domain
    made = riverpy.Client(
        workers=workers,
        queues={domain: riverpy.QueueConfig(max_workers=1)},
        config=riverpy.Config(
            elect_interval=INTERVAL,
            leader_ttl=TTL,
            leader_domain=domain,
            dead_after=timedelta(seconds=settings.dead_after),
        ),
    )

    async def run(lease: riverpy.Lease) -> None:
        await Holding(lease).run(late)
        raise HeldLongError

    for name in settings.singletons:
        made.singleton(name, run)
    return made


@asynccontextmanager
async def client() -> AsyncGenerator[riverpy.Client]:
    """Yield the client, and hold leases directly beside it."""
    end_with_the_fleet()
    if settings.broken is DisabledProtection.MARGIN:
        LeaseTiming.validity_seconds = property(lambda self: 2 * self.ttl)
    async with anyio.create_task_group() as late:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold_all, late)
            yield make_client(late)
            tasks.cancel_scope.cancel()
        late.cancel_scope.cancel()
