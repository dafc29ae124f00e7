"""Claims of several queues: one statement for all queues that want jobs, and its limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy._postgres.skipped_rows
import riverpy._work.claimer
import riverpy._work.producer
import riverpy._work.reconciler
from riverpy import Job, QueueConfig
from riverpy._log_events import JOB_CLAIM_FAILED
from riverpy._work import claim_cursor
from tests.kit.proxy import proxied
from tests.work.rig import PATIENCE, Rig, Task
from tests.work.test_lost_claims import CLAIMS
from tests.work.test_unclaimable import allow, refuse, said

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy import Client

QUEUES = ("a", "b", "c")


class Claims:
    """The queues of each claim, and a way to let claims of several queues wait before their rows
    arrive."""

    def __init__(self) -> None:
        self.queues: list[tuple[str, ...]] = []
        self.limits: list[dict[str, int]] = []
        self.may_return = asyncio.Event()
        self.may_return.set()
        self.returned = 0

    async def until_all_are_idle(self, client: Client) -> None:
        """Wait until all queues were found empty."""
        run: Any = client._run
        with anyio.fail_after(PATIENCE):
            while any(not one._poll_group._waiting.get(one) for one in run.producers.values()):
                await asyncio.sleep(0.002)
        self.queues.clear()


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Claims:
    """Record claims."""
    found = Claims()
    claim_queues = riverpy._work.claimer.job_claim_queues

    async def claim_several(*args: Any, **values: Any) -> Any:
        found.queues.append(tuple(sorted(values["queues"])))
        found.limits.append(dict(zip(values["queues"], values["limits"], strict=True)))
        rows = await claim_queues(*args, **values)
        await found.may_return.wait()
        found.returned += 1
        return rows

    monkeypatch.setattr(riverpy._work.claimer, "job_claim_queues", claim_several)
    for module in (riverpy._work.claimer, riverpy._work.producer):
        claim_one: Callable[..., Any] = module.job_claim

        async def claim(*args: Any, _claim: Callable[..., Any] = claim_one, **values: Any) -> Any:
            found.queues.append((values["queue"],))
            return await _claim(*args, **values)

        monkeypatch.setattr(module, "job_claim", claim)
    return found


def wake(client: Client, *queues: str) -> None:
    """Let these queues claim at the same moment."""
    run: Any = client._run
    for queue in queues:
        run.producers[queue].wake()


async def insert(rig: Rig, counts: dict[str, int]) -> None:
    """Insert so many jobs into each queue, without notifications."""
    for queue, count in counts.items():
        await rig.insert_rows(count, queue=queue)


class Blocked:
    """Jobs that run until the test lets them end."""

    def __init__(self, rig: Rig) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.started: list[int] = []
        self.may_end = asyncio.Event()

        @rig.job
        async def work(job: Job[Task]) -> None:
            self.running[job.queue] += 1
            self.most[job.queue] = max(self.most[job.queue], self.running[job.queue])
            self.started.append(job.id)
            await self.may_end.wait()
            self.running[job.queue] -= 1

    async def until_running(self, counts: dict[str, int]) -> None:
        """Wait until so many jobs of each queue run."""
        with anyio.fail_after(PATIENCE):
            while +self.running != Counter(counts):
                await asyncio.sleep(0.002)


@pytest.mark.usefixtures("fast_claims")
async def test_one_claim_for_all_queues(rig: Rig, claims: Claims) -> None:
    """Queues that want jobs at one moment share a claim. Each gets as many jobs as it has free
    slots, in its order, and a queue without free slots or that is paused is left out."""
    blocked = Blocked(rig)
    slots = {"a": 1, "b": 2, "c": 3}
    queues = {queue: QueueConfig(max_workers=count) for queue, count in slots.items()}
    async with rig.working(queues=queues, candidate=False) as client:
        await claims.until_all_are_idle(client)
        await insert(rig, dict.fromkeys(QUEUES, 5))
        await rig.schema.execute("UPDATE river_job SET priority = 1 + id % 4")
        wake(client, *QUEUES)
        await blocked.until_running(slots)
        assert claims.queues[-1] == QUEUES
        assert claims.limits[-1] == slots
        first = await rig.schema.fetch(
            "SELECT id, row_number() OVER (PARTITION BY queue ORDER BY priority, id) AS place,"
            " queue FROM river_job"
        )
        expected = {row["id"] for row in first if row["place"] <= slots[row["queue"]]}
        assert set(blocked.started) == expected
        await client.queue_pause("b")
        with anyio.fail_after(PATIENCE):
            while not client.stats().queues["b"].paused:
                await asyncio.sleep(0.002)
        for queue in QUEUES:
            await client.queues.resize(queue, 9)
        await blocked.until_running({"a": 5, "b": 2, "c": 5})
        blocked.may_end.set()
        await rig.take(12)
        await client.queue_resume("b")
        await rig.take(3)
    assert blocked.most == {"a": 5, "b": 2, "c": 5}
    assert await rig.states() == {"completed": 15}


@pytest.mark.usefixtures("fast_claims")
async def test_refused_job_of_one_queue(
    rig: Rig, claims: Claims, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue with a job whose claim the server refuses is claimed alone, until that job can be
    claimed. The other queues are not held up, and share their claims again at once."""
    monkeypatch.setattr(riverpy._postgres.skipped_rows, "RETRY_DELAY_MIN", 60.0)
    rig.register_task()
    queues = {queue: QueueConfig() for queue in QUEUES}
    async with rig.working(queues=queues, candidate=False) as client:
        await claims.until_all_are_idle(client)
        await insert(rig, dict.fromkeys(QUEUES, 3))
        await refuse(rig, "NEW.id = 2")
        wake(client, *QUEUES)
        await rig.take(8)
        await claims.until_all_are_idle(client)
        assert said(log, JOB_CLAIM_FAILED) == [2]
        await insert(rig, dict.fromkeys(QUEUES, 1))
        wake(client, *QUEUES)
        await rig.take(3)
        assert sorted(claims.queues[:2]) == [("a",), ("b", "c")]
        await allow(rig)
        run: Any = client._run
        run.producers["a"].unclaimable_jobs._skipped_jobs.make_all_rows_due()
        wake(client, "a")
        await rig.take(1)
        await claims.until_all_are_idle(client)
        wake(client, *QUEUES)
        await claims.until_all_are_idle(client)
        wake(client, *QUEUES)
        with anyio.fail_after(PATIENCE):
            while claims.queues != [QUEUES]:
                await asyncio.sleep(0.002)
    assert await rig.states() == {"completed": 12}


