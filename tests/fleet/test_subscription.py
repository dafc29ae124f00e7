"""Subscriptions to the events of all workers: content, filters, drops, outages and limits."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from riverpy import (
    Client,
    ClientStateError,
    Config,
    ConfigError,
    Event,
    EventKind,
    FleetEventKind,
    FleetSubscription,
    Job,
    LeaseEventKind,
)
from riverpy._fleet import outbox, publisher
from riverpy._fleet.event_line import build_event_line
from riverpy._fleet.filters import (
    ALL_EVENTS_FILTER,
    FOLLOW_FILTERS_MAX,
    FollowFilter,
    merge_filters,
)
from riverpy._fleet.messages import (
    ANNOUNCEMENTS_MAX,
    EventMessage,
    EventPayloadBuilder,
    decode_announcement,
    decode_event_payload,
    encode_announcements,
    encode_ascii_json,
)
from riverpy._maintenance import base
from riverpy._postgres import fleet
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.fleet import PAYLOAD_BYTES_MAX
from tests._database import connected
from tests._statements import record_statements
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATIENCE = 30.0
ALL = (*EventKind, *LeaseEventKind, *FleetEventKind)


@pytest.fixture
async def follower(rig: Rig) -> AsyncGenerator[Client]:
    """Yield an open client that works no jobs."""
    async with Client(rig.url, config=Config(schema=rig.schema.name)) as client:
        yield client


async def take(events: FleetSubscription, count: int) -> list[Event]:
    """Return the next events."""
    async with asyncio.timeout(PATIENCE):
        return [await anext(events) for _ in range(count)]


async def test_events_of_jobs_queues_and_leases(rig: Rig, follower: Client) -> None:
    """A follower in another client, and one in the working client itself, get each event once, with
    its sender. The job of an event has the columns that identify it and its state, and refuses to
    give what it does not have."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n:
            raise ValueError("postgres://user:secret@host/name is wrong: é😀")
        job.progress(1, 4, "a quarter")
        await job.save_output("partly")
        await rig.release.wait()

    async with (
        rig.working() as client,
        follower.subscribe(*ALL, fleet=True) as events,
        client.subscribe(*EventKind, fleet=True) as own_events,
        follower.subscribe(*EventKind, fleet=True, job_kinds=["other"]) as other_events,
        follower.subscribe(*ALL, fleet=True, queues=["q"]) as queue_events,
    ):
        began = datetime.now(UTC)
        running = (await client.insert(Task())).job
        first = await take(events, 3)
        assert {event.kind for event in first} == set(FleetEventKind)
        lines = [msgspec.to_builtins(build_event_line(event)) for event in first]
        [shown] = [line["progress"] for line in lines if "progress" in line]
        assert (shown["done"], shown["total"], shown["text"]) == (1, 4, "a quarter")
        assert {line["client"] for line in lines} == {client.id}
        assert all(began <= event.at <= datetime.now(UTC) for event in first if event.at)
        assert all("at" in line for line in lines)
        [progress] = [one.progress for one in first if one.progress is not None]
        assert (progress.done, progress.total, progress.text) == (1, 4, "a quarter")
        rig.release.set()
        (completed,) = await take(events, 1)
        failed = (await client.insert(Task(1))).job
        _, failure = await take(events, 2)
        async with client.lease("a-lease"):
            (acquired,) = await take(events, 1)
        await take(events, 1)
        client._subscription_manager.publish_queue_event(EventKind.QUEUE_PAUSED, "q")
        (paused,) = await take(events, 1)
        assert [event.queue for event in await take(queue_events, 1)] == ["q"]
        assert {one.kind for one in await take(own_events, 3)} == {
            EventKind.JOB_COMPLETED,
            EventKind.JOB_FAILED,
            EventKind.QUEUE_PAUSED,
        }
        assert not own_events._stream._waiting_items
        assert not other_events._stream._waiting_items
        stored = await client.job_get(running.id)
    assert completed.kind is EventKind.JOB_COMPLETED
    assert completed.client_id == failure.client_id == client.id
    job = completed.job
    assert job is not None
    assert completed.statistics is not None
    for name in ("id", "kind", "queue", "state", "attempt", "max_attempts", "priority"):
        assert getattr(job, name) == getattr(stored, name), name
    for name in ("created_at", "scheduled_at", "attempted_at"):
        assert getattr(job, name) == getattr(stored, name), name
    assert job.errors == []
    for name in ("encoded_args", "metadata", "output", "tags", "attempted_by", "last_progress"):
        with pytest.raises(ClientStateError, match=rf"has no {name}.*job_get"):
            getattr(job, name)
    assert failure.job is not None
    assert failure.job.id == failed.id
    [error] = failure.job.errors
    assert "é😀" in error.error
    assert "secret" not in error.error
    assert acquired.lease is not None
    assert (acquired.lease.name, acquired.client_id) == ("a-lease", client.id)
    assert (paused.kind, paused.queue) == (EventKind.QUEUE_PAUSED, "q")


