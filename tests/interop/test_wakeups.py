"""Notifications that wake an idle worker of one language when the other inserts, pauses and
resumes, and their loss."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED
from tests.interop.callers import both_callers
from tests.interop.conform import conform
from tests.interop.river_go import RiverGo
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from pathlib import Path

    from tests._database import Schema, SchemaPool
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
NOTIFICATION_TIMEOUT = 5.0
"""Seconds within which a worker that polls every hour must take a job."""
QUEUES = {"a": 5, "b": 5}
NAMES = {"go": "go work", "python": "riverpy%"}
"""The names of a worker's connections."""
LISTENS = {True: "(LISTEN|UNLISTEN)%", False: "%"}
"""The last statement of its listener, and of any other connection."""
KILL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE $1 AND query SIMILAR TO $2
    AND pid <> pg_backend_pid()
"""


async def works(worker: Worker, caller: Caller, queue: str) -> None:
    """Check that the worker takes at once what the other language inserts."""
    async with asyncio.timeout(NOTIFICATION_TIMEOUT):
        job = await caller.insert(conform(queue=queue))
        await worker.until("job_completed", id=job["id"])


@EITHER
async def test_inserts(
    language: str,
    callers: Callers,
    fleet: Fleet,
    go_binary: Path,
    schema_pool: SchemaPool,
    rig: Rig,
) -> None:
    """An idle worker takes what the other language inserts, into each of its queues, and nothing of
    another schema's queue of the same name (CF-031, notification_only_wakeups)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, queues=QUEUES) as worker, schema_pool.schema() as elsewhere:
        go_there = RiverGo(go_binary, elsewhere.url, elsewhere.name)
        async with both_callers(go_there, elsewhere) as callers_there:
            for there in callers_there.values():
                await there.insert_many(conform(queue="a"), conform(queue="a"))
        for queue in QUEUES:
            await works(worker, caller, queue)
        assert await rig.states() == {"completed": 2}
        waiting = "SELECT count(*) FROM river_job WHERE state = 'available' AND attempt = 0"
        assert await elsewhere.fetchval(waiting) == 4


@EITHER
async def test_pause(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A queue that the other language pauses stands still, also for a worker that starts later,
    until it is resumed; other queues continue (CF-032, pause_resume_notification)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, queues=QUEUES) as worker:
        await caller.pause("a")
        assert (await caller.queue_get("a"))["paused_at"] is not None
        await worker.until("queue_paused", queue="a")
        waiting = await caller.insert(conform(queue="a"))
        await works(worker, caller, "b")
        async with fleet.worker(language, queues=QUEUES) as later:
            await works_either(worker, later, caller)
            row = await caller.get(waiting["id"])
            assert (row["state"], row["attempt"]) == ("available", 0)
        async with asyncio.timeout(NOTIFICATION_TIMEOUT):
            await caller.resume("a")
            await worker.until("job_completed", id=waiting["id"])
    assert (await caller.get(waiting["id"]))["attempted_at"] >= (await caller.queue_get("a"))[
        "updated_at"
    ]


async def works_either(one: Worker, other: Worker, caller: Caller) -> None:
    """One of two workers takes a job."""
    job = await caller.insert(conform(queue="b"))
    for _ in range(500):
        if (await caller.get(job["id"]))["state"] == "completed":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("none of the two has worked it")


@EITHER
async def test_events_of_queues(language: str, callers: Callers, fleet: Fleet) -> None:
    """A subscriber gets one event for each change of a queue, and none where nothing changes
    (CF-033, remote_queue_subscription_events)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, queues=QUEUES) as worker:

        async def change(how: str, name: str) -> None:
            await getattr(caller, how)(name)

        for how in ("pause", "pause", "resume", "resume"):
            await change(how, "a")
        await worker.until("queue_paused", queue="a")
        await worker.until("queue_resumed", queue="a")
        for how in ("pause", "pause", "resume", "resume"):
            await change(how, "*")
        for event in ("queue_paused", "queue_resumed"):
            for queue in QUEUES:
                await worker.until(event, queue=queue)
        await works(worker, caller, "b")  # what was sent before has come
        assert [*worker.passed("queue_paused"), *worker.passed("queue_resumed")] == []


@EITHER
async def test_no_notification(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A row that no client was notified of is found by the next poll, and before it when any insert
    notifies its queue (CF-034, lost_notification_poll_recovery)."""
    rows = [{"queue": "quick"}, {"queue": "slow"}]
    async with (
        fleet.worker(language, queues={"quick": 1}, poll=0.25) as quick,
        fleet.worker(language, queues={"slow": 2}) as slow,
    ):
        await works(slow, callers[OTHER[language]], "slow")  # its first poll is over
        await asyncio.sleep(0.5)
        for row in rows:
            await rig.insert_rows(1, kind="conform", **row)
        async with asyncio.timeout(2):
            await quick.until("job_completed")
        await asyncio.sleep(2)
        assert await rig.states() == {"available": 1, "completed": 2}
        await callers[OTHER[language]].insert(conform(queue="slow"))
        for _ in range(2):
            await slow.until("job_completed", attempt=1)


@EITHER
async def test_connections_are_killed(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A worker whose listening connection, or whose every connection, is killed listens again
    within 10 s; a running job ends as if nothing had been; riverpy logs each break once
    (CF-035, listener_backend_disconnect_reconnect)."""
    caller = callers[OTHER[language]]
    with capture_logs() as log:
        async with fleet.worker(language, queues=QUEUES) as worker:
            running = await caller.insert(conform("signal", message="end", queue="a"))
            await worker.until("job_started", id=running["id"])
            for number, listener_alone in enumerate((True, False, False), 1):
                await schema.execute(KILL, NAMES[language], LISTENS[listener_alone])
                async with asyncio.timeout(10):
                    await until_awake(worker, caller)
                    while language == "python" and logged(log, CONNECTION_RESTORED) < number:
                        await asyncio.sleep(0.01)
                await works(worker, caller, "b")
            worker.release("end")
            await worker.until("job_completed", id=running["id"], attempt=1)
    assert worker.passed("job_started", id=running["id"]) == []
    if language == "python":
        # A backend that the server ends when the others are back already is a break of its own.
        assert 3 <= logged(log, CONNECTION_LOST) == logged(log, CONNECTION_RESTORED) <= 5


def logged(log: list[Any], event: str) -> int:
    """How often this was logged above debug."""
    return sum(entry["event"] == event and entry["log_level"] != "debug" for entry in log)


async def until_awake(worker: Worker, caller: Caller) -> None:
    """Insert again and again, until the worker is notified of it."""
    while True:
        job = await caller.insert(conform(queue="b"))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await worker.until("job_completed", id=job["id"])
                return
