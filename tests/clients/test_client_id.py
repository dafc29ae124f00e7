"""Two clients with one configured id: which of them runs, and whose jobs are whose (FR-08)."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import ClientIdInUseError, Job
from riverpy._log_events import CLIENT_ID_ALREADY_REGISTERED, CLIENT_ID_LOST, WORKER_STARTED
from riverpy._postgres.clients import client_list_candidates, default_domain_get_election_status
from riverpy._postgres.domains import domain_list_members
from riverpy._tools.reads import read_clients
from riverpy.migrate import Migrator
from tests.cli.worker_process import running_worker
from tests.work.rig import PATIENCE, Task, errors_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.cli.worker_process import WorkerProcess
    from tests.work.rig import Rig

JOBS = """
import asyncio, os, pathlib
from datetime import timedelta
from typing import ClassVar
import msgspec, riverpy

workers = riverpy.Workers()


class Task(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "task"


@workers.job(timeout=None)
async def task(job: riverpy.Job[Task]) -> None:
    print("began", job.id, job.attempt, flush=True)
    while not pathlib.Path("release").exists():
        await asyncio.sleep(0.02)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=2)},
    config=riverpy.Config(
        schema=os.environ["MY_SCHEMA"], id="worker-1", leader_domain=os.environ.get("MY_DOMAIN")
    ),
)
"""


def worker_of(
    rig: Rig, directory: Path, *args: str, **environ: str
) -> AbstractAsyncContextManager[WorkerProcess]:
    """A worker process with the id `worker-1`."""
    arguments = ("jobs:client", "--database-url", rig.url, *args)
    return running_worker(directory, *arguments, code=JOBS, MY_SCHEMA=rig.schema.name, **environ)


async def working_one_job(rig: Rig, worker: WorkerProcess) -> None:
    """Let it work one job, which ends when there is a file `release`."""
    await worker.until_logged(WORKER_STARTED)
    await rig.insert_rows(1)
    await worker.until_printed("began 1 1")


def texts(worker: WorkerProcess) -> str:
    """What it wrote to stderr that is no log line."""
    return "\n".join(entry["text"] for entry in worker.logged if "text" in entry)


@pytest.mark.parametrize("how", ["side by side", "rolling", "of a domain"])
async def test_second_refuses(rig: Rig, tmp_path: Path, how: str) -> None:
    """A worker does not start beside another one with its id that is alive, also if that is
    stopping and waits for its job. It names the id, and since when the other one runs. The job
    runs once (FR-08)."""
    environ = {"MY_DOMAIN": "mail"} if how == "of a domain" else {}
    async with worker_of(rig, tmp_path, **environ) as first:
        await working_one_job(rig, first)
        since = await rig.schema.fetchval("SELECT started_at FROM riverpy_client")
        if how == "rolling":
            first.send(signal.SIGTERM)
        async with worker_of(rig, tmp_path, **environ) as second:
            assert await second.exit_code() == 2
            assert not second.entries(
                CLIENT_ID_ALREADY_REGISTERED
            )  # that the other's process runs is known
        assert "'worker-1' is in use" in texts(second)
        assert f"{since:%Y-%m-%dT%H:%M:%S}" in texts(second)
        assert not second.printed
        (tmp_path / "release").touch()
        await rig.until_state("completed")
        if how != "rolling":
            first.send(signal.SIGTERM)
        assert await first.exit_code() == 0
        async with worker_of(rig, tmp_path, **environ) as third:
            await third.until_logged(WORKER_STARTED)
            assert not third.entries(CLIENT_ID_ALREADY_REGISTERED)
    row = await rig.row(1)
    assert (row["attempt"], row["errors"]) == (1, None)
    assert first.printed == ["began 1 1"]


async def test_after_a_crash(rig: Rig, tmp_path: Path) -> None:
    """A worker that was killed is known to be gone on its machine: the next one under its id starts
    at once, and runs its job again (FR-08)."""
    async with worker_of(rig, tmp_path) as first:
        await working_one_job(rig, first)
        first.send(signal.SIGKILL)
        await first.exit_code()
        async with worker_of(rig, tmp_path) as second:
            await second.until_printed("began 1 2")
            assert not second.entries(CLIENT_ID_ALREADY_REGISTERED)
    assert len(errors_of(await rig.row(1))) == 1


async def test_wakes_after_its_successor(rig: Rig, tmp_path: Path) -> None:
    """A worker that was stopped for longer than `dead_after`, and finds that another has registered
    under its id, stops, says so, and touches neither the row nor the jobs of that one (FR-08)."""
    began = asyncio.Event()

    @rig.job(timeout=None)
    async def work(job: Job[Task]) -> None:
        began.set()
        await rig.release.wait()

    silent = "SELECT count(*) FROM riverpy_client WHERE heartbeat_at < now() - interval '1.5 s'"
    async with worker_of(rig, tmp_path, "--dead-after=1s") as first:
        await working_one_job(rig, first)
        first.send(signal.SIGSTOP)
        await rig.until(silent, 1)
        async with rig.working(id="worker-1", dead_after=timedelta(seconds=1)):
            with anyio.fail_after(PATIENCE):
                await began.wait()
            before = await rig.schema.fetchrow("SELECT * FROM river_job")
            started = await rig.schema.fetchval("SELECT started_at FROM riverpy_client")
            first.send(signal.SIGCONT)
            await first.until_logged(CLIENT_ID_LOST)
            assert await first.exit_code() == 2
            assert "'worker-1' is in use" in texts(first)
            assert await rig.schema.fetchrow("SELECT * FROM river_job") == before
            now = await rig.schema.fetchval("SELECT started_at FROM riverpy_client")
            assert now == started
            rig.release.set()
            await rig.until_state("completed")
    assert (await rig.row(1))["attempt"] == 2


async def test_two_clients_of_one_process(rig: Rig, log: list[Any]) -> None:
    """Of two clients with one id in one process the second does not start; when the first has ended
    it does at once, also if it could not take back its registration (FR-08)."""
    rig.register_task()
    async with rig.working(id="me"):
        with pytest.RaisesGroup(ClientIdInUseError, allow_unwrapped=True, flatten_subgroups=True):
            async with rig.working(id="me"):
                pass
        await rig.schema.execute("CREATE TEMP TABLE kept AS SELECT * FROM riverpy_client")
    await rig.schema.execute("INSERT INTO riverpy_client SELECT * FROM kept; DROP TABLE kept")
    async with rig.working(id="me") as client:
        await rig.work(client, Task())
    assert CLIENT_ID_ALREADY_REGISTERED not in {entry["event"] for entry in log}


@pytest.mark.parametrize("is_alive", [True, False])
async def test_client_of_another_machine(rig: Rig, log: list[Any], is_alive: bool) -> None:
    """Where it cannot be known whether a process has ended, its heartbeat decides: the start waits,
    and says so, until it changes, or until it has not changed for `dead_after` (FR-08)."""
    rig.register_task()
    await rig.schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, process)"
        " VALUES ('me', '{}', '{}', true, false, '1', '1.2 s', 'elsewhere 1 1')"
    )

    async def beat() -> None:
        while is_alive:
            await rig.schema.execute("UPDATE riverpy_client SET heartbeat_at = clock_timestamp()")
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        try:
            async with rig.working(id="me", dead_after=timedelta(seconds=1)) as client:
                assert not is_alive
                await rig.work(client, Task())
        except* ClientIdInUseError:
            assert is_alive
        tasks.cancel_scope.cancel()
    (entry,) = [entry for entry in log if entry["event"] == CLIENT_ID_ALREADY_REGISTERED]
    assert (entry["client_id"], entry["seconds"]) == ("me", 1.2)


@pytest.mark.parametrize("version", [6, 7])
async def test_stopping(rig: Rig, version: int) -> None:
    """From the begin of its stop on, before its lease is free, a client that waits for its jobs is
    no candidate for the lead. Where the database lacks version 7 it counts as one, and all else
    works: also that it says how many slots it has."""
    migrator = Migrator(rig.url, schema=rig.schema.name, line="riverpy")
    if version == 6:
        await migrator.down(target=6)
    began = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        began.set()
        await rig.release.wait()

    async with rig.working(id="me") as client, rig.schema.connected() as connection:
        await client.insert(Task())
        await began.wait()
        await rig.until("SELECT slots FROM riverpy_client", [20])
        leads = "SELECT count(*) FROM river_leader WHERE expires_at > now()"
        await rig.until(leads, 1)
        client.stop()
        await rig.until(leads, 0)
        look = await default_domain_get_election_status(connection, rig.schema.name)
        candidates = await client_list_candidates(connection, rig.schema.name, domain="default")
        (member,) = await domain_list_members(connection, rig.schema.name)
        (row,) = await read_clients(connection, rig.schema.name, limit=1)
        rig.release.set()
    await migrator.up()  # for the next test that has this schema
    is_candidate = version == 6
    assert look.has_riverpy_candidate is is_candidate
    assert [one.client_id for one in candidates] == (["me"] if is_candidate else [])
    assert (member.is_candidate, member.is_stopping) == (is_candidate, not is_candidate)
    assert (row.is_candidate, row.is_stopping) == (is_candidate, not is_candidate)