async def test_slow_claims(rig: Rig, claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    """If claims of several queues are slow, each queue is claimed alone. A queue with slow claims
    continues at a later position in its order, until its claims are fast again."""
    rig.register_task()
    monkeypatch.setattr(claim_cursor, "SLOW_CLAIM_THRESHOLD", float("-inf"))
    queues = {queue: QueueConfig() for queue in QUEUES}
    async with rig.working(queues=queues, candidate=False) as client:
        run: Any = client._run
        with anyio.fail_after(PATIENCE):
            while not all(
                one._claim_cursor._position_by_priority for one in run.producers.values()
            ):
                wake(client, *QUEUES)
                await asyncio.sleep(0.002)
        claims.queues.clear()
        await insert(rig, dict.fromkeys(QUEUES, 10))
        wake(client, *QUEUES)
        await rig.take(30)
        assert {len(queues) for queues in claims.queues} == {1}
        monkeypatch.setattr(claim_cursor, "SLOW_CLAIM_THRESHOLD", float("inf"))
        with anyio.fail_after(PATIENCE):
            while QUEUES not in claims.queues:
                wake(client, *QUEUES)
                await asyncio.sleep(0.002)
    assert await rig.states() == {"completed": 30}


@pytest.mark.usefixtures("fast_claims")
async def test_busy_queues_share_each_claim(rig: Rig, claims: Claims) -> None:
    """Busy queues come together in one statement, although they began at different moments: the
    jobs of a claim run before the next one is sent."""
    rig.register_task()
    queues = {queue: QueueConfig(max_workers=2) for queue in QUEUES}
    async with rig.working(queues=queues, candidate=False) as client:
        await claims.until_all_are_idle(client)
        await insert(rig, dict.fromkeys(QUEUES, 40))
        wake(client, "a")
        while not claims.queues:
            await asyncio.sleep(0)
        wake(client, "b", "c")
        await rig.take(120)
        await claims.until_all_are_idle(client)
    shared = claims.limits[claims.limits.index(dict.fromkeys(QUEUES, 2)) :]
    assert shared.count(dict.fromkeys(QUEUES, 2)) >= 19
    assert len(shared) <= 24
    assert await rig.states() == {"completed": 120}


@pytest.mark.usefixtures("fast_claims")
async def test_backlog_of_one_queue(
    rig: Rig, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that works through a backlog is claimed alone, and takes turns with the shared claims
    of other queues. At the end of the backlog it takes part in shared claims again."""
    monkeypatch.setattr(claim_cursor, "BACKLOG_CLAIM_ROWS_MIN", 1)
    ends: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ends.append(job.queue)
        if len(ends) == 20:
            run: Any = client._run
            assert run.producers["a"]._claim_cursor._position_by_priority
            await insert(rig, {"b": 2, "c": 2})
            wake(client, "b", "c")

    queues = {queue: QueueConfig(max_workers=2) for queue in QUEUES}
    async with rig.working(queues=queues, candidate=False) as client:
        await claims.until_all_are_idle(client)
        await insert(rig, {"a": 60})
        wake(client, "a")
        await rig.take(64)
        await claims.until_all_are_idle(client)
        wake(client, *QUEUES)
        with anyio.fail_after(PATIENCE):
            while QUEUES not in claims.queues:
                await asyncio.sleep(0.002)
    assert sorted(ends[20:40]).count("b") == sorted(ends[20:40]).count("c") == 2
    assert await rig.states() == {"completed": 64}


def test_slow_machine_makes_no_queue_slow() -> None:
    """Claims of one queue are slow only if other queues are faster, or if all are slow because of
    their jobs. If the machine is slow, no queue is claimed alone."""
    finder = claim_cursor.SlowQueueFinder()
    for seconds, alone, is_slow in (
        (0.05, [0.02, 0.05, 0.02, 0.02], True),  # one queue is slow
        (0.2, [0.05, 0.055, 0.05, 0.05], True),  # all queues are slow
        (0.06, [0.05, 0.055, 0.05, 0.055], False),  # the machine is slow
    ):
        finder.start_comparison(len(alone), seconds)
        for duration in alone:
            finder.record_single_queue_claim(duration)
        assert finder.is_queue_slow(max(alone)) is is_slow


@pytest.mark.usefixtures("fast_claims")
@pytest.mark.parametrize("how", ["stop", "removal of a queue", "late stop"])
async def test_end_during_a_claim(
    rig: Rig, claims: Claims, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A stop waits for a claim, and its jobs are worked. Jobs of a queue that no longer waits for
    the claim are released, and their attempts do not count; other queues get their jobs."""
    rig.register_task()
    patience = PATIENCE if how == "stop" else 0.05
    monkeypatch.setattr(riverpy._work.producer, "CLAIM_TIMEOUT_AFTER_STOP", patience)
    queues = {queue: QueueConfig() for queue in QUEUES}
    async with rig.working(queues=queues, candidate=False) as client:
        await claims.until_all_are_idle(client)
        await insert(rig, dict.fromkeys(QUEUES, 2))
        claims.may_return.clear()
        wake(client, *QUEUES)
        await rig.until_state("running", 6)
        if how == "removal of a queue":
            assert (await client.queues.remove("a")).is_complete
            claims.may_return.set()
            await rig.take(4)
            await rig.until_state("available", 2)
        else:
            client.stop()
            if how == "stop":
                claims.may_return.set()
    expected = {"completed": 6 if how == "stop" else 4, "available": 0 if how == "stop" else 2}
    if how == "late stop":
        expected = {"available": 6}
    assert await rig.states() == {state: count for state, count in expected.items() if count}
    attempts = {(row["state"], row["attempt"]) for row in await rig.schema.jobs()}
    assert attempts <= {("completed", 1), ("available", 0)}


@pytest.mark.usefixtures("fast_claims")
async def test_answer_of_a_claim_is_lost(rig: Rig, claims: Claims) -> None:
    """If the connection dies between a claim of several queues and its answer, the rows of all
    queues are released without a lost attempt, and worked by the same client (NR-17)."""
    rig.register_task()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(riverpy._work.reconciler, "CLAIM_TIMEOUT", 0.5)
        patched.setattr(riverpy._work.reconciler, "LOST_CLAIM_MARGIN", 0.05)
        queues = {queue: QueueConfig() for queue in QUEUES}
        async with (
            proxied(rig.url) as proxy,
            rig.working(queues=queues, url=proxy.url, candidate=False) as client,
        ):
            await claims.until_all_are_idle(client)
            await insert(rig, dict.fromkeys(QUEUES, 2))
            proxy.hold(CLAIMS)
            wake(client, *QUEUES)
            await rig.until_state("running", 6)
            assert claims.queues == [QUEUES]
            assert proxy.cut(CLAIMS) == 1
            await proxy.release()
            await rig.take(6)
    rows = await rig.schema.jobs()
    assert {(row["state"], row["attempt"], row["errors"]) for row in rows} == {
        ("completed", 1, None)
    }
