"""Claiming: the order, slots, concurrent clients, and what starts a claim."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import riverpy._work.producer
from riverpy import EventKind, InsertManyParams, InsertOpts, Job, QueueConfig
from riverpy._work.claim_times import DUE_JOB_CLAIM_DELAY
from riverpy._work.producer import Producer
from riverpy.job import JobColumn
from tests._notifications import due_payload
from tests.kit.stalls import is_stall
from tests.work.rig import FAR, PATIENCE, Task, metadata_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.work.rig import Rig


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the limit and the number of rows of each claim."""
    seen: list[tuple[int, int]] = []
    claim = riverpy._work.producer.job_claim

    async def spy(*args: Any, limit: int, **values: Any) -> Any:
        rows = await claim(*args, limit=limit, **values)
        seen.append((limit, len(rows)))
        return rows

    monkeypatch.setattr(riverpy._work.producer, "job_claim", spy)
    return seen


async def test_order(rig: Rig) -> None:
    """Jobs start in the order of priority, due time and id, in one claim and over all claims
    (LD-10)."""
    started: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.append(job.id)

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, priority, scheduled_at)"
        " SELECT 'task', 25, '{}', 4 - i % 4, now() - make_interval(secs => i * 7919 % 50)"
        " FROM generate_series(1, 200) AS i"
    )
    await rig.schema.execute("ANALYZE river_job")
    rows = await rig.schema.fetch("SELECT id FROM river_job ORDER BY priority, scheduled_at, id")
    async with rig.working(slots=50):
        await rig.take(200)
    assert started == [row["id"] for row in rows]


async def test_order_with_one_slot(rig: Rig) -> None:
    """Jobs start in order with one slot too (LD-10)."""
    started: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.append(job.id)

    await rig.schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, priority)"
        " SELECT 'task', 25, '{}', 4 - i % 4 FROM generate_series(1, 40) AS i"
    )
    rows = await rig.schema.fetch("SELECT id FROM river_job ORDER BY priority, scheduled_at, id")
    async with rig.working(slots=1):
        await rig.take(40)
    assert started == [row["id"] for row in rows]


async def test_row_of_a_claimed_job(rig: Rig) -> None:
    """A claim keeps the newest 99 client ids in attempted_by, and removes a cancel mark from before
    a retry."""
    rig.register_task()
    names = [f"worker-{n}" for n in range(120)]
    await rig.insert_rows(1, attempted_by=names)
    await rig.schema.execute(
        "UPDATE river_job SET metadata = jsonb_build_object('cancel_attempted_at', now(), 'own', 1)"
    )
    async with rig.working(id="me"):
        await rig.take(1)
    (row,) = await rig.schema.jobs()
    assert row["state"] == "completed"
    assert row["attempted_by"] == [*names[-99:], "me"]
    assert metadata_of(row) == {"own": 1}


async def test_lists_of_a_claimed_job(rig: Rig) -> None:
    """A waiting result holds no list of its job, because lists need the most memory of a row. The
    job, its columns and its event have them all the same: empty tags, and this client's id."""
    claimed: list[Any] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        claimed.append(job)

    await rig.insert_rows(1)
    await rig.insert_rows(1, attempted_by=["other"], tags=["blue", "red"])
    async with rig.working(id="me", slots=1):
        events = await rig.take(2)
    assert [type(value) for value in claimed[0].claimed_row].count(list) == 0
    for jobs in (claimed, [event.job for event in events]):
        assert [job.attempted_by for job in jobs] == [["me"], ["other", "me"]]
        assert [job.tags for job in jobs] == [[], ["blue", "red"]]
        assert [job.get_encoded_values()[JobColumn.TAGS] for job in jobs] == [[], ["blue", "red"]]


async def test_locked_row_holds_up_no_claim(rig: Rig) -> None:
    """A claim skips a job that another session has locked, and finds it later."""
    rig.register_task()
    await rig.insert_rows(2)
    async with rig.schema.connected() as other, other.transaction():
        await other.execute("SELECT FROM river_job WHERE id = 1 FOR UPDATE")
        async with rig.working() as client:
            assert (await rig.event()).job.id == 2
            assert client.stats().queues["default"].claim_failures == 0
            await other.execute("COMMIT; BEGIN")
            await client.insert(Task())
            assert {event.job.id for event in await rig.take(2)} == {1, 3}


