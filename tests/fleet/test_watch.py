"""Watches: the changes of one job, from its present state to its end."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import (
    ArgsError,
    AttemptLostError,
    Client,
    ClientStateError,
    Config,
    ConfigError,
    Job,
    JobChange,
    JobChangeKind,
    JobState,
    JobWatch,
    NotFoundError,
)
from riverpy._fleet import follower
from tests._statements import record_statements
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATIENCE = 30.0


@pytest.fixture
async def watcher(rig: Rig) -> AsyncGenerator[Client]:
    """Yield an open client that works no jobs."""
    async with Client(rig.url, config=Config(schema=rig.schema.name)) as client:
        yield client


async def test_states_progress_and_output(
    rig: Rig, watcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch yields the present row, then each change of state, progress and output, and ends
    after the final state, by notifications alone. A watch of an ended job has one item."""
    monkeypatch.setattr(follower, "WATCHED_JOB_POLL_INTERVAL", 600.0)
    steps = [asyncio.Event() for _ in range(3)]

    @rig.job
    async def work(job: Job[Task]) -> None:
        await steps[0].wait()
        job.progress(1, 2, "half")
        await steps[1].wait()
        await job.save_output({"rows": 1})
        await steps[2].wait()
        await job.save_output({"rows": 2})

    found: list[tuple[JobChangeKind, JobState, Any, Any]] = []
    async with asyncio.timeout(PATIENCE), rig.working() as worker:
        await worker.queue_pause("default")
        inserted = await watcher.insert(Task())
        changes = watcher.watch(inserted.job.id)
        first = await anext(changes)
        assert (first.kind, first.job.state) == (JobChangeKind.PRESENT, JobState.AVAILABLE)
        await watcher._fleet_follower.wait_until_wanted_events_announced()
        await worker.queue_resume("default")
        async for change in changes:
            done = None if change.progress is None else change.progress.done
            found.append((change.kind, change.job.state, done, change.output))
            if change.job.state is JobState.RUNNING:
                steps[len(found) - 1].set()
        [only] = [change async for change in watcher.watch(inserted.job.id)]
    assert found[:3] == [
        (JobChangeKind.STATE, JobState.RUNNING, None, None),
        (JobChangeKind.PROGRESS, JobState.RUNNING, 1, None),
        (JobChangeKind.OUTPUT, JobState.RUNNING, 1, {"rows": 1}),
    ]
    assert found[-1] == (JobChangeKind.STATE, JobState.COMPLETED, 1, {"rows": 2})
    assert (only.kind, only.output) == (JobChangeKind.PRESENT, {"rows": 2})


