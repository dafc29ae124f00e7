"""Queues as both languages read and control them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.callers import NotThere, Refused
from tests.interop.conform import conform
from tests.interop.notifications import notifications
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import Row
    from tests.interop.working import Fleet
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)


async def same_queue(callers: Callers, name: str) -> Row:
    """Check that both languages read the queue alike, alone and in their lists, and return it."""
    queue = await callers["go"].queue_get(name)
    for caller in callers.values():
        assert await caller.queue_get(name) == queue
        assert queue in await caller.queue_list()
    return queue


@EITHER
async def test_create_and_change(
    language: str, callers: Callers, fleet: Fleet, schema: Schema
) -> None:
    """Both languages read alike, ordered by name, the queues that a client of one language creates
    at its start, and the metadata that the other writes (CF-027, differential_queue_crud)."""
    other = callers[OTHER[language]]
    metadata = {"owner": {"name": "<é>"}, "limits": [1, 2.5, None]}
    async with (
        fleet.worker(language, queues={"one": 1, "default": 1, "a|b": 1}),
        notifications(schema) as sent,
    ):
        lists = [await caller.queue_list() for caller in callers.values()]
        assert lists[0] == lists[1]
        assert [queue["name"] for queue in lists[0]] == ["a|b", "default", "one"]
        before = await same_queue(callers, "default")
        assert (before["metadata"], before["paused_at"]) == ({}, None)
        updated = await other.queue_update("default", metadata)
        after = await same_queue(callers, "default")
        assert after == updated
        assert (after["metadata"], after["created_at"]) == (metadata, before["created_at"])
        assert after["updated_at"] > before["updated_at"]
        changed = {"action": "metadata_changed", "metadata": metadata, "queue": "default"}
        assert await sent.take() == [("river_control", changed)]


@EITHER
async def test_names(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """Control of an unknown queue raises "not found", whatever its name. Control of all queues
    where there is none returns nothing. An insert into a queue with an invalid name is refused
    (CF-028, queue_names_and_unknown_queue_control)."""
    caller = callers[language]
    for name in ("no_such", "no such", "n" * 129):
        for call in (caller.pause, caller.resume, caller.queue_get):
            with pytest.raises(NotThere):
                await call(name)
        with pytest.raises(NotThere):
            await caller.queue_update(name, {"a": 1})
    await caller.pause("*")
    await caller.resume("*")
    assert await caller.queue_list() == []
    for name in ("a b", "x.y", "A", "a__b", "-a"):
        with pytest.raises(Refused):
            await caller.insert(conform(queue=name))
    assert await rig.states() == {}

    name = "tenant|emails"
    async with fleet.worker(OTHER[language], queues={name: 1}) as worker:
        job = await caller.insert(conform(queue=name))
        await worker.until("job_completed", id=job["id"])
        await caller.pause(name)
        await worker.until("queue_paused", queue=name)
        assert (await same_queue(callers, name))["paused_at"] is not None


@EITHER
async def test_queues_of_a_running_client(
    language: str, callers: Callers, fleet: Fleet, schema: Schema, rig: Rig
) -> None:
    """A running client adds a queue with one slot, gives it two slots, and removes it. Then only
    other clients work it. A queue that is there is not added, one that is not there is not removed,
    and 0 slots are refused, each with an error of its own. No change sends a notification (CF-029,
    dynamic_queue_add_reconfigure_remove)."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language) as worker, notifications(schema) as sent:
        assert await worker.add_queue("extra", 0) not in {"", "QueueAlreadyAddedError"}
        assert await worker.add_queue("extra", 1) == ""
        assert await worker.add_queue("extra", 1) == "QueueAlreadyAddedError"
        assert await worker.remove_queue("other") == "QueueNotFoundError"
        assert await sent.take() == []
        job = await caller.insert(conform(queue="extra"))
        await worker.until("job_completed", id=job["id"])
        assert await worker.resize_queue("extra", 2) == ""
        for _ in range(2):
            await caller.insert(conform("signal", message="go", queue="extra"))
        await rig.until_state("running", 2)
        worker.release("go")
        await rig.until_state("completed", 3)

        await sent.take()
        assert await worker.remove_queue("extra") == ""
        assert await sent.take() == []
        left = await caller.insert(conform(queue="extra"))
        marker = await caller.insert(conform())
        await worker.until("job_completed", id=marker["id"])
        assert (await rig.row(left["id"]))["state"] == "available"
        assert await schema.fetchval("SELECT count(*) FROM river_queue WHERE name = 'extra'") == 1
        async with fleet.worker(OTHER[language], queues={"extra": 1}) as other:
            await other.until("job_completed", id=left["id"])


@EITHER
async def test_queue_removed_while_it_works(
    language: str, callers: Callers, fleet: Fleet, rig: Rig
) -> None:
    """The removal of a queue waits for its running jobs. After its timeout they keep running, and a
    stop of the client ends them as usual. The queue can be added again, and is still paused if it
    was (CF-105). Go removes the queue only with a second call, after its jobs have ended."""
    caller = callers[OTHER[language]]
    async with fleet.worker(language, queues={"default": 5, "extra": 1}) as worker:
        for message in ("first", "second"):
            job = await caller.insert(conform("signal", message=message, queue="extra"))
            await worker.until("job_started", id=job["id"])
            later = await caller.insert(conform(queue="extra"))
            assert await worker.remove_queue("extra", 0.2) == "timeout"
            assert (await rig.row(job["id"]))["state"] == "running"
            assert (await rig.row(later["id"]))["state"] == "available"
            if message == "first":
                worker.release(message)
                await worker.until("job_completed", id=job["id"])
                if language == "go":
                    assert await worker.remove_queue("extra") == ""
                await caller.pause("extra")
                assert await worker.add_queue("extra", 1) == ""
                marker = await caller.insert(conform())
                await worker.until("job_completed", id=marker["id"])
                assert (await rig.row(later["id"]))["state"] == "available"
                await caller.resume("extra")
                await worker.until("job_completed", id=later["id"])
        worker.stop()
        worker.release("second")
        await worker.until("job_completed", id=job["id"])
        await worker.stopped()
    assert (await rig.row(job["id"]))["state"] == "completed"