async def test_slots_and_claim_sizes(rig: Rig, claims: list[tuple[int, int]]) -> None:
    """A claim takes at most the free slots, and at most half of many slots. All slots are used and
    never exceeded."""
    now, most = 0, 0
    full, release = asyncio.Event(), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 300:
            full.set()
        await release.wait()
        now -= 1

    await rig.insert_rows(900)
    async with rig.working(slots=300):
        await full.wait()
        assert [rows for _, rows in claims] == [150, 150]
        release.set()
        await rig.take(900)
    assert most == 300
    assert all(rows <= limit <= 150 for limit, rows in claims)


async def test_few_slots_are_claimed_at_once(rig: Rig, claims: list[tuple[int, int]]) -> None:
    """Up to 100 slots are filled by one claim."""
    rig.register_task()
    await rig.insert_rows(100)
    async with rig.working(slots=100):
        await rig.take(100)
    assert claims[0] == (100, 100)


async def test_busy_slot_does_not_hold_the_others(rig: Rig) -> None:
    """A free slot is used at once, however long the other jobs run."""
    release = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.id <= 9:
            await release.wait()

    await rig.insert_rows(60)
    async with rig.working(slots=10):
        await rig.take(51)
        release.set()
        await rig.take(9)


async def test_two_clients_never_run_one_job_twice(rig: Rig) -> None:
    """Two clients with several queues and concurrent inserts run each job once: the table would
    refuse a second copy of its side effect."""
    await rig.schema.execute("CREATE TABLE effects (job bigint PRIMARY KEY)")
    release: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        release.append(job.id)
        await asyncio.sleep(0)

    queues = {f"q{n}": QueueConfig(max_workers=7) for n in range(3)}
    poll = timedelta(milliseconds=50)
    first, second = (rig.client(queues=queues, fetch_poll_interval=poll) for _ in range(2))
    for name in queues:
        await rig.insert_rows(300, queue=name)
    async with rig.running(first), rig.running(second):
        for _ in range(10):
            for name in queues:
                await rig.insert_rows(20, queue=name)
                await first.insert(Task(), InsertOpts(queue=name))
        await rig.until_state("completed", 1530)
    await rig.schema.fetch("INSERT INTO effects SELECT unnest($1::bigint[]) RETURNING job", release)
    rows = await rig.schema.jobs()
    worked = [row for row in rows if row["queue"] != "default"]
    assert {row["attempt"] for row in worked} == {1}
    assert len({row["attempted_by"][0] for row in worked}) == 2
    await rig.schema.execute("DROP TABLE effects")


async def test_wakes_on_notification(rig: Rig) -> None:
    """With a poll interval of minutes a committed job starts at once, in each queue."""
    rig.register_task()
    queues = {"a": QueueConfig(), "b": QueueConfig()}
    async with rig.working(queues=queues) as client:
        for queue in ("a", "b", "a"):
            inserted = await client.insert(Task(), InsertOpts(queue=queue))
            event = await rig.event()
            assert event.job is not None
            assert event.job.id == inserted.job.id


