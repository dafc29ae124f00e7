"""Waits for the end of jobs, from clients that only insert and from clients that work."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

import riverpy
from riverpy import (
    Client,
    ClientStateError,
    Config,
    ConfigError,
    InsertOpts,
    Job,
    JobCancel,
    JobInsertMiddlewareFunc,
    JobNotCompletedError,
    JobSnooze,
    NotFoundError,
    OutputError,
    UniqueOpts,
    WaitTimeoutError,
)
from riverpy._postgres import waits
from riverpy._waiting import waiter
from riverpy._work import result_notifier
from riverpy.errors import SchemaMissingError
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Rig, Task, metadata_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

LONG = timedelta(seconds=PATIENCE)
SOON = timedelta(milliseconds=50)
FUTURE = InsertOpts(scheduled_at=datetime(2100, 1, 1, tzinfo=UTC))
MARK = "riverpy:notify"


def make_inserting_client(rig: Rig, url: str | None = None, **settings: Any) -> Client:
    """A client that works no jobs."""
    return Client(url or rig.url, config=Config(schema=rig.schema.name, **settings))


async def until_waiting(client: Client, count: int = 1) -> None:
    """Wait until the client has read the state of this many jobs and waits for their end."""
    with anyio.fail_after(PATIENCE, reason="no call waits"):
        while sum(not job.is_new for job in client._waiter._job_by_id.values()) < count:
            await asyncio.sleep(0.002)


def never_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only notifications and the start of LISTEN wake the waits."""
    monkeypatch.setattr(waiter, "POLL_DELAY_MIN", 1e6)
    monkeypatch.setattr(waiter, "POLL_DELAY_MAX", 1e6)
    monkeypatch.setattr(waiter, "LAST_READ_LEAD_MAX", 0.0)


