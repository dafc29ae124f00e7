"""Workers and followers in processes of their own, which are killed and frozen."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Client, Config, EventKind, FleetEventKind, InsertManyParams, RawArgs
from tests.cli.worker_process import RIVERPY, WorkerProcess, environment, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema

PATIENCE = 60.0
JOBS = """
import asyncio
from pathlib import Path

import riverpy

workers = riverpy.Workers()


class Count(dict):
    kind = "count"


@workers.job
async def count(job: riverpy.Job[Count]) -> None:
    job.progress(1, 2)
    await job.save_output([1])
    while job.args["wait"] and not Path("release").exists():
        await asyncio.sleep(0.01)


client = riverpy.Client(workers=workers, queues={"default": riverpy.QueueConfig(max_workers=50)})
"""


@asynccontextmanager
async def following(schema: Schema, directory: Path, *args: str) -> AsyncGenerator[WorkerProcess]:
    """Run `riverpy events --fleet`. Kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        RIVERPY,
        *("events", "--fleet", "--json", "--schema", schema.name, *args),
        cwd=directory,
        env=environment(DATABASE_URL=schema.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    follower = WorkerProcess(process)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.read(process.stdout, follower.printed.append))
        tasks.create_task(follower.read(process.stderr, follower.take_log))
        try:
            await follower._until(lambda: bool(follower.logged), "note that it follows")
            yield follower
        finally:
            if process.returncode is None:
                process.kill()


def events_of(follower: WorkerProcess) -> list[dict[str, Any]]:
    """Return the events that a command has printed."""
    return [json.loads(line) for line in follower.printed]


async def insert(client: Client, count: int = 1, **args: Any) -> list[int]:
    """Insert jobs, and return their ids."""
    raw = RawArgs("count", json.dumps({"wait": False, **args}))
    results = await client.insert_many([InsertManyParams(raw) for _ in range(count)])
    return [one.job.id for one in results]


@pytest.mark.timeout(180)
async def test_killed_and_frozen_processes(schema: Schema, tmp_path: Path) -> None:
    """The command follows two workers, with its filters, and ends on Ctrl-C. A follower that is
    killed, and one that is frozen, disturb no job and no other follower. After the kill of a worker
    the events of the other arrive, and a hundred watches in this process see all their jobs end."""
    options = "-q", "default:50", "--schema", schema.name
    environ = {"DATABASE_URL": schema.url}
    async with (
        asyncio.timeout(2 * PATIENCE),
        running_worker(tmp_path, "jobs", *options, "--name=a", code=JOBS, **environ) as worker,
        running_worker(tmp_path, "jobs", *options, "--name=b", code=JOBS, **environ) as other,
        following(schema, tmp_path) as follower,
        following(schema, tmp_path, "--event", "job_completed", "--kind", "count") as filtered,
        following(schema, tmp_path) as killed,
        following(schema, tmp_path) as frozen,
        Client(schema.url, config=Config(schema=schema.name)) as client,
        client.subscribe(*EventKind, *FleetEventKind, fleet=True) as events,
    ):

        def senders() -> set[str]:
            return {one.get("client", "").partition(":")[0] for one in events_of(follower)}

        while senders() < {"a", "b"}:  # both have started, and have heard of the follower
            await insert(client, 20)
            await asyncio.sleep(0.1)
        frozen.send(signal.SIGSTOP)
        killed.send(signal.SIGKILL)
        waiting_ids = await insert(client, 10, wait=True)
        watches = [client.watch(job_id) for job_id in waiting_ids for _ in range(10)]
        for watch in watches:
            async for change in watch:
                if change.output is not None:
                    assert change.job.state == "running"
                    break
        worker.send(signal.SIGKILL)
        await schema.execute(
            "UPDATE river_job SET state = 'available' WHERE state = 'running'"
            " AND attempted_by[array_upper(attempted_by, 1)] LIKE 'a:%'"
        )
        (tmp_path / "release").touch()
        await insert(client)  # wakes the other worker

        async def find_end(watch: Any) -> str:
            return [change.job.state async for change in watch][-1]

        ends = await asyncio.gather(*map(find_end, watches))
        assert set(ends) == {"completed"}
        kinds = set[str]()
        while not kinds >= {"job_started", "job_progress", "job_output_saved", "job_completed"}:
            kinds.add((await anext(events)).kind)
        await filtered._until(lambda: bool(filtered.printed), "event")
        assert {(one["event"], one["kind"]) for one in events_of(filtered)} == {
            ("job_completed", "count")
        }
        follower.send(signal.SIGINT)
        assert await follower.exit_code() == 0
        frozen.send(signal.SIGCONT)
        other.send(signal.SIGTERM)
        assert await other.exit_code() == 0