async def test_many_jobs_one_notification(rig: Rig) -> None:
    """A statement that inserts ten jobs wakes ten idle clients, so that all ten run at once
    (NR-15)."""
    running = 0
    all_run = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal running
        running += 1
        if running == 10:
            all_run.set()
        await all_run.wait()

    async def host(client: Any, up: Callable[[], None], stop: asyncio.Event) -> None:
        async with client, client.working():
            up()
            await stop.wait()

    stop = asyncio.Event()
    clients = [rig.client(slots=1, pool_size=1) for _ in range(10)]
    up = asyncio.Semaphore(0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(host(client, up.release, stop))
        for _ in clients:
            await up.acquire()
        await clients[0].insert_many([InsertManyParams(Task(n=n)) for n in range(10)])
        await all_run.wait()
        stop.set()
    assert await rig.states() == {"completed": 10}


@pytest.mark.parametrize(
    ("payload", "delays"),
    [
        ('{"queue":"default"}', [0.005, 0.1]),
        (due_payload("default", 2), [0.005]),
        (due_payload("default"), []),
    ],
    ids=["River in Go", "limited", "each transaction"],
)
async def test_follow_up_claims_after_a_notification(
    rig: Rig,
    claims: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    payload: str,
    delays: list[float],
) -> None:
    """A worker claims again where the sender of a notification may insert more jobs without one:
    for 100 ms, as River in Go, for the interval of the payload, or not at all. (If the loop is
    blocked, two claims fall together. Then there is another notification.)"""
    planned: list[list[float]] = []
    notify = Producer.wake_after_notification

    def spy(producer: Producer, notify_interval_ms: float | None) -> None:
        producer._planned_claim_times.follow_ups.clear()
        now = time.monotonic()
        notify(producer, notify_interval_ms)
        planned.append([at - now for at in producer._planned_claim_times.follow_ups])

    rig.register_task()
    async with rig.working() as client, asyncio.timeout(PATIENCE):
        run: Any = client._run
        while run.producers["default"]._planned_claim_times.follow_ups:
            await asyncio.sleep(0)
        monkeypatch.setattr(Producer, "wake_after_notification", spy)
        while not claims:
            await asyncio.sleep(0)
        looks = 0
        while looks < 1 + len(delays):
            before = len(claims)
            await rig.schema.execute(
                "SELECT pg_notify($1, $2)", f"{rig.schema.name}.river_insert", payload
            )
            while len(claims) == before or run.producers["default"]._planned_claim_times.follow_ups:
                await asyncio.sleep(0)
            async with run._connections.claims.acquire("seeing no claim in flight", PATIENCE):
                looks = len(claims) - before
        assert planned[-1] == pytest.approx(delays, abs=0.05)
        await rig.insert_rows(1)  # without a notification
    assert await rig.states() == {"available": 1}


async def test_insert_of_an_open_transaction(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An insert in an open transaction wakes no worker, nor does its rollback. Its commit does
    (NR-10)."""
    woken: list[str] = []
    notify = Producer.wake_after_notification

    def spy(producer: Producer, notify_interval_ms: float | None = None) -> None:
        woken.append(producer.queue)
        notify(producer, notify_interval_ms)

    rig.register_task()
    monkeypatch.setattr(Producer, "wake_after_notification", spy)
    async with rig.working() as client, rig.schema.connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await client.insert(Task(), tx=connection)
        await client.queue_pause("default")
        assert (
            await rig.event()
        ).kind is EventKind.QUEUE_PAUSED  # earlier messages are handled by now
        await transaction.rollback()
        await client.queue_resume("default")
        assert (await rig.event()).kind is EventKind.QUEUE_RESUMED
        assert woken == []
        async with connection.transaction():
            await client.insert(Task(), tx=connection)
        await rig.event()
        assert woken == ["default"]
    assert await rig.states() == {"completed": 1}


FOREIGN = ["", "not json", "[]", '{"queue":5}', '{"action":"explode"}', "{" * 7900, "null", "5"]


async def test_foreign_payloads(rig: Rig, log: list[dict[str, Any]]) -> None:
    """Invalid payloads are logged at most once each and change nothing. The next job runs
    (NR-09)."""
    rig.register_task()
    async with rig.working() as client:
        for topic in ("river_insert", "river_control", "river_leadership"):
            for payload in FOREIGN:
                await rig.schema.execute(
                    "SELECT pg_notify($1, $2)", f"{rig.schema.name}.{topic}", payload
                )
        await rig.work(client, Task())
    warnings = [one for one in log if one["log_level"] == "warning" and not is_stall(one)]
    assert len(warnings) <= 3 * len(FOREIGN)
    assert all(len(str(entry["payload"])) <= 100 for entry in warnings)


async def test_poll_finds_a_job_without_a_notification(rig: Rig) -> None:
    """Without any notification the poll finds a job."""
    rig.register_task()
    async with rig.working(fetch_poll_interval=timedelta(milliseconds=20)):
        await rig.insert_rows(1)
        await rig.event()


async def test_paused_queue(rig: Rig) -> None:
    """A queue that is paused at the start is not claimed. A pause stops claiming and lets running
    jobs continue. Repeated pauses do nothing. A resume claims at once (OP-09)."""
    started: asyncio.Queue[int] = asyncio.Queue()
    release = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        started.put_nowait(job.id)
        await release.wait()

    await rig.insert_rows(1)
    await rig.schema.execute(
        "INSERT INTO river_queue (name, created_at, metadata, paused_at, updated_at)"
        " VALUES ('default', now(), '{}', now(), now())"
    )
    client = rig.client()
    async with rig.running(client):
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        assert client._run is not None
        assert client._run.producers["default"].is_paused
        assert await rig.states() == {"available": 1}
        await client.queue_resume("default")
        event = await rig.event()
        assert (event.kind, event.queue) == (EventKind.QUEUE_RESUMED, "default")
        await started.get()
        await client.queue_pause("default")
        await client.queue_pause("*")
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        await client.insert(Task())
        release.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        assert await rig.states() == {"available": 1, "completed": 1}
        await client.queue_resume("*")
        assert (await rig.event()).kind is EventKind.QUEUE_RESUMED
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


async def test_queue_rows(rig: Rig) -> None:
    """The row of a worked queue is made at the start and renewed later, and not changed
    otherwise."""
    rig.register_task()
    await rig.schema.execute(
        "INSERT INTO river_queue (name, created_at, metadata, updated_at)"
        """ VALUES ('a', '2020-01-01Z', '{"x": 1}', '2020-01-01Z')"""
    )
    async with rig.working(queues={"a": QueueConfig(), "b": QueueConfig()}):
        rows = await rig.schema.fetch("SELECT * FROM river_queue ORDER BY name")
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[0]["created_at"].year == 2020
    assert rows[0]["metadata"] == '{"x": 1}'
    assert rows[0]["updated_at"].year > 2020
    assert rows[1]["paused_at"] is None


async def test_unreadable_rows(rig: Rig) -> None:
    """Rows with values that Python cannot represent are worked like any other in their batch."""
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.id)
        assert job.scheduled_at.year in {1, job.created_at.year, 2026, 2027}
        assert repr(job)

    await rig.insert_rows(3)
    await rig.schema.execute(
        "UPDATE river_job SET scheduled_at = '-infinity', created_at = '290000-01-01Z' WHERE id = 1"
    )
    await rig.schema.execute(
        """UPDATE river_job SET metadata = '"text"', errors = array['5'::jsonb, '{"at": 1}']"""
        " WHERE id = 2"
    )
    async with rig.working():
        await rig.take(3)
    assert sorted(ran) == [1, 2, 3]
    assert await rig.states() == {"completed": 3}


@pytest.mark.usefixtures("fast_claims")
async def test_fetch_cooldown(rig: Rig, claims: list[tuple[int, int]]) -> None:
    """With a cooldown, many notifications cause few claims, and no job is left behind."""
    rig.register_task()
    config = QueueConfig(fetch_cooldown=timedelta(milliseconds=100), fetch_poll_interval=FAR)
    began = time.monotonic()
    async with rig.working(queues={"default": config}) as client:
        while not claims:
            await asyncio.sleep(0)
        for n in range(30):
            await client.insert(Task(n=n))
        await rig.take(30)
        cooldowns = (time.monotonic() - began) / 0.1
    assert len(claims) < cooldowns + 3


async def test_due_times_of_a_busy_queue(rig: Rig) -> None:
    """A queue that is never empty keeps no past due times."""
    most = 0

    @rig.job
    async def work(job: Job[Task]) -> None:
        nonlocal most
        assert client._run is not None
        producer = client._run.producers["default"]
        producer.schedule_claim(1e-6)
        most = max(most, len(producer._planned_claim_times.due_jobs))
        await asyncio.sleep(2 * DUE_JOB_CLAIM_DELAY)

    await rig.insert_rows(60)
    client = rig.client(slots=1)
    async with rig.running(client):
        await rig.take(60)
    assert most <= 2


async def test_due_during_a_claim(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that becomes due while a claim that does not see it is in flight is claimed next."""
    claim = riverpy._work.producer.job_claim
    is_first = True

    async def slow(*args: Any, **values: Any) -> Any:
        nonlocal is_first
        rows = await claim(*args, **values)
        if is_first:
            is_first = False
            await rig.insert_rows(1)
            assert client._run is not None
            client._run.producers["default"].schedule_claim(1e-6)
            await asyncio.sleep(5 * DUE_JOB_CLAIM_DELAY)
        return rows

    monkeypatch.setattr(riverpy._work.producer, "job_claim", slow)

    rig.register_task()
    client = rig.client()
    async with rig.running(client):
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
