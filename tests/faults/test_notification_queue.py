"""A server whose queue of notifications is full, because a listening session stays in a
transaction."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import InsertManyParams, InsertOpts, Job, JobState, LeaseManager
from riverpy._log_events import (
    CONNECTION_LOST,
    NOTIFICATION_QUEUE_DRAINED,
    NOTIFICATION_QUEUE_FILLED,
)
from riverpy._postgres import notifier
from riverpy._postgres.driver import (
    is_data_error,
    is_notification_queue_full,
    is_permanent_statement_error,
    use_raw_timestamps,
)
from riverpy._postgres.jobs import ClaimKey, job_release
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from tests._database import Schema, connected, run_apart
from tests.tools.doctor.conftest import run_doctor
from tests.work.rig import PATIENCE, Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy import Client

PAGES = 64
POLL_INTERVAL = timedelta(seconds=0.1)
PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def small_url() -> Generator[str]:
    """Yield the URL of a server with a small queue of notifications and River's tables."""
    server = EmbeddedPostgres(
        f"queue-{secrets.token_hex(4)}", settings={"max_notify_queue_pages": str(PAGES)}
    )
    try:
        with server as url:
            run_apart(migrate_all, url)
            yield url
    finally:
        server.remove()


@asynccontextmanager
async def filled(url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Fill the queue until the session that this yields ends its transaction."""
    async with connected(url, application_name="lazy") as lazy, connected(url) as filler:
        await lazy.execute("LISTEN somebody")
        await lazy.execute("BEGIN")
        await lazy.execute("SELECT 1")
        refused: asyncpg.ProgramLimitExceededError | None = None
        while refused is None:
            try:
                await filler.execute("SELECT pg_notify('somebody', $1)", "x" * 7900)
            except asyncpg.ProgramLimitExceededError as error:
                refused = error
        assert is_notification_queue_full(refused)
        assert not is_data_error(refused)
        assert not is_permanent_statement_error(refused)
        yield lazy


@pytest.fixture
async def rig(small_url: str) -> AsyncGenerator[Rig]:
    """Jobs on that server."""
    async with connected(small_url) as connection:
        await connection.execute("TRUNCATE river_job, river_queue, riverpy_lease")
        yield Rig(Schema(small_url, "public", connection))


async def ended(client: Client, job_id: int, state: JobState) -> None:
    with anyio.fail_after(PATIENCE, reason=f"the job does not become {state}"):
        while (await client.job_get(job_id)).state is not state:
            await asyncio.sleep(0.02)


async def test_everything_but_the_notifications_is_stored(
    rig: Rig, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the queue is full, inserts, cancels, retries, pauses, releases, moves of the scheduler
    and results are stored without notifications, which is logged once. Doctor names the session
    that blocks the queue. When it ends, notifications are sent again (FR-05)."""
    monkeypatch.setattr(notifier, "PROBE_INTERVAL", 0.1)
    attempts: dict[int, int] = {}

    @rig.job
    async def work(job: Job[Task]) -> None:
        attempts[job.id] = job.attempt
        if job.args.n == 1 and job.attempt == 1:
            raise ValueError("once")

    async with rig.working(fetch_poll_interval=POLL_INTERVAL) as client:
        run: Any = client._run
        async with filled(rig.url) as lazy, connected(rig.url) as tx:
            pid = await lazy.fetchval("SELECT pg_backend_pid()")
            plain = (await client.insert(Task(0))).job.id
            (many,) = await client.insert_many([InsertManyParams(Task(1))])
            assert await client.insert_many_fast([InsertManyParams(Task(0))]) == 1
            async with tx.transaction():
                inside = (await client.insert(Task(0), tx=tx)).job.id
                assert await client.insert_many_fast([InsertManyParams(Task(0))], tx=tx) == 1
            await ended(client, plain, JobState.COMPLETED)
            await ended(client, inside, JobState.COMPLETED)
            await ended(client, many.job.id, JobState.COMPLETED)
            assert attempts[many.job.id] == 2

            later = (await client.insert(Task(0), InsertOpts(scheduled_at=PAST))).job.id
            await ended(client, later, JobState.COMPLETED)
            waiting = (await client.insert(Task(0), InsertOpts(pending=True))).job.id
            assert (await client.job_cancel(waiting)).state is JobState.CANCELLED
            await client.job_retry(waiting)
            await ended(client, waiting, JobState.COMPLETED)
            await client.queue_pause("default")
            await client.queue_resume("default")

            async with LeaseManager(rig.url) as leases:
                lease = await leases.try_acquire("one")
                assert lease is not None
                await leases.release(lease)

            await use_raw_timestamps(tx)
            row = await tx.fetchrow(
                "INSERT INTO river_job (kind, args, max_attempts, state, attempt, attempted_at,"
                " queue) VALUES ('k', '{}', 5, 'running', 1, now(), 'other')"
                " RETURNING id, attempt, attempted_at"
            )
            assert row is not None
            assert await job_release(tx, None, [ClaimKey(*row)]) == {row["id"]}

            with anyio.fail_after(PATIENCE, reason="the listener does not find the queue full"):
                while run._is_listening():
                    await asyncio.sleep(0.02)
            queue_events = {NOTIFICATION_QUEUE_FILLED, NOTIFICATION_QUEUE_DRAINED}
            assert [line["event"] for line in log if line["event"] in queue_events] == [
                NOTIFICATION_QUEUE_FILLED
            ] * 2  # by inserts, and by the listener
            assert not [line for line in log if line["event"] == CONNECTION_LOST]

            report = await run_doctor("--database-url", rig.url)
            found = report.one("notifications", "warn")
            assert found["data"]["pids"] == [pid]
            assert '"lazy"' in found["text"]
            assert report.one("listen", "warn")["data"] == {"seconds": None}
        received = asyncio.Event()
        async with connected(rig.url) as listener:
            await listener.add_listener("public.river_insert", lambda *_: received.set())
            with anyio.fail_after(PATIENCE, reason="notifications do not arrive again"):
                while not (received.is_set() and run._is_listening()):
                    await client.insert(Task(0))
                    await asyncio.sleep(0.02)
        assert [line["event"] for line in log if line["event"] == NOTIFICATION_QUEUE_DRAINED] == [
            NOTIFICATION_QUEUE_DRAINED
        ] * 2
    assert (await run_doctor("--database-url", rig.url)).one("notifications", "ok")


FLOOD = f"""
CREATE SEQUENCE floods;
CREATE FUNCTION flood() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('floods') = 1 THEN
    PERFORM pg_notify('somebody', n || repeat('x', 7900)) FROM generate_series(1, {2 * PAGES}) n;
  END IF;
  RETURN NEW;
END $$;
"""


@pytest.fixture
async def flood(rig: Rig) -> AsyncGenerator[None]:
    """Fill the queue in the first transaction that calls a function, so that its commit fails."""
    await rig.schema.execute(FLOOD)
    yield
    await rig.schema.execute("DROP FUNCTION flood CASCADE; DROP SEQUENCE floods")


@pytest.mark.parametrize("is_fast", [False, True])
async def test_queue_that_fills_during_an_insert(
    rig: Rig, flood: None, log: list[Any], is_fast: bool
) -> None:
    """An insert whose commit fails because of its notifications is sent again without them."""
    await rig.schema.execute(
        "CREATE TRIGGER flood AFTER INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION flood()"
    )
    async with rig.client() as client:
        if is_fast:
            assert await client.insert_many_fast([InsertManyParams(Task(0))]) == 1
        else:
            await client.insert(Task(0))
        assert len(await rig.schema.jobs()) == 1
        assert [line["event"] for line in log] == [NOTIFICATION_QUEUE_FILLED]


async def test_queue_that_fills_during_a_result(rig: Rig, flood: None) -> None:
    """A result whose commit fails because of notifications is stored at the next try, and not
    replaced by a failure (FR-05)."""
    rig.register_task()
    await rig.schema.execute(
        "CREATE TRIGGER flood AFTER UPDATE ON river_job FOR EACH ROW"
        " WHEN (NEW.state = 'completed') EXECUTE FUNCTION flood()"
    )
    async with rig.working() as client:
        (row,) = await rig.work(client, Task())
    assert row["state"] == "completed"
    assert not row["errors"]
    assert await rig.schema.fetchval("SELECT last_value FROM floods") == 2
