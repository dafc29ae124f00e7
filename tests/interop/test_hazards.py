"""Effects of a leader and workers of one language on the jobs of the other, and the protections
against them."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from riverpy import EventKind, InsertOpts, Job, QueueConfig, RawArgs, UniqueOpts
from riverpy._log_events import JOB_RESULT_REFUSED, LEADER_WITHOUT_RIVERPY_FOUND
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.interop.river_go import RiverGo
    from tests.work.rig import Rig

GO_LEADER = ("--queues", "go:5", "--client-id", "go", "--no-stagger")
QUEUES = {"python": QueueConfig(max_workers=5)}
LEADING: dict[str, Any] = {"elect_interval": timedelta(milliseconds=200)}
"""A follower polls the election often. The lease is not short, since a busy machine must not change
the leader."""
PERIOD = timedelta(days=365)
SECONDS = int(PERIOD.total_seconds())
GO_RESCUES_AFTER = timedelta(seconds=1)
"""The age at which a leader in Go rescues in these tests."""


class Wait(msgspec.Struct, frozen=True):
    """Args of a job that waits for the test."""

    kind: ClassVar[str] = "wait"


class Guarded(msgspec.Struct, frozen=True):
    """The same, with a stub in Go for its kind."""

    kind: ClassVar[str] = "guarded"


class Nothing(msgspec.Struct, frozen=True):
    """Args of a job that does nothing."""

    kind: ClassVar[str] = "nothing"


class Report(msgspec.Struct, frozen=True):
    """A periodic job of both languages."""

    kind: ClassVar[str] = "report"
    by: str = "python"


@pytest.fixture
def may_end(rig: Rig) -> asyncio.Event:
    """An event that lets the waiting jobs of the rig end."""
    event = asyncio.Event()

    async def wait(job: Job[Any]) -> None:
        await event.wait()

    async def nothing(job: Job[Any]) -> None:
        pass

    rig.job(wait, args=Wait, timeout=None)
    rig.job(copy_of(wait), args=Guarded, timeout=None)
    rig.job(nothing, args=Nothing)
    return event


def copy_of(function: Any) -> Any:
    """Return a copy of a function, for another kind."""

    async def copy(job: Job[Any]) -> None:
        await function(job)

    return copy


@contextmanager
def logged() -> Generator[list[Any]]:
    """Collect the log lines of the block."""
    with capture_logs() as entries:
        yield entries


async def until_logged(log: list[Any], event: str) -> dict[str, Any]:
    """Wait for a log line of this event."""
    with anyio.fail_after(PATIENCE, reason=f"{event!r} was not logged: {log}"):
        while not (found := said(log, event)):
            await asyncio.sleep(0.01)
    return found[0]


def said(log: list[Any], event: str) -> list[dict[str, Any]]:
    """Return the log lines of an event."""
    return [entry for entry in log if entry["event"] == event]


async def until_led_by(rig: Rig, leader_id: str) -> None:
    await rig.until("SELECT leader_id FROM river_leader", leader_id)


# -- a leader in Go


async def test_go_leads_periodic_jobs(rig: Rig, go: RiverGo, may_end: asyncio.Event) -> None:
    """A leader in Go inserts its own periodic jobs and none of Python's, and Python warns of that
    once. A job that both have with one unique key is inserted once, whichever client is the
    leader."""
    both = PeriodicJob(
        every(PERIOD),
        lambda: (
            Report(),
            InsertOpts(queue="nobody", unique_opts=UniqueOpts(by_period=PERIOD)),
        ),
        id="both",
        run_on_start="each_term",
    )
    python_only = PeriodicJob(every(PERIOD), Nothing, id="python_only", run_on_start="each_term")
    of_kind = "SELECT count(*) FROM river_job WHERE kind = $1"
    with logged() as log:
        async with go.worker(*GO_LEADER, "--periodic", f"report:{SECONDS}") as first:
            await rig.until(of_kind, 1, "report")
            client = rig.client(
                id="python", queues=QUEUES, dead_after=timedelta(seconds=0.3), **LEADING
            )
            client.periodic_jobs.add_many([both, python_only])
            async with rig.running(client):
                entry = await until_logged(log, LEADER_WITHOUT_RIVERPY_FOUND)
                assert entry["periodic_job_ids"] == ["both", "python_only"]
                assert entry["leader_id"] == "go"
                assert await rig.schema.fetchval(of_kind, "nothing") == 0
                first.terminate()
                await until_led_by(rig, "python")
                await rig.until(of_kind, 1, "nothing")
    assert len(said(log, LEADER_WITHOUT_RIVERPY_FOUND)) == 1
    async with go.worker(*GO_LEADER, "--periodic", f"report:{SECONDS},other:{SECONDS}"):
        await rig.until(of_kind, 1, "other")
    (report,) = await rig.schema.fetch("SELECT * FROM river_job WHERE kind = 'report'")
    assert json.loads(report["args"]) == {"by": "go"}


async def test_go_leads_long_jobs(rig: Rig, go: RiverGo, may_end: asyncio.Event) -> None:
    """A leader in Go discards a job that runs in Python for longer than Go's own timeout if it has
    no worker for the kind. The result is then refused, the log says so, and the event reports what
    is stored. A stub in Go without a timeout prevents this, and leaves the jobs of dead workers to
    a leader in Python. A job that riverpy has marked to be cancelled is cancelled."""
    with logged() as log:
        async with rig.working(id="python", queues=QUEUES, candidate=False) as client:
            opts = InsertOpts(queue="python")
            discarded = (await client.insert(Wait(), opts)).job.id
            kept = (await client.insert(Guarded(), opts)).job.id
            await rig.until_state("running", 2)
            (dead,) = await stuck_jobs(rig, "guarded", "dead")
            (cancelled,) = await stuck_jobs(rig, "wait", "dead")
            await client.job_cancel(cancelled)
            await rig.until(
                "SELECT bool_and(now() - attempted_at > $1) FROM river_job",
                True,
                GO_RESCUES_AFTER,
            )
            flags = ("--rescue-after", "1s", "--job-timeout", "1s", "--stubs", "guarded")
            async with go.worker(*GO_LEADER, *flags) as worker:
                await rig.until_state("discarded")
                may_end.set()
                events = {event.job and event.job.id: event.kind for event in await rig.take(2)}
                assert events == {
                    discarded: EventKind.JOB_FAILED,
                    kept: EventKind.JOB_COMPLETED,
                }
                await until_logged(log, JOB_RESULT_REFUSED)
                worker.terminate()
                await worker.wait()
    states = {row["id"]: row["state"] for row in await go.run("list")}
    assert states == {
        discarded: "discarded",
        kept: "completed",
        dead: "running",
        cancelled: "cancelled",
    }
    async with rig.working(queues=QUEUES, dead_after=timedelta(seconds=0.5), **LEADING):
        await rig.until("SELECT state::text FROM river_job WHERE id = $1", "completed", dead)


async def stuck_jobs(rig: Rig, kind: str, client_id: str) -> list[int]:
    """Insert a job that a dead client of riverpy has been running for long."""
    await rig.schema.execute(
        """
        INSERT INTO riverpy_client (
            client_id, queues, kinds, candidate, poll_only, version, dead_after, heartbeat_at
        )
        VALUES ($1, '{python}', '{wait}', true, false, '1', '1s', now() - interval '2 hours')
        ON CONFLICT DO NOTHING
        """,
        client_id,
    )
    rows = await rig.schema.fetch(
        """
        INSERT INTO river_job (
            kind, queue, args, max_attempts, state, attempt, attempted_at, attempted_by
        )
        VALUES ($1, 'python', '{}', 5, 'running', 1, now() - interval '2 hours', ARRAY[$2])
        RETURNING id
        """,
        kind,
        client_id,
    )
    return [row["id"] for row in rows]


async def test_go_schedules_for_python(rig: Rig, go: RiverGo, may_end: asyncio.Event) -> None:
    """A leader in Go makes jobs available up to five seconds early. Python does not start them
    before their time."""
    settings = {"candidate": False, "fetch_poll_interval": timedelta(seconds=0.05)}
    async with rig.working(queues=QUEUES, **settings) as client:
        soon = await rig.schema.fetchval("SELECT now() + interval '2 seconds'")
        await client.insert(Nothing(), InsertOpts(queue="python", scheduled_at=soon))
        async with go.worker(*GO_LEADER):
            assert (await rig.event()).kind == EventKind.JOB_COMPLETED
    assert await rig.schema.fetchval("SELECT attempted_at >= scheduled_at FROM river_job")


# -- one queue for both


async def test_shared_queue(rig: Rig, go: RiverGo, may_end: asyncio.Event) -> None:
    """A worker in Go claims all jobs of its queue, and fails those of unknown kinds, which costs an
    attempt each. A worker in Python leaves jobs of unknown kinds to Go."""
    queue = InsertOpts(queue="shared")
    async with go.worker("--queues", "shared:5") as worker, rig.client() as client:
        unknown_to_go = (await client.insert(Nothing(), queue)).job.id
        assert (await worker.until("job_failed", id=unknown_to_go))["attempt"] == 1
    await rig.schema.execute("UPDATE river_job SET queue = 'nobody'")
    async with rig.working(queues={"shared": QueueConfig()}) as client:
        unknown_to_python = (await client.insert(RawArgs("noop", "{}"), queue)).job.id
        known = (await client.insert(Nothing(), queue)).job.id
        event = await rig.event()
        assert (event.kind, event.job.id) == (EventKind.JOB_COMPLETED, known)
    async with go.worker("--queues", "shared:5") as worker:
        done = await worker.until("job_completed", id=unknown_to_python)
        assert done["attempt"] == 1
    errors = {row["id"]: row["errors"] for row in await go.run("list")}
    assert [len(errors[job_id]) for job_id in (unknown_to_go, unknown_to_python)] == [1, 0]
