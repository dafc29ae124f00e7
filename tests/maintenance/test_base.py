"""What every maintenance service does around its passes, and what its end leaves."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._lifecycle import ServiceGroup, StopCause, StopScope
from riverpy._log_events import (
    CONNECTION_LOST,
    CONNECTION_RESTORED,
    MAINTENANCE_RUN_FAILED,
    MAINTENANCE_RUN_SUCCEEDED_AGAIN,
)
from riverpy._maintenance.base import FIRST_RUN_DELAY_MAX, MaintenanceService
from riverpy._postgres.leaders import leader_resign
from riverpy.errors import FencedOutError
from tests._time import VirtualTimer, settle
from tests.maintenance.fakes import (
    TIMING,
    FakeService,
    HookError,
    context_without_database,
    lease_of,
    term,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._lifecycle import Service
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

INTERVAL = 30.0
"""From one pass of a FakeService to the next."""


@asynccontextmanager
async def hosted(service: Service, scope: StopScope | None = None) -> AsyncGenerator[None]:
    """Run a service beside the block; at the end of the block stop it, or wait for its stop."""
    own = scope or StopScope()

    async def host() -> None:
        with own:
            async with ServiceGroup(own) as group:
                await group.start(service)
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host)
        yield
        own.stop(StopCause.CLIENT_STOP)


class Shop:
    """One service on virtual time, in a context without a database."""

    def __init__(self, **settings: Any) -> None:
        self.timer = VirtualTimer()
        self.lease = lease_of(term(1), self.timer)
        self.context = context_without_database(self.timer, self.lease)
        self.service = FakeService(self.context, **settings)
        self._host: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the service; the context is up at once."""
        self._host = asyncio.create_task(self._run())
        self.context.all_services_started.set()
        await settle()

    async def close(self) -> None:
        """End it."""
        if self._host is not None:
            self._host.cancel()
            await asyncio.gather(self._host, return_exceptions=True)

    async def _run(self) -> None:
        async with hosted(self.service):
            await anyio.sleep_forever()

    def renew(self) -> None:
        """The term is renewed."""
        self.lease.extend(attempted_at=self.timer.seconds_since_boot())

    async def advance(self, seconds: float) -> None:
        """Move time on, in which the term is renewed."""
        while seconds > 0:
            step = min(seconds, 5.0)
            self.renew()
            await self.timer.advance(step)
            seconds -= step
        self.renew()


@pytest.fixture
async def shop() -> AsyncGenerator[Shop]:
    """A service that is not started."""
    shop = Shop()
    yield shop
    await shop.close()


async def test_passes_at_its_interval(shop: Shop) -> None:
    """The first pass comes within the stagger, each other after the delay that the one before
    asked for."""
    await shop.open()
    assert shop.service.passes == 0
    await shop.advance(FIRST_RUN_DELAY_MAX)
    assert shop.service.passes == 1
    await shop.advance(INTERVAL - 0.01 - FIRST_RUN_DELAY_MAX)
    assert shop.service.passes == 1
    await shop.advance(FIRST_RUN_DELAY_MAX + 0.01)
    assert shop.service.passes == 2


async def test_stagger() -> None:
    """The services of one term begin at moments of their own, all within a second."""
    timer = VirtualTimer()
    context = context_without_database(timer, lease_of(term(1), timer))
    services = [FakeService(context, str(number)) for number in range(50)]
    begun: list[int] = []
    async with ServiceGroup() as group:
        for service in services:
            await group.start(service)
        context.all_services_started.set()
        await settle()
        assert [service.passes for service in services] == [0] * 50
        for _ in range(10):
            await timer.advance(FIRST_RUN_DELAY_MAX / 10)
            begun.append(sum(service.passes for service in services))
    assert begun[-1] == 50
    assert len(set(begun)) > 3


async def test_stir(shop: Shop) -> None:
    """A service that is stirred makes its next pass at once; stirred during a pass, right after
    it."""
    await shop.open()
    await shop.advance(FIRST_RUN_DELAY_MAX)
    shop.service.wake()
    shop.service.wake()
    await settle()
    assert shop.service.passes == 2
    shop.service.during_pass = shop.service.wake
    shop.service.wake()
    await settle()
    assert shop.service.passes == 4


