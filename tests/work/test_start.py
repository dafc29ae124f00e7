"""Starting: what prevents a start, and a stop at each step of the start."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from itertools import cycle
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
from riverpy import QueueConfig, Workers
from riverpy._log_events import NOTIFICATIONS_NOT_RECEIVED
from riverpy._work.reconciler import Reconciler
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.kit.proxy import Proxy
    from tests.work.rig import Rig

NAMES = ["riverpy", "riverpy reserved", "riverpy claims", "riverpy results", "riverpy listener"]
NO_CONNECTION = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name ~ '^riverpy'"
)


@pytest.fixture(autouse=True)
def worker(rig: Rig) -> None:
    """Register a worker of kind `task`."""
    rig.register_task()


async def stop_when_held(rig: Rig, proxy: Proxy, name: str, step: int, how: str) -> bool:
    """Start a client, and stop it when its `step`-th answer is held back. Returns False if the
    start was complete before that."""
    client = rig.client(url=proxy.url, hard_stop_timeout=timedelta(milliseconds=300))
    proxy.hold(name, after=step)
    up = anyio.Event()

    async def run(*, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
        await client.run(task_status=task_status)

    async def start(tasks: Any) -> None:
        await tasks.start(run)
        up.set()

    before = asyncio.all_tasks()
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start, tasks)
            held, started = (
                asyncio.get_running_loop().create_task(event.wait()) for event in (proxy.held, up)
            )
            await asyncio.wait([held, started], return_when=asyncio.FIRST_COMPLETED)
            was_held = not up.is_set()
            held.cancel()
            started.cancel()
            await asyncio.wait([held, started])
            if how == "cancel":
                tasks.cancel_scope.cancel()
            else:
                client.stop_and_cancel()
    await proxy.release()
    assert not client.is_running
    assert not client.is_open
    left = asyncio.all_tasks() - before
    assert not {task for task in left if "Proxy" not in repr(task)}
    return was_held


@pytest.mark.parametrize("name", NAMES)
async def test_stop_at_each_step(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If the database stops answering at any step of the start, a stop (at even steps) or a
    cancellation (at odd steps) ends the client soon, without an error, and leaves no task and no
    connection (SC-19)."""
    monkeypatch.setattr("riverpy._postgres.notifier.PROBE_TIMEOUT", 0.3)
    ways = cycle(["stop_and_cancel", "cancel"])
    async with proxied(rig.url) as proxy:
        steps = 0
        while await stop_when_held(rig, proxy, name, steps, next(ways)):
            steps += 1
            await rig.until(NO_CONNECTION, 0)
        assert steps >= 1
    gc.collect()  # an open connection would cause a warning


async def test_stop_before_the_start(rig: Rig) -> None:
    """A stop at the very start of a run ends it before it claims."""
    await rig.insert_rows(1)
    client = rig.client()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.run)
        while not client.is_running:
            await asyncio.sleep(0)
        client.stop()
    assert await rig.states() == {"available": 1}


async def test_stop_right_after_the_start(rig: Rig) -> None:
    """A stop a few turns of the loop after the start ends the run, and no row is left running."""
    await rig.insert_rows(100)
    for turns in range(0, 60, 6):
        client = rig.client(slots=5)
        async with client, anyio.create_task_group() as tasks:
            await tasks.start(client.run)
            for _ in range(turns):
                await asyncio.sleep(0)
            client.stop()
    states = await rig.states()
    assert set(states) <= {"available", "completed"}


async def test_refused_by_the_database(rig: Rig) -> None:
    """An error of the start is raised by `run` and `working`, without a password."""
    url = "postgresql://nobody:hunter2@127.0.0.1:1/none"
    for attempt in ("run", "working"):
        client = rig.client(url=url)
        with pytest.raises(OSError) as caught:  # noqa: PT012
            if attempt == "run":
                await client.run()
            else:
                async with client, client.working():
                    pass
        assert "hunter2" not in str(caught.value)
        assert not client.is_running


async def test_schema_is_missing(rig: Rig) -> None:
    """A database without River's tables is refused with the command that creates them."""
    empty = f"{rig.schema.name}_empty"
    await rig.schema.execute(f"CREATE SCHEMA {empty}")
    with pytest.raises(riverpy.SchemaMissingError, match="riverpy migrate up"):
        await rig.client(schema=empty).run()
    await rig.schema.execute(f"DROP SCHEMA {empty}")
    await rig.until(NO_CONNECTION, 0)


async def test_service_that_cannot_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a service during its start is the error of the start."""

    async def broken(*args: Any) -> None:
        raise asyncpg.InsufficientPrivilegeError("permission denied for table river_queue")

    monkeypatch.setattr(Reconciler, "_update_queue_rows", broken)
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="river_queue"):
        await rig.client().run()
    await rig.until(NO_CONNECTION, 0)


async def test_nothing_to_work(rig: Rig) -> None:
    """A client without queues or workers, or with only a pool, cannot work, and the error says
    why."""
    with pytest.raises(riverpy.ConfigError, match="no queue"):
        await rig.client(queues={}).run()
    with pytest.raises(riverpy.ConfigError, match="no worker"):
        await rig.client(workers=Workers()).run()
    with pytest.raises(riverpy.ConfigError, match="needs workers"):
        riverpy.Client(rig.url, queues={"default": QueueConfig()})
    async with asyncpg.create_pool(rig.url, min_size=0) as pool:
        client = riverpy.Client(pool, workers=rig.workers, queues={"default": QueueConfig()})
        with pytest.raises(riverpy.ConfigError, match="URL"):
            await client.run()


async def test_listener_that_hears_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, log: list[dict[str, Any]]
) -> None:
    """A listener that receives no probe is logged with the likely reason, and jobs are polled."""
    monkeypatch.setattr("riverpy._postgres.notifier.PROBE_TIMEOUT", 0.1)
    async with proxied(rig.url) as proxy:
        client = rig.client(
            url=rig.url, fetch_poll_interval=timedelta(milliseconds=20), listen_url=proxy.url
        )
        monkeypatch.setattr("riverpy._postgres.notifier.Notifier._receive_probe", lambda *_: None)
        async with rig.running(client):
            await rig.insert_rows(1)
            await rig.event()
    (warning,) = [entry for entry in log if entry["event"] == NOTIFICATIONS_NOT_RECEIVED]
    assert "pooler=True" in warning["advice"]


async def test_slow_database(rig: Rig) -> None:
    """A start during an outage fails. The same client starts when the database is back."""
    client_events: list[str] = []
    async with proxied(rig.url) as proxy:
        proxy.refusing = True
        client = rig.client(url=proxy.url)
        with pytest.raises((OSError, asyncpg.PostgresError)):
            await client.run()
        proxy.refusing = False
        async with rig.running(client):
            await client.insert(Task())
            client_events.append((await rig.event()).kind)
    assert client_events == ["job_completed"]