async def test_polling(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without notifications, as for a worker of River in Go, the row is read each second: a snooze,
    a new attempt in the same state, and the end. What one read finds is one item: the end of this
    job, with its last progress and output. A deleted row raises."""
    monkeypatch.setattr(follower, "WATCHED_JOB_POLL_INTERVAL", 0.02)
    await rig.insert_rows(2)
    update = "UPDATE river_job SET state = $1::text::river_job_state, attempt = $2 WHERE id = 1"
    metadata = '{"output": [1], "riverpy:progress": {"done": 2, "total": 4}}'
    final = (
        "UPDATE river_job SET state = 'discarded', finalized_at = now(), metadata = $1::jsonb"
        " WHERE id = 1"
    )
    async with (
        asyncio.timeout(PATIENCE),
        Client(rig.url, config=Config(schema=rig.schema.name, poll_only=True)) as client,
    ):
        changes, deleted = client.watch(1), client.watch(2)
        assert [(await anext(one)).kind for one in (changes, deleted)] == ["present", "present"]
        kinds: list[str] = []
        for state, attempt in (("running", 1), ("running", 2), ("scheduled", 1)):
            await rig.schema.execute(update, state, attempt)
            kinds.append((await anext(changes)).kind)
        assert kinds == ["state", "attempt", "state"]
        await rig.schema.execute(final, metadata)
        [end] = [one async for one in changes]
        assert (end.kind, end.job.state, end.output) == ("state", "discarded", [1])
        assert str(end.progress) == "2 of 4 (50 %)"
        await rig.schema.execute("DELETE FROM river_job WHERE id = 2")
        with pytest.raises(NotFoundError, match="there is no job 2"):
            await anext(deleted)
        with pytest.raises(NotFoundError):
            await anext(client.watch(404))
        with pytest.raises(ConfigError, match="poll_only"):
            client.subscribe("job_failed", fleet=True)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="whole number"):
            client.watch("1")  # type: ignore[arg-type]


async def test_many_watches(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred watches share one connection that listens, and one statement that reads all their
    jobs. Watches of the same job each get its row. A watch that its reader has left, or whose task
    was cancelled, is forgotten, and the client then announces that it follows nothing."""
    monkeypatch.setattr(follower, "UNUSED_FOLLOWER_TIMEOUT", 0.0)
    sent = record_statements(monkeypatch)
    await rig.insert_rows(50)
    done = "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id <> 50"

    async with (
        asyncio.timeout(PATIENCE),
        Client(rig.url, config=Config(schema=rig.schema.name)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        watches = [
            tasks.create_task(collect(client.watch(1 + number % 50))) for number in range(100)
        ]
        async for _ in client.watch(50):
            break
        while len(client._fleet_follower._readers_by_id) < 50:
            await asyncio.sleep(0)
        await client._fleet_follower.wait_until_wanted_events_announced()
        before = len(sent)
        await rig.schema.execute(done)
        for task in watches[:49] + watches[50:99]:
            changes = await task
            assert changes[-1].job.state is JobState.COMPLETED
        reads = [one for one in sent[before:] if "watched_id" in one.text]
        assert len(reads) <= 5, reads
        listeners = {one.connection for one in sent if "LISTEN" in one.text}
        assert listeners <= {"riverpy listener"}
        for task in watches[49], watches[99]:
            task.cancel()
        del watches, task, changes
        while client._fleet_follower._task.is_running:
            gc.collect()
            await asyncio.sleep(0.01)
        assert not client._fleet_follower._readers_by_id


async def collect(changes: JobWatch) -> list[JobChange]:
    """Return the changes until the end of a watch."""
    return [change async for change in changes]


async def test_client_that_closes(rig: Rig) -> None:
    """A watch raises when its client closes, when it is not open, and when two tasks read it. A
    reader that ends its watch gets no more changes, also in another task."""
    await rig.insert_rows(1)
    client = Client(rig.url, config=Config(schema=rig.schema.name))
    async with asyncio.timeout(PATIENCE):
        async with client:
            waiting, ended = client.watch(1), client.watch(1)
            for one in (waiting, ended):
                await anext(one)
            loop = asyncio.get_running_loop()
            after_close = loop.create_task(waiting.__anext__())
            after_end = loop.create_task(collect(ended))
            await asyncio.sleep(0)
            with pytest.raises(ClientStateError, match="once for each reader"):
                await anext(ended)
            await ended.aclose()
            assert await after_end == []
        with pytest.raises(ClientStateError, match="was closed"):
            await after_close
        with pytest.raises(ClientStateError, match="not open"):
            await anext(client.watch(1))


async def test_save_output(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls at the same time the newest value is stored, with two statements. A value without a
    JSON form is refused. The attempt that was lost is told so. The output of a failed attempt
    stays."""
    results: dict[str, object] = {}

    @rig.job
    async def work(job: Job[Task]) -> None:
        with pytest.raises(ArgsError):
            await job.save_output(object())
        await asyncio.gather(*(job.save_output(number) for number in range(20)))
        results["stored"] = await rig.schema.fetchval(
            "SELECT metadata->'output' FROM river_job WHERE id = $1", job.id
        )
        with pytest.raises(ClientStateError, match="only in an async job"):
            await asyncio.to_thread(job.save_output, 1)
        await rig.schema.execute("UPDATE river_job SET attempt = 7 WHERE id = $1", job.id)
        try:
            await job.save_output("late")
        except AttemptLostError as error:
            results["error"] = error
        await rig.schema.execute("UPDATE river_job SET attempt = 1 WHERE id = $1", job.id)
        await job.save_output("last")
        raise ValueError("fails")

    sent = record_statements(monkeypatch)
    row = await rig.run_one_on_pool()
    saves = [one for one in sent if "from waiting" in one.text]
    assert results["stored"] == "19"
    assert isinstance(results["error"], AttemptLostError)
    assert row["state"] != "completed"
    assert '"output": "last"' in row["metadata"]
    assert len(saves) == 4  # two of the calls at the same time, one that was late, and the last


async def test_blocking_job(rig: Rig) -> None:
    """A blocking job cannot use save_output, and the error says what to use."""

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        with pytest.raises(ClientStateError, match="only in an async job"):
            job.save_output(1)

    assert (await rig.run_one())["state"] == "completed"
