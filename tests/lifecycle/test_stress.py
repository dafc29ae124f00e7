"""Services that are started and stopped at random moments: all end, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Client, Config, QueueConfig, Workers
from riverpy._lifecycle import ServiceGroup
from riverpy._work.stop import StopTimeouts
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._work.run import ClientRun
    from tests._database import Schema

pytestmark = pytest.mark.timeout(300)
CYCLES = 150
PER_CYCLE = 30.0
"""Seconds after which a cycle counts as hanging."""


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """Register a worker of kind `task`."""
    rig = Rig(schema)

    @rig.job
    async def work(job: Any) -> None:
        await asyncio.sleep(0)

    return rig


@pytest.fixture
def seeded() -> random.Random:
    """Return a source of random numbers. pytest shows its seed when the test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def new_run(rig: Rig) -> ClientRun:
    """Return the parts of a client, not started."""
    config = Config(schema=rig.schema.name, id="stress", hard_stop_timeout=timedelta(seconds=1))
    queues = {"default": QueueConfig(max_workers=5)}
    return Client(rig.url, workers=rig.workers, queues=queues, config=config)._make_client_run()


async def random_moment(rng: random.Random) -> None:
    """Wait for a few turns of the loop, or up to 5 milliseconds."""
    if rng.random() < 0.5:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(rng.random() * 0.005)


@asynccontextmanager
async def nothing_left(rig: Rig) -> AsyncGenerator[None]:
    """Check that no task and no connection is left after the block."""
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() == before
    await rig.until(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name ~ '^riverpy'",
        0,
    )


@pytest.mark.parametrize(
    "name", ["notifier", "producer", "leader election", "reconciler", "completer"]
)
async def test_each_service(rig: Rig, seeded: random.Random, name: str) -> None:
    """Each single service is stopped or cancelled at a random moment of its start or work, and its
    connections are kept (SC-01, SC-19)."""
    async with nothing_left(rig):
        run = new_run(rig)
        await run._open_connections()
        for _ in range(CYCLES):
            parts = new_run(rig)
            for part in ("claims", "results", "reserved"):
                connection = getattr(parts._connections, part)
                connection._connection = getattr(run._connections, part)._connection
                connection._was_connected = True
            with anyio.fail_after(PER_CYCLE):
                await one_cycle(parts, name, seeded)
            for part in ("claims", "results", "reserved"):
                used = getattr(parts._connections, part)._connection
                getattr(run._connections, part)._connection = used
        await run._connections.close()


async def one_cycle(parts: ClientRun, name: str, rng: random.Random) -> None:
    """Start the service, wait for a moment, stop it."""
    cancel = rng.random() < 0.3
    assert parts._election_manager is not None
    services: dict[str, Any] = {
        "leader election": parts._election_manager.elections[0],
        "notifier": parts._make_notifier(),
        "producer": parts.producers["default"],
        "reconciler": parts._reconciler,
    }
    with anyio.CancelScope() as scope:
        async with AsyncExitStack() as stack:
            if name == "completer":
                await stack.enter_async_context(
                    parts._completer.storing_results(
                        StopTimeouts(None, timedelta(seconds=1)).wait_until_results_stored
                    )
                )
            else:
                group = await stack.enter_async_context(ServiceGroup())
                asyncio.get_running_loop().call_later(
                    rng.random() * 0.01, scope.cancel if cancel else lambda: None
                )
                await group.start(services[name])
            await random_moment(rng)
            if cancel:
                scope.cancel()
                await asyncio.sleep(0)


async def test_whole_clients(rig: Rig, seeded: random.Random) -> None:
    """Whole clients are stopped, stopped hard or cancelled at random moments of their start and
    work. Each ends in time, and no row stays running (SC-01, SC-19)."""
    workers: Workers = rig.workers
    async with nothing_left(rig):
        for cycle in range(CYCLES):
            client: Client = rig.client(workers=workers, soft_stop_timeout=timedelta(seconds=1))
            if cycle % 10 == 0:
                await rig.insert_rows(20)
            with anyio.fail_after(PER_CYCLE):
                await one_run(client, seeded)
            assert not client.is_running
        states = await rig.states()
        assert set(states) <= {"available", "completed"}, states
        async with rig.working():
            await rig.until_state("completed", sum(states.values()))


async def one_run(client: Client, rng: random.Random) -> None:
    """Run a client and end it at a random moment, in a random way."""
    end = rng.choice(["stop", "stop_and_cancel", "cancel", "leave"])
    if end == "leave":
        async with client, client.working():
            await client.insert(Task())
            await random_moment(rng)
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.run)
        await random_moment(rng)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.03)
        if end == "cancel":
            tasks.cancel_scope.cancel()
        while not client.is_running and end != "cancel":
            await asyncio.sleep(0)
        client.stop() if end == "stop" else client.stop_and_cancel()
