"""Idle clients: how few statements they send, and that they keep no transaction open."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import Client, Config, InsertManyParams, Job, PeriodicJobs, QueueConfig
from riverpy._clients.heartbeat import HEARTBEATS_WITHIN_DEAD_AFTER
from riverpy._leading import leader_watch
from riverpy._leading.domain_queues import READ_INTERVAL_WITHOUT_OWNED_QUEUES
from riverpy._lifecycle import ServiceGroup, StopScope
from riverpy._maintenance.services import make_domain_services
from riverpy._work.claim_times import RIVER_FOLLOW_UP_CLAIM_DELAYS
from riverpy._work.claimer import CLAIM_TIMEOUT
from riverpy._work.client_status import ClientStatusReporter
from tests._statements import record_statements
from tests.leading.term_context import held_term
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._insert.inserter import Inserter
    from tests._database import Schema
    from tests._statements import Sent
    from tests.work.rig import Rig

POLL = 1.05
"""Seconds of a poll: at most a tenth longer than its interval, half of that on average."""


async def statements_of(sent: list[Sent], step: Callable[[], Awaitable[Any]]) -> int:
    """Return how many statements a repeated step sends over open connections."""
    await step()
    before = len(sent)
    await step()
    return len(sent) - before


async def rate_beside_polls(rig: Rig, sent: list[Sent], **settings: Any) -> float:
    """Return the statements per second of a follower, without the polls of its queues. (A leader
    renews its lease where a follower tries to acquire it.)"""
    config = Config(schema=rig.schema.name, **settings)
    queues = {"default": QueueConfig(max_workers=10)}
    run: Any = Client(rig.url, workers=rig.workers, queues=queues, config=config)._make_client_run()
    run._reconciler._next_queue_update_at = float("inf")
    listening = run._make_notifier()
    dead_after = config.dead_after.total_seconds()
    lost_claims = run._reconciler._release_lost_claims
    steps: list[tuple[Callable[[], Awaitable[Any]], float]] = [
        (run._heartbeat._try_to_write_heartbeat, dead_after / HEARTBEATS_WITHIN_DEAD_AFTER),
        (
            run._leader_watch._check_election,
            dead_after / leader_watch.LEADER_CHECKS_WITHIN_DEAD_AFTER,
        ),
        (run._reconciler._check_paused_queues, run._reconciler.check_interval),
        (lambda: lost_claims(min_age_seconds=CLAIM_TIMEOUT), run._reconciler.check_interval),
        (lambda: listening._check_delivery(is_first=False), listening.probe_interval),
    ]
    if config.candidate:
        engine = run._election_manager.lease_engine
        interval = config.elect_interval.total_seconds()
        steps.append((lambda: engine.try_acquire("default"), interval))
    async with ServiceGroup() as group:
        await group.start(listening)
        counts = [await statements_of(sent, step) for step, _ in steps]
        await rig.schema.execute("TRUNCATE riverpy_client")
        await run._heartbeat.register()
        reporter = ClientStatusReporter(
            run._run_context,
            run.running_attempts,
            list,
            has_state_columns=True,
            supports_domains=False,
        )
        again = await statements_of(sent, reporter._write_changed_status)
    await run._connections.close()
    assert counts == [1] * len(steps)
    assert reporter._reported_status is not None
    assert again == 0  # it reports only changes
    return sum(1 / interval for _, interval in steps)


async def rate_of_maintenance(schema: Schema, sent: list[Sent], inserter: Inserter) -> float:
    """Return the statements per second of the services of a term."""

    class InContact:
        registered_at = 1

        def unbroken_contact_seconds(self) -> float:
            return 3600.0

    rate = 0.0
    heartbeat: Any = InContact()
    async with held_term(schema, reindexer_index_names=[]) as held:
        for service in make_domain_services(held.context, heartbeat, PeriodicJobs(), inserter):
            await service.prepare()
            interval = await service.run_once(StopScope())
            before, seconds = len(sent), 0.0
            while seconds < 60.0:
                held.timer.skipped += interval  # type: ignore[attr-defined]
                seconds += interval
                interval = await service.run_once(StopScope())
            rate += (len(sent) - before) / seconds
    return rate


async def test_statements_while_idle(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With default settings an idle client sends less than two statements per second, even as
    leader. Its queues are polled together, so their number does not matter (PF-04)."""
    rig.register_task()
    sent = record_statements(monkeypatch, "")
    inserter: Any = None
    beside_polls = await rate_beside_polls(rig, sent)
    await rig.schema.execute("TRUNCATE river_leader, riverpy_client")
    maintenance = (
        await rate_of_maintenance(rig.schema, sent, inserter)
        + 1 / READ_INTERVAL_WITHOUT_OWNED_QUEUES
    )
    poll = Config().fetch_poll_interval.total_seconds() * POLL
    # The leader of `default` does not check for a leader.
    beside_polls -= (
        leader_watch.LEADER_CHECKS_WITHIN_DEAD_AFTER / Config().dead_after.total_seconds()
    )
    assert beside_polls <= 0.5 + 0.05
    assert maintenance <= 0.41
    assert 1 / poll + beside_polls + maintenance < 1.85


