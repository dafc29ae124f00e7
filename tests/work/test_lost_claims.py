"""Claims whose answer was lost: their rows are released and worked, and rows of others stay."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.producer
import riverpy._work.reconciler
from riverpy import EventKind, Job
from riverpy._log_events import JOBS_OF_LOST_CLAIMS_RELEASED
from riverpy._postgres import jobs
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from riverpy import Client
    from tests._database import Schema
    from tests.kit.proxy import Proxy
    from tests.work.rig import Rig

CLAIMS = "riverpy claims"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search for a lost claim after half a second instead of ten."""
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 0.5)
    monkeypatch.setattr(riverpy._work.reconciler, "LOST_CLAIM_MARGIN", 0.05)


async def hold_claims(client: Client, proxy: Proxy) -> None:
    """Hold back the answers of claims, from the next claim on."""
    run = client._run
    assert run is not None
    while run.producers["default"]._planned_claim_times.follow_ups:  # empty claims
        await asyncio.sleep(0.01)
    async with run._connections.claims.acquire("holding", 2 * PATIENCE):
        proxy.hold(CLAIMS)


@pytest.mark.parametrize("how", ["cut", "frozen"])
async def test_answer_of_a_claim_is_lost(
    rig: Rig, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If a connection dies or freezes between a claim and its answer, the rows are released without
    a lost attempt, and worked by the same client (NR-17)."""
    ran: list[int] = []
    if how == "frozen":
        monkeypatch.setattr(riverpy._work.producer, "CLAIM_TIMEOUT", 0.5)

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.id)

    async with proxied(rig.url) as proxy, rig.working(url=proxy.url) as client:
        await rig.work(client, Task())
        await hold_claims(client, proxy)
        await rig.insert_rows(5)
        await client.insert(Task())
        await rig.until_state("running", 6)
        if how == "cut":
            assert proxy.cut(CLAIMS) == 1
        else:
            while client._run._connections.claims._connection is not None:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        await proxy.release()
        await rig.take(6)
    rows = await rig.schema.jobs()
    assert {(row["state"], row["attempt"], row["errors"]) for row in rows} == {
        ("completed", 1, None)
    }
    assert sorted(ran) == [1, 2, 3, 4, 5, 6, 7]
    counts = [entry["count"] for entry in log if entry["event"] == JOBS_OF_LOST_CLAIMS_RELEASED]
    assert sum(counts) >= 6  # on a busy machine more claims may be lost, with such a short timeout
    assert sum(counts) == 6 or how == "frozen"


async def test_answer_is_lost_at_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim whose answer is lost just before a stop leaves no row behind. Its rows are released
    before the run ends, although they are younger than the claim timeout."""
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 600.0)
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_RELEASE_TIMEOUT_MIN", 10.0)

    rig.register_task()
    async with proxied(rig.url) as proxy:
        async with rig.working(url=proxy.url) as client:
            await rig.work(client, Task())
            await hold_claims(client, proxy)
            await client.insert(Task())
            await rig.until_state("running", 1)
            assert proxy.cut(CLAIMS) == 1
            await proxy.release()
        assert rig.report is not None
        assert rig.report.is_clean
    row = await rig.row(2)
    assert (row["state"], row["attempt"], row["errors"]) == ("available", 0, None)