async def test_jobs_that_the_leader_ends(
    rig: Rig, follower: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower receives the ends of jobs that the leader has caused, here of waiting jobs that
    have expired, with their errors. A service sends a limited number of such events at a time, and
    counts the others."""
    monkeypatch.setattr(base, "ENDED_JOB_EVENTS_MAX", 1)

    @rig.job
    async def work(job: Job[Task]) -> None:
        pass

    async with (
        rig.working() as client,
        follower.subscribe(*ALL, fleet=True, job_kinds=["late"]) as events,
    ):
        async with asyncio.timeout(PATIENCE):
            while not client._subscription_manager.has_followers:
                await asyncio.sleep(0.01)
        await rig.schema.execute(
            "INSERT INTO river_job (args, kind, max_attempts, queue, metadata) SELECT '{}', 'late',"
            " 1, 'other', '{\"riverpy:expires_at\": \"2026-01-01T00:00:00.000000Z\"}'"
            " FROM generate_series(1, 3)"
        )
        async with asyncio.timeout(PATIENCE):
            while not client.is_leader:
                await asyncio.sleep(0.01)
            elections = client._run._election_manager
            while not events._stream._waiting_items:
                for one in elections.maintenance_elections:
                    one.wake_services()
                await asyncio.sleep(0.05)
        (event,) = await take(events, 1)
    assert event.kind is EventKind.JOB_CANCELLED
    assert event.job is not None
    assert (event.job.state, event.job.queue, event.statistics) == ("cancelled", "other", None)
    assert "expired" in event.job.errors[-1].error
    assert events.dropped_by_workers == 2


async def test_reconnect(rig: Rig, follower: Client) -> None:
    """After the server has ended all connections, as at a restart, the follower listens and
    announces again, the worker sends again, and no job is lost."""
    rig.register_task()
    async with (
        rig.working(fetch_poll_interval=timedelta(seconds=1)) as client,
        follower.subscribe(EventKind.JOB_COMPLETED, fleet=True) as events,
    ):
        await client.insert(Task())
        await take(events, 1)
        async with connected(rig.url) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <>"
                " pg_backend_pid() AND datname = current_database()"
                " AND application_name LIKE 'riverpy%'"
            )
        async with asyncio.timeout(PATIENCE):
            while True:
                # The insert may use a connection that the server is just ending.
                with suppress(*DATABASE_ERRORS):
                    await client.insert(Task())
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await anext(events)
                        break


async def test_unfollowed_and_expired(
    rig: Rig, follower: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no client follows, a worker collects nothing, sends nothing and has no connection for
    it. It stops to send when its last follower ends, and also when a follower that was killed or
    frozen has not announced itself in time."""
    sent = record_statements(monkeypatch, "riverpy fleet")

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.progress(1)

    async with asyncio.timeout(PATIENCE), rig.working() as client:
        manager = client._subscription_manager
        await client.insert(Task())
        await rig.event()
        assert manager.fleet_outbox is None
        async with follower.subscribe(*ALL, fleet=True):
            while manager.fleet_outbox is None:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(publisher, "UNUSED_CONNECTION_TIMEOUT", 0.05)
        follower._fleet_follower._unused_since = 0.0  # it has been unused for long
        while manager.fleet_outbox is not None:
            await asyncio.sleep(0.01)
        await client.insert(Task())
        await rig.event()
        assert not sent
        monkeypatch.setattr(publisher, "ANNOUNCEMENT_VALIDITY", 0.3)
        payload = encode_ascii_json(decode_announcement('{"follower": "killed", "filters": [{}]}'))
        async with connected(rig.url) as connection:
            channel = f"{rig.schema.name}.riverpy_follow"
            for text in ("", "{", '{"follower": ""}', '{"follower": 1}', "é", payload):
                await connection.execute("SELECT pg_notify($1, $2)", channel, text)
        while manager.fleet_outbox is None:
            await asyncio.sleep(0.01)
        await client.insert(Task())
        await rig.event()
        while manager.fleet_outbox is not None:
            await asyncio.sleep(0.01)
        while client._run._fleet_publisher._connection is not None:
            await asyncio.sleep(0.01)
        assert sent


async def test_drops(rig: Rig, follower: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends a limited number of events a second, keeps a limited number and drops the
    oldest; a slow reader drops the newest. Each drop is counted. While the server refuses
    notifications, jobs end as ever and the events are counted as dropped."""
    monkeypatch.setattr(outbox, "OUTBOX_SIZE_MAX", 5)
    refuse = True
    notify = fleet.fleet_notify

    async def refusing(*args: Any) -> bool:
        return False if refuse else await notify(*args)

    rig.register_task()
    monkeypatch.setattr(publisher, "SEND_RETRY_DELAY", 0.05)
    async with (
        asyncio.timeout(PATIENCE),
        rig.working(slots=50) as client,
        follower.subscribe(EventKind.JOB_COMPLETED, fleet=True, size=3) as events,
    ):
        monkeypatch.setattr(publisher, "fleet_notify", refusing)
        for _ in range(20):
            await client.insert(Task())
        await rig.take(20)
        box: Any = client._subscription_manager.fleet_outbox
        while box.dropped_count + len(box) < 20:
            await asyncio.sleep(0.01)
        refuse = False
        while events.dropped_by_workers + len(events._stream._waiting_items) + events.dropped < 20:
            await asyncio.sleep(0.01)
        assert events.dropped_by_workers >= 15  # up to 5 events waited
        assert len(events._stream._waiting_items) <= 3
        before = events.dropped
        await client.insert(Task())
        await rig.event()
        for _ in range(4):
            box.add_event(
                EventKind.JOB_COMPLETED, lambda: EventMessage(event="job_completed", queue="q")
            )
        while events.dropped == before:
            await asyncio.sleep(0.01)
    assert await rig.states() == {"completed": 21}


def test_rate_and_broken_messages() -> None:
    """An event that cannot be made, or is too long for a notification, is dropped and counted. A
    long text is left out before."""
    waiting = outbox.FleetOutbox(lambda: None)
    waiting.filters = [ALL_EVENTS_FILTER]
    messages = EventPayloadBuilder("c" * 100)

    def fail() -> EventMessage:
        raise ZeroDivisionError

    for make in (
        fail,
        lambda: EventMessage(event="job_failed", kind="k" * 9000),
        lambda: EventMessage(event="job_failed", error="é" * 9000),
        lambda: EventMessage(event="job_failed", text="fits"),
    ):
        waiting.add_event(EventKind.JOB_FAILED, make)
    lines = waiting.take_encoded_events(10, messages.line_length_max)
    assert (len(lines), waiting.dropped_count) == (2, 2)
    payloads = messages.build_payloads(lines * 200, waiting.dropped_count)
    assert len(payloads) > 1
    assert all(len(one) <= PAYLOAD_BYTES_MAX and one.isascii() for one in payloads)
    decoded = [decode_event_payload(one) for one in payloads]
    assert sum(len(one[1]) for one in decoded if one) == 400
    assert [one[0].dropped for one in decoded if one][:2] == [2, 0]
    for text in ("", "x", '{"client": 1}', '{"client": "c", "number": 1}\n{'):
        assert decode_event_payload(text) is None
    deep = "[" * 100_000
    assert decode_event_payload(f'{{"client": "c", "number": 1}}\n{deep}') is None


def test_announcements() -> None:
    """Announcements have a limited number and size. A filter that is too large becomes a wider
    one, and equal filters and the jobs of many watches are merged."""
    wide = FollowFilter(kinds=frozenset(f"kind_{n}" for n in range(2_000)))
    watched = [FollowFilter(job_ids=frozenset([2**63 - n])) for n in range(1, 10_000)]
    filters = merge_filters([wide, wide, FollowFilter(events=frozenset(["a"])), *watched])
    assert len(filters) == 3
    payloads = encode_announcements("f" * 16, filters)
    assert len(payloads) == ANNOUNCEMENTS_MAX
    assert all(len(one) <= PAYLOAD_BYTES_MAX for one in payloads)
    first = decode_announcement(payloads[0])
    assert first is not None
    assert first.filters == [FollowFilter(), FollowFilter(events=frozenset(["a"]))]
    assert json.loads(payloads[1])["part"] == 1
    many = [FollowFilter(kinds=frozenset([str(n)])) for n in range(FOLLOW_FILTERS_MAX + 1)]
    assert merge_filters(many) == [ALL_EVENTS_FILTER]


@pytest.mark.parametrize(
    ("kinds", "options", "text"),
    [
        ((), {}, "name the kinds"),
        (("nothing",), {}, "'nothing' is not a kind of events"),
        (("job_failed",), {"size": "x"}, "whole number from 1, got 'x'"),
        (("job_failed",), {"job_kinds": "welcome"}, "job_kinds is a list"),
        (("job_failed",), {"queues": []}, "queues is a list"),
        (("job_failed",), {"job_ids": ["1"]}, "job_ids is a list of at least one int"),
        (("job_failed",), {"job_ids": 1}, "job_ids is a list of at least one int, got 1"),
        ((["job_failed"],), {}, "is not a kind of events"),
        (("job_failed",), {"fleet": False, "queues": ["a"]}, "only with fleet=True"),
        (("job_started",), {"fleet": False}, "need fleet=True"),
    ],
)
def test_refused_subscriptions(kinds: Any, options: Any, text: str) -> None:
    """Bad kinds, sizes and filters are refused before the subscription is opened."""
    client = Client("postgres://nobody@127.0.0.1:1/none")
    with pytest.raises(ConfigError, match=text):
        client.subscribe(*kinds, **{"fleet": True, **options})


async def test_subscription_of_a_closed_client() -> None:
    """A subscription needs an open client, and LISTEN. One that was not opened cannot be read."""
    client = Client("postgres://nobody@127.0.0.1:1/none", config=Config())
    for unopened in (
        client.subscribe(*EventKind, fleet=True),
        client.subscribe(*EventKind),
        client.leadership(),
    ):
        with pytest.raises(ClientStateError, match="async with client"):
            await anext(unopened)
    with pytest.raises(ClientStateError, match="not open"):
        async with client.subscribe(*EventKind, fleet=True):
            pass
    for config, text in (
        (Config(poll_only=True), "poll_only"),
        (Config(pooler=True), "listen_url"),
    ):
        with pytest.raises(ConfigError, match=text):
            Client("postgres://nobody@127.0.0.1:1/none", config=config).subscribe(
                *EventKind, fleet=True
            )
