"""A real rebuild that is interrupted in a real `riverpy worker`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import INDEX_ARTIFACT_DROPPED
from tests.cli.worker_process import running_worker
from tests.maintenance.reindexing import artifacts, snapshot, until_building, until_no_artifacts

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

JOBS = """
from __future__ import annotations

from datetime import timedelta

import riverpy


workers = riverpy.Workers()


@workers.job(kind="idle")
async def idle(job: riverpy.Job[dict]) -> None:
    pass


class Every:
    def __init__(self, interval: timedelta) -> None:
        self._interval = interval

    def next(self, after):
        return after + self._interval


def client_that_reindexes(interval: timedelta) -> riverpy.Client:
    return riverpy.Client(
        workers=workers,
        queues={"default": riverpy.QueueConfig(max_workers=1)},
        config=riverpy.Config(
            elect_interval=timedelta(seconds=0.5),
            leader_ttl=timedelta(minutes=10),
            reindexer_index_names=["river_job_kind"],
            reindexer_schedule=Every(interval),
        ),
    )


soon = client_that_reindexes(timedelta(milliseconds=1))
later = client_that_reindexes(timedelta(days=1))
"""


def worker_of(
    schema: Schema, tmp_path: Path, client: str
) -> AbstractAsyncContextManager[WorkerProcess]:
    """A worker of this schema that is the leader and rebuilds indexes `soon` or `later`."""
    where = (f"--database-url={schema.url}", f"--schema={schema.name}")
    return running_worker(tmp_path, f"jobs:{client}", *where, code=JOBS)


async def until_rebuilding(schema: Schema) -> None:
    """Wait until the worker's rebuild waits for the test's snapshot."""
    await until_building(schema, "waiting for old snapshots")
    assert await artifacts(schema) == ["river_job_kind_ccnew"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal(schema: Schema, tmp_path: Path, number: signal.Signals) -> None:
    """A process that is asked to stop during a rebuild drops what is left of it, and ends well."""
    async with snapshot(schema), worker_of(schema, tmp_path, "soon") as worker:
        await until_rebuilding(schema)
        worker.send(number)
        assert await worker.exit_code() == 0
        assert await artifacts(schema) == []
    (entry,) = worker.entries(INDEX_ARTIFACT_DROPPED)
    assert entry["index"] == "river_job_kind_ccnew"


async def test_lost_lease(schema: Schema, tmp_path: Path) -> None:
    """A process that loses its lease during a rebuild drops what is left of it, and works on."""
    async with snapshot(schema), worker_of(schema, tmp_path, "soon") as worker:
        await until_rebuilding(schema)
        await schema.execute(
            "UPDATE river_leader SET leader_id = 'another', elected_at = now(),"
            " expires_at = now() + interval '1 hour'"
        )
        await until_no_artifacts(schema)
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_killed(schema: Schema, tmp_path: Path) -> None:
    """The next leader drops, at the start of its term, the index that a killed process left half
    built."""
    async with snapshot(schema):
        async with worker_of(schema, tmp_path, "soon") as worker:
            await until_rebuilding(schema)
            worker.send(signal.SIGKILL)
            await worker.exit_code()
        await schema.execute("DELETE FROM river_leader")  # its lease lapses
        async with worker_of(schema, tmp_path, "later") as worker:
            await until_no_artifacts(schema)
            await worker.until_logged(INDEX_ARTIFACT_DROPPED)