async def test_running_jobs_are_not_released(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that run, wait to be stored, or belong to another client stay running, however often
    this client searches for lost claims."""
    monkeypatch.setattr(riverpy._work.reconciler, "RECONCILE_INTERVAL", 0.02)
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 0.0)
    release, storing, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    complete = jobs.job_complete

    async def slow(*args: Any, **values: Any) -> set[int]:
        storing.set()
        await go_on.wait()
        return await complete(*args, **values)

    monkeypatch.setattr(jobs, "job_complete", slow)

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id == 1:
            await release.wait()

    await rig.insert_rows(3)
    await rig.schema.execute(
        "UPDATE river_job SET state = 'running', attempt = 1, attempted_by = array['someone:1'],"
        " attempted_at = now() - interval '30 minutes' WHERE id = 3"
    )
    async with rig.working(id="me") as client:
        await storing.wait()
        await client.queue_pause("default")
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        # A lost claim of this client from the past shows that the search takes place.
        await rig.schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, attempt, attempted_by,"
            " attempted_at) VALUES ('lost', 5, '{}', 'running', 3, array['someone:1', 'me'],"
            " now() - interval '30 minutes')"
        )
        for _ in range(2):
            await rig.until("SELECT state::text FROM river_job WHERE kind = 'lost'", "available")
            await rig.schema.execute(
                "UPDATE river_job SET state = 'running', attempt = 3,"
                " attempted_at = now() - interval '1 minute' WHERE kind = 'lost'"
            )
        await rig.until("SELECT state::text FROM river_job WHERE kind = 'lost'", "available")
        states = await rig.schema.fetch(
            "SELECT state::text, attempt FROM river_job WHERE kind = 'task' ORDER BY id"
        )
        assert [tuple(row) for row in states] == [("running", 1)] * 3
        lost = await rig.schema.fetchrow("SELECT * FROM river_job WHERE kind = 'lost'")
        assert lost is not None
        assert lost["attempt"] == 2
        go_on.set()
        release.set()
    assert (await rig.row(1))["state"] == "completed"
    assert (await rig.row(2))["state"] == "completed"
    assert (await rig.row(3))["state"] == "running"


async def test_lost_claim_with_a_cancel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost claim whose job was cancelled in the meantime is cancelled when it is released."""
    monkeypatch.setattr(riverpy._work.reconciler, "RECONCILE_INTERVAL", 0.02)

    rig.register_task()
    await rig.insert_rows(1)
    await rig.schema.execute(
        "UPDATE river_job SET state = 'running', attempt = 1, attempted_by = array['me'],"
        """ metadata = '{"cancel_attempted_at": "2026-01-01T00:00:00Z"}',"""
        " attempted_at = now() - interval '30 minutes'"
    )
    async with rig.working(id="me"):
        await rig.until_state("cancelled")
    assert (await rig.row(1))["finalized_at"] is not None


async def test_every_connection_is_cut_again_and_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While connections are cut at random, no job is lost, none runs twice at once, and each is
    stored once. Claims that are too young for the first check do not wait for the next regular
    one."""
    monkeypatch.setattr(riverpy._work.producer, "CLAIM_TIMEOUT", 0.5)
    monkeypatch.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 1.0)
    now: set[int] = set()
    twice: list[int] = []

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        if job.id in now:
            twice.append(job.id)
        now.add(job.id)
        await asyncio.sleep(0.002)
        now.discard(job.id)

    async with proxied(rig.url) as proxy, rig.working(url=proxy.url, slots=20):
        for _ in range(10):
            await rig.insert_rows(20)
            await rig.schema.execute(
                "SELECT pg_notify($1, $2)", f"{rig.schema.name}.river_insert", '{"queue":"default"}'
            )
            proxy.cut()
            await asyncio.sleep(0.2)
        await rig.until_state("completed", 200)
    assert not twice
    rows = await rig.schema.jobs()
    assert {row["attempt"] for row in rows} == {1}


async def test_listener_is_killed(rig: Rig) -> None:
    """A listener that is terminated reconnects, and jobs inserted in between are found. Each later
    cancel and insert is received once."""
    rig.register_task()
    async with rig.working() as client:
        for n in range(5):
            killed = await rig.schema.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name = 'riverpy listener' AND datname = current_database()"
            )
            assert killed >= 1
            await client.insert(Task(n=n))
            assert (await rig.event()).kind is EventKind.JOB_COMPLETED
            await rig.until(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'riverpy listener'",
                1,
            )


async def test_lost_claims_that_are_found(schema: Schema) -> None:
    """Lost claims are the running jobs of the client's queues that it claimed last, longer ago than
    a claim can take."""
    claimed = "now() - interval '1 minute'"
    for state, queue, by, at in (
        ("running", "default", "array['other', 'me']", claimed),
        ("running", "default", "array['me', 'other']", claimed),
        ("running", "mail", "array['me']", claimed),
        ("running", "default", "array['me']", "now() + interval '1 minute'"),
        ("completed", "default", "array['me']", claimed),
    ):
        ended = "now()" if state == "completed" else "null"
        await schema.execute(
            "INSERT INTO river_job (kind, max_attempts, args, state, queue, attempt, attempted_by,"
            f" attempted_at, finalized_at) VALUES ('task', 25, '{{}}', '{state}', '{queue}', 1,"
            f" {by}, {at}, {ended})"
        )
    async with schema.connected() as connection:
        found = [
            await jobs.job_list_claimed_by_client(
                connection,
                schema.name,
                queues=["default"],
                client_id="me",
                claimed_longer_than=10.0,
                skipped_ids=skipped,
            )
            for skipped in ([], [1])
        ]
    assert [[claim_key.id for claim_key in claim_keys] for claim_keys in found] == [[1], []]