async def test_insert_and_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that only inserts gets the final rows by notifications alone. All of its waits share
    one connection that listens, and those that begin together share a statement."""
    never_poll(monkeypatch)
    reads: list[int] = []
    read = waits.job_get_states

    async def count(connection: Any, schema: Any, ids: list[int]) -> Any:
        reads.append(len(ids))
        return await read(connection, schema, ids)

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 100:
            await rig.release.wait()
        job.record_output(job.args.n)

    async with rig.working(), make_inserting_client(rig) as client:
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(client.insert_and_wait(Task(n))) for n in range(20)]
        assert [call.result().output for call in calls] == list(range(20))
        rows = await client.wait_many([calls[1].result().id] * 2)
        assert [(row.state, row.output) for row in rows] == [("completed", 1)] * 2
        listeners = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
        in_database = f"{listeners} AND datname = current_database()"
        assert await rig.schema.fetchval(in_database, "riverpy listener") == 2
        monkeypatch.setattr(waits, "job_get_states_and_mark_waited", count)
        job = (await client.insert(Task(100), InsertOpts(notify_end=True))).job
        reads.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                tasks.create_task(client.wait(job.id))
            await until_waiting(client)
            rig.release.set()
        assert reads == [1]
        assert await client.wait_many([]) == []
        with pytest.raises(ConfigError, match="job_ids is a list"):
            await client.wait_many(1)  # type: ignore[arg-type]
        assert not client._waiter._job_by_id


async def test_outcomes(rig: Rig) -> None:
    """A wait ends with the final state of the job. A retry or a snooze does not end it. The errors
    of `result` have the state and the last error of the job."""

    @rig.job
    async def work(job: Job[Task]) -> str | None:
        match job.args.n:
            case 1:
                raise ValueError("no luck")
            case 2:
                raise JobCancel("not wanted")
            case 3 if job.attempt == 1 and not job.metadata.get("snoozes"):
                raise JobSnooze(timedelta(0))
            case 4 if job.attempt == 1:
                raise ValueError("try again")
            case _:
                return f"done {job.args.n}"

    once, thrice = InsertOpts(max_attempts=1), InsertOpts(max_attempts=3)
    async with (
        rig.working(retry_policy=AtOnce()),
        make_inserting_client(rig) as client,
        asyncio.TaskGroup() as tasks,
    ):
        calls = [
            tasks.create_task(client.insert_and_wait(Task(n), once if n < 3 else thrice))
            for n in range(6)
        ]
    rows = [call.result() for call in calls]
    assert [(row.state, row.output) for row in rows] == [
        *(("completed", "done 0"), ("discarded", None), ("cancelled", None)),
        *(("completed", f"done {n}") for n in (3, 4, 5)),
    ]
    assert riverpy.result(rows[0], type=str) == "done 0"
    with pytest.raises(JobNotCompletedError, match=r"\(task\) was discarded: ValueError: no luck"):
        riverpy.result(rows[1])
    with pytest.raises(
        JobNotCompletedError, match="was cancelled: JobCancelError: not wanted"
    ) as e:
        riverpy.result(rows[2], type=str)
    assert e.value.job is rows[2]
    with pytest.raises(OutputError, match="Expected `int`, got `str`"):
        riverpy.result(rows[0], type=int)
    with pytest.raises(ConfigError, match="cannot be decoded"):
        riverpy.result(rows[0], type=Rig)


class AtOnce:
    """A retry policy without a delay."""

    def next_retry(self, job: riverpy.JobRow, /) -> timedelta:
        return timedelta(0)


async def test_jobs_that_do_not_end(rig: Rig) -> None:
    """The error of a timeout names the jobs and their states, and has the rows of those that ended.
    A deleted job, an uncommitted one and one of another schema do not exist. Ids and timeouts are
    checked before anything is sent."""
    async with make_inserting_client(rig) as client:
        ids = [(await client.insert(Task(n), FUTURE)).job.id for n in range(3)]
        await client.job_cancel(ids[0])
        with pytest.raises(WaitTimeoutError, match=r"2 \(scheduled\), 3 \(scheduled\) did") as e:
            await client.wait_many(ids, timeout=timedelta(seconds=2))
        assert (e.value.job_ids, e.value.last_states) == (
            ids[1:],
            dict.fromkeys(ids[1:], "scheduled"),
        )
        assert [row.id for row in e.value.ended_jobs] == ids[:1]
        with pytest.raises(JobNotCompletedError, match=r"has not ended.*client\.wait\(2\)"):
            riverpy.result(await client.job_get(ids[1]))
        with pytest.raises(WaitTimeoutError) as inserted:
            await client.insert_and_wait(Task(), FUTURE, timeout=timedelta(seconds=1))
        (own_id,) = inserted.value.job_ids
        assert (await client.job_get(own_id)).metadata == {MARK: True}
        async with asyncio.TaskGroup() as tasks:
            wait = tasks.create_task(expect_error(NotFoundError, client.wait(ids[1], timeout=None)))
            await until_waiting(client)
            await client.job_delete(ids[1])
        assert "there is no job 2" in wait.result()
        with pytest.raises(NotFoundError):
            await client.wait_many([ids[2], ids[1]])
        async with asyncpg.create_pool(rig.url) as pool, pool.acquire() as tx, tx.transaction():
            job = (await client.insert(Task(), tx=tx)).job
            with pytest.raises(NotFoundError, match="is not committed"):
                await client.wait(job.id)
        async with (
            asyncpg.create_pool(rig.url, min_size=1, max_size=1) as pool,
            pool.acquire(),
            Client(pool, config=Config(schema=rig.schema.name)) as blocked,
        ):
            with pytest.raises(
                WaitTimeoutError, match=r"insert.*job may be stored"
            ) as not_inserted:
                await blocked.insert_and_wait(Task(), timeout=SOON)
            assert not_inserted.value.job_ids == []
        for bad_id in (2**63, "1", None, True):
            with pytest.raises(ConfigError, match="64 bits"):
                await client.wait_many([ids[2], bad_id])  # type: ignore[list-item]
        for timeout in (timedelta(0), timedelta(seconds=-1), 5):
            with pytest.raises(ConfigError, match="a timedelta above zero or None"):
                await client.wait(ids[2], timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ClientStateError):
        await client.wait(ids[2])
    async with Client(rig.url, config=Config(schema="nowhere")) as client:
        with pytest.raises(SchemaMissingError, match="riverpy migrate"):
            await client.wait(1)
        with pytest.raises(SchemaMissingError, match="riverpy migrate"):
            await anext(client.watch(1))


async def expect_error(error_type: type[Exception], call: Awaitable[object]) -> str:
    """Return the text of the error that the call raises."""
    with pytest.raises(error_type) as raised:
        await call
    return str(raised.value)


async def test_end_of_the_caller(rig: Rig) -> None:
    """A cancelled wait leaves nothing behind. A closed client ends its waits with an error."""
    async with make_inserting_client(rig) as client:
        job_id = (await client.insert(Task(), FUTURE)).job.id
        with anyio.move_on_after(PATIENCE) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.wait, job_id)
                await until_waiting(client)
                scope.cancel()
        assert not client._waiter._job_by_id
        assert not client._listener._subscribers
        call = asyncio.get_running_loop().create_task(
            expect_error(ClientStateError, client.wait(job_id, timeout=None))
        )
        await until_waiting(client)
    assert "closed during the wait" in await call
    assert not client._waiter._task.is_running


@pytest.mark.parametrize("how", ["poll_only", "pool of one", "no notification", "read only"])
async def test_without_notifications(rig: Rig, how: str) -> None:
    """A wait finds the end of a job by polling: if the client does not listen, or may not write,
    and if another program ends the job without a notification."""
    async with asyncpg.create_pool(rig.url, min_size=0, max_size=1) as pool:
        settings: Any = {"poll_only": True} if how == "poll_only" else {}
        url: Any = pool if how == "pool of one" else rig.url
        if how == "read only":
            url += f"{'&' if '?' in url else '?'}default_transaction_read_only=on"
        async with make_inserting_client(rig, url, **settings) as client:
            await rig.insert_rows(1)
            job_id = await rig.schema.fetchval("SELECT id FROM river_job")
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(client.wait(job_id, timeout=LONG))
                await until_waiting(client)
                await rig.schema.execute(
                    "UPDATE river_job SET state = 'completed', finalized_at = now()"
                )
            assert call.result().state == "completed"
            is_marked = MARK in call.result().metadata
            assert is_marked is (how == "no notification")


async def test_last_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is read once more shortly before the timeout of its wait."""
    never_poll(monkeypatch)
    monkeypatch.setattr(waiter, "LAST_READ_LEAD_MAX", PATIENCE)
    monkeypatch.setattr(waiter, "LAST_READ_LEAD_SHARE", 0.97)
    async with make_inserting_client(rig, poll_only=True) as client:
        job_id = (await client.insert(Task(), FUTURE)).job.id
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(client.wait(job_id, timeout=LONG))
            await until_waiting(client)
            await client.job_cancel(job_id)
        assert call.result().state == "cancelled"