async def test_failing_passes(shop: Shop, log: list[dict[str, object]]) -> None:
    """Passes that fail for hours are tried again every few seconds and for ever, with one warning;
    the first that succeeds ends the outage (LM-09)."""
    shop.service.pass_error = ConnectionRefusedError("no database")
    await shop.open()
    await shop.advance(3600)
    assert shop.service.passes > 3600 / 9
    shop.service.pass_error = None
    before = shop.service.passes
    await shop.advance(9)
    assert shop.service.passes == before + 1
    await shop.advance(100)
    shop.service.pass_error = ConnectionRefusedError("no database again")
    await shop.advance(100)
    events = [(entry["log_level"], entry["event"]) for entry in log]
    assert [event for event in events if event[0] != "debug"] == [
        ("warning", MAINTENANCE_RUN_FAILED),
        ("info", MAINTENANCE_RUN_SUCCEEDED_AGAIN),
        ("warning", MAINTENANCE_RUN_FAILED),
    ]


async def test_failing_passes_of_a_known_outage(shop: Shop, log: list[dict[str, object]]) -> None:
    """While it is told that connections are lost, passes that fail for it say nothing; one that
    fails for longer than that does."""
    outage = shop.service.context.connection.outage_tracker
    outage.record_loss("claims", ConnectionRefusedError("no database"))
    shop.service.pass_error = ConnectionRefusedError("no database")
    await shop.open()
    await shop.advance(100)
    outage.record_success("claims")
    await shop.advance(100)
    assert [entry["event"] for entry in log if entry["log_level"] != "debug"] == [
        CONNECTION_LOST,
        CONNECTION_RESTORED,
        MAINTENANCE_RUN_FAILED,
    ]


async def test_faults_in_passes(shop: Shop, log: list[dict[str, object]]) -> None:
    """A fault in a pass ends neither the service nor the term. It is logged with its traceback,
    and again when it is another one."""
    await shop.open()
    for error in (HookError("one"), ConnectionResetError("outage"), KeyError("two")):
        shop.service.pass_error = error
        await shop.advance(60)
    shop.service.pass_error = None
    before = shop.service.passes
    await shop.advance(60)
    assert shop.service.passes > before
    told = [(entry["log_level"], entry.get("exc_info")) for entry in log]
    levels = [(level, type(error)) for level, error in told if level in {"error", "warning"}]
    assert levels == [("error", HookError), ("warning", type(None)), ("error", KeyError)]


async def test_fenced_out(shop: Shop, log: list[dict[str, object]]) -> None:
    """A pass that is refused because the term is over is no failure: nothing is logged here,
    because the leader election logs it."""
    shop.service.pass_error = FencedOutError("another process leads")
    await shop.open()
    await shop.advance(10)
    assert shop.service.passes > 1
    assert log == []


async def test_frozen_process_begins_nothing(shop: Shop) -> None:
    """A process that was frozen for longer than its trust begins no pass when it goes on (P20)."""
    await shop.open()
    await shop.advance(FIRST_RUN_DELAY_MAX)
    assert shop.service.passes == 1
    await shop.timer.stall(INTERVAL + TIMING.validity_seconds)
    await shop.timer.advance(60)
    assert shop.service.passes == 1


async def test_frozen_before_its_first_pass(shop: Shop) -> None:
    """A process that was frozen while its services started begins none of them."""
    await shop.open()
    await shop.timer.stall(TIMING.validity_seconds)
    await shop.timer.advance(60)
    assert shop.service.passes == 0


class Sleeper(MaintenanceService):
    """A service whose pass holds a row and a statement of the server."""

    name = "sleeper"

    async def run_once(self, scope: StopScope) -> float:
        context = self.context
        async with context.fence.transaction(
            context.long_statement_connection, "sleeping"
        ) as connection:
            await connection.execute("SELECT pg_sleep(60)")
        return 60.0


ASLEEP = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND query = 'SELECT pg_sleep(60)' AND state = 'active'"
    " AND application_name = 'context ' || $1"
)


async def test_end_of_a_pass_in_flight(
    held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When maintenance has ended no statement of it goes on, however long the pass would have
    taken, and nothing holds up the release of the lease (LM-16)."""
    monkeypatch.setattr("riverpy._leading.term_fence.ROLLBACK_TIMEOUT", 10.0)  # on a busy machine
    context = held.context
    scope = StopScope()
    async with schema.connected() as other:
        async with hosted(Sleeper(context), scope):
            while not await other.fetchval(ASLEEP, held.leader_id):
                await asyncio.sleep(0.01)
            scope.stop(StopCause.LEADERSHIP_LOST)
        assert await other.fetchval(ASLEEP, held.leader_id) == 0
        await other.execute("SET lock_timeout = '1ms'")
        assert await leader_resign(
            other, schema.name, leader_id=held.term.holder, elected_at=held.term.acquired_at
        )
    busy = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name = 'context ' || $1 AND state <> 'idle'"
        " AND datname = current_database()"
    )
    while await schema.fetchval(busy, held.leader_id):  # a closed session takes a moment to go
        await asyncio.sleep(0.01)