async def test_statements_of_a_quiet_client(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of docs/operations.md for a database that should sleep, an idle client
    sends less than one statement in ten minutes (PB-06)."""
    rig.register_task()
    sent = record_statements(monkeypatch, "")
    beside_polls = await rate_beside_polls(
        rig, sent, candidate=False, quiet_interval=timedelta(hours=1), dead_after=timedelta(hours=6)
    )
    polls = 1 / (3600 * POLL)
    assert (polls + beside_polls) * 600 < 1


async def test_all_sessions_of_a_quiet_client_are_closed(rig: Rig) -> None:
    """After the server has closed all sessions, the next insert of another program works, and the
    worker runs the job long before its poll (PB-06)."""
    rig.register_task()
    async with (
        rig.client(queues={}, pool_size=1) as inserter,
        rig.working(candidate=False, quiet_interval=timedelta(hours=1)) as worker,
    ):
        await rig.work(worker, Task())
        await inserter.insert(Task())
        await rig.event()
        closed = await rig.schema.fetchval(
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name ~ '^riverpy'"
        )
        assert closed >= 5
        await rig.until(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'riverpy listener'",
            1,
        )
        await inserter.insert_many([InsertManyParams(Task())])
        await rig.event()


def claims_of(sent: list[Sent]) -> int:
    """Return the number of claims that were sent."""
    return sum("skip locked" in one.text for one in sent if one.connection == "riverpy claims")


async def first_claim(sent: list[Sent]) -> None:
    """Wait until the queue was found empty."""
    with anyio.fail_after(PATIENCE):
        while not claims_of(sent):
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("fast_claims")
async def test_claims_of_single_jobs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the queue is one claim. Only a full claim is followed by another. The end of a job
    causes no claim (PF-05)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await asyncio.sleep(0)

    sent = record_statements(monkeypatch)
    async with rig.working(slots=100, candidate=False, poll_only=True) as client:
        producer: Any = client._run.producers["default"]  # type: ignore[union-attr]
        await first_claim(sent)
        for _ in range(20):
            await rig.insert_rows(1)
            producer.wake()
            await rig.event()
        await rig.insert_rows(150)
        producer.wake()
        await rig.take(150)
    assert claims_of(sent) <= 1 + 20 + 3


@pytest.mark.usefixtures("fast_claims")
async def test_claims_of_a_notification(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a notification there is one claim, and one for each time at which a sender may have
    inserted more. The jobs that it returned cause none (PF-05)."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        await asyncio.sleep(0)

    sent = record_statements(monkeypatch)
    async with rig.working(slots=100, candidate=False) as client:
        producer: Any = client._run.producers["default"]  # type: ignore[union-attr]
        await first_claim(sent)
        await rig.insert_rows(1)
        producer.wake_after_notification()
        await rig.event()
        while producer._planned_claim_times.follow_ups:
            producer.claimed.init()
            await producer.claimed.wait()
    assert claims_of(sent) <= 1 + 1 + 2 * len(
        RIVER_FOLLOW_UP_CLAIM_DELAYS
    )  # a timer may fire early, and is set again


async def test_no_transaction_during_a_job(rig: Rig) -> None:
    """While jobs run, riverpy's connections have no open transaction and no snapshot that would
    keep dead rows (PF-03)."""
    go_on = asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        await go_on.wait()

    async with rig.working(slots=20, candidate=False) as client:
        for _ in range(10):
            await client.insert(Task())
        await rig.until_state("running", 10)
        await rig.until(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name ~ '^riverpy'"
            " AND (state ~ '^idle in transaction' OR backend_xmin IS NOT NULL)",
            0,
        )
        go_on.set()
        await rig.take(10)