async def test_mark(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait marks a job that no client has claimed, also behind a lock of its row, and no other
    job. The end of a marked job is notified by its worker, and by `job_cancel`."""
    running = anyio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        running.set()
        await rig.release.wait()

    async with rig.working() as worker, make_inserting_client(rig) as client:
        busy = (await client.insert(Task())).job.id
        await running.wait()
        ended = (await client.insert(Task(), FUTURE)).job.id
        await client.job_cancel(ended)
        waiting, locked = [(await client.insert(Task(), FUTURE)).job.id for _ in range(2)]
        calls: dict[int, asyncio.Task[riverpy.JobRow]] = {}
        async with asyncio.TaskGroup() as tasks, rig.schema.connected() as other:
            async with other.transaction():
                await other.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", locked)
                for job_id in (busy, ended, waiting, locked):
                    calls[job_id] = tasks.create_task(client.wait(job_id, timeout=LONG))
                await until_waiting(client, 3)
            marked = [row["id"] for row in await rig.schema.jobs() if MARK in row["metadata"]]
            assert marked == [waiting]
            for job_id in (waiting, locked):
                await worker.job_cancel(job_id)
            rig.release.set()
        never_poll(monkeypatch)
        job_id = (await client.insert(Task(), FUTURE)).job.id
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.wait(job_id, timeout=LONG))
            await until_waiting(client)
            assert (await client.wait(ended, timeout=LONG)).id == ended
            await worker.job_cancel(job_id)
    assert [call.result().state for call in calls.values()] == [
        *("completed", "cancelled", "cancelled", "cancelled")
    ]


async def test_claim_beside_a_mark(rig: Rig) -> None:
    """A claim passes over a row that a wait is marking, so the queue is notified after it."""
    notified = asyncio.Event()
    async with rig.schema.connected() as listening, make_inserting_client(rig) as client:
        channel = f"{rig.schema.name}.river_insert"
        await rig.insert_rows(1)
        await listening.add_listener(channel, lambda *_: notified.set())
        job_id = await rig.schema.fetchval("SELECT id FROM river_job")
        await expect_error(WaitTimeoutError, client.wait(job_id, timeout=timedelta(seconds=0.5)))
        async with asyncio.timeout(PATIENCE):
            await notified.wait()


async def test_unmarked_jobs_and_failing_notifications(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a job that no call waits for sends nothing. A notification that fails does not
    delay results, and the wait finds the job by polling."""
    sent: list[int] = []

    async def fail(connection: object, schema: object, ended: Any) -> None:
        sent.extend(job_id for job_id, _ in ended)
        raise asyncpg.ProgramLimitExceededError("too many notifications in the NOTIFY queue")

    monkeypatch.setattr(result_notifier, "job_notify_ends", fail)

    rig.register_task()
    async with rig.working() as client:
        await rig.work(client, Task(), opts=InsertOpts(metadata={"note": "not riverpy"}))
        assert sent == []
        row = await client.insert_and_wait(Task(), InsertOpts(metadata={"a": 1}), timeout=LONG)
        assert row.metadata == {"a": 1, MARK: True}
        assert sent == [row.id]


async def test_payloads(rig: Rig) -> None:
    """A notification has at most 7,999 bytes, even for the longest ids, and all jobs arrive."""
    received: list[str] = []
    jobs = [(2**63 - 1 - n, "discarded") for n in range(1000)]
    async with rig.schema.connected() as listening, rig.schema.connected() as sending:
        channel = f"{rig.schema.name}.riverpy_job"
        await listening.add_listener(channel, lambda *args: received.append(args[3]))
        await waits.job_notify_ends(sending, rig.schema.name, jobs)
        with anyio.fail_after(PATIENCE):
            while len(received) < 5:
                await asyncio.sleep(0.002)
    assert max(len(payload) for payload in received) <= 7_999
    assert [job for payload in received for job in waits.decode_job_ends(payload)] == jobs
    assert waits.decode_job_ends("no JSON") == waits.decode_job_ends('{"jobs": 5}') == []


async def test_outage(rig: Rig) -> None:
    """Waits outlive the loss of all connections. A job that ends during the outage is found when
    the client listens again."""
    async with proxied(rig.url) as proxy, make_inserting_client(rig, proxy.url) as client:
        first, second = [(await client.insert(Task(), FUTURE)).job.id for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(client.wait_many([first, second], timeout=LONG))
            await until_waiting(client, 2)
            proxy.refusing = True
            proxy.cut()
            end = "UPDATE river_job SET state = 'cancelled', finalized_at = now() WHERE id = $1"
            await rig.schema.execute(end, first)
            with pytest.raises(WaitTimeoutError, match="the last read of their states failed"):
                await client.wait(second, timeout=timedelta(seconds=0.5))
            proxy.refusing = False
            await rig.schema.execute(end, second)
        assert [row.state for row in call.result()] == ["cancelled"] * 2


async def test_wait_inside_a_job(rig: Rig) -> None:
    """A job may wait for another one of the same client. A running client listens on the connection
    of its run."""

    @rig.job
    async def work(job: Job[Task]) -> list[int]:
        if job.args.n == 0:
            return [job.id]
        row = await riverpy.current_client().insert_and_wait(Task(job.args.n - 1))
        return [job.id, *riverpy.result(row, type=list[int])]

    async with rig.working() as client:
        row = await client.insert_and_wait(Task(3), timeout=LONG)
        assert riverpy.result(row) == [1, 2, 3, 4]
        assert client._listener._own_notifier is None


async def test_insert_and_wait_with_plugins(rig: Rig) -> None:
    """`insert_and_wait` waits for the existing job of a unique duplicate, and for a job whose mark
    a middleware has removed. Errors of the insert are raised."""

    async def drop_metadata(params: Any, do_inner: Any) -> None:
        for one in params:
            one.metadata = {}
        await do_inner()

    @rig.job
    async def work(job: Job[Task]) -> int:
        await rig.release.wait()
        return job.id

    plain = JobInsertMiddlewareFunc(drop_metadata)
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    async with rig.working(), make_inserting_client(rig, middleware=[plain]) as client:
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(client.insert_and_wait(Task(1), unique)) for _ in range(3)]
            await until_waiting(client)
            rig.release.set()
        (job_id,) = {call.result().id for call in calls}
        assert await rig.schema.fetchval("SELECT count(*) FROM river_job") == 1
        assert riverpy.result(await client.wait(job_id)) == job_id
        for opts, words in ((InsertOpts(priority=9), "priority"), (5, "opts must be InsertOpts")):
            with pytest.raises(riverpy.InsertError, match=words):
                await client.insert_and_wait(Task(1), opts)  # type: ignore[arg-type]
        assert not client._listener._subscribers
    assert metadata_of(await rig.row(job_id))["output"] == job_id
