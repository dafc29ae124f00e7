"""Spreading: a client that runs more singletons than its share hands them over, slowly."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import (
    Client,
    Config,
    LeaseEventKind,
    MemoryLeases,
    SchemaMissingError,
    StopCause,
)
from riverpy._clients import heartbeat
from riverpy._clock import Timer
from riverpy._leases import spreading
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.spreading import HandOver, LeaseSpreader, choose_hand_over
from riverpy._leases.timing import ACQUIRE_JITTER_MAX, LeaseTiming
from riverpy._lifecycle import StopScope
from riverpy._log_events import (
    SINGLETON_HAND_OVER_FAILED,
    SINGLETON_HANDED_OVER,
    SINGLETON_LOST_ITS_LEASE,
)
from riverpy._postgres.lease_reports import LeaseReport, ReportingClient
from riverpy.migrate import Migrator
from tests._statements import record_statements
from tests._time import VirtualTimer
from tests.leases.singletons.rig import Task, running, until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests._database import Schema

NAMES = ("s0", "s1", "s2", "s3")
TTL = timedelta(seconds=60)
TIMING = LeaseTiming(15.0, 5.0)


@pytest.mark.parametrize(
    ("own", "holders", "standbys", "expected"),
    [
        ("ab", "aaaa", {"b": "s0 s1"}, HandOver("s1", "b")),
        ("ab", "aab", {"b": "s0"}, None),
        ("ab", "aaab", {"b": "s0"}, HandOver("s0", "b")),
        ("ab", "aa", {"b": "s0"}, HandOver("s0", "b")),
        ("ab", "aaaa", {"b": "other"}, None),
        ("ab", "aaaa", {}, None),
        ("ab", "aaaabbbc", {"b": "s0", "c": "s1"}, HandOver("s1", "c")),
        ("ab", "aabbccdd", {"e": "s0"}, None),
        ("ab", "aaabbbbbb", {"c": "s0"}, None),
        ("ab", "aaabb", {"b": "s0", "c": "other"}, None),
    ],
)
def test_choice(
    own: str, holders: str, standbys: Mapping[str, str], expected: HandOver | None
) -> None:
    """A client hands over only if it holds more than its share, and another client that waits for
    one of its leases holds at least two fewer. The client that holds the fewest is chosen, and then
    the preferred lease."""
    found = choose_hand_over(
        own[0],
        ["s1", "s0"],
        holders=list(holders),
        standby_by_client={client: names.split() for client, names in standbys.items()},
    )
    assert found == expected


def test_choices_converge() -> None:
    """If each hand-over is taken by the chosen client, the differences shrink to one, whatever the
    start, and then nothing moves."""
    for counts in ([7, 0, 0], [5, 5, 0, 0], [9, 1, 4], [2, 2, 2, 0], [12, 0]):
        clients = [str(number) for number in range(len(counts))]
        owned = {
            client: [f"{client}.{n}" for n in range(count)]
            for client, count in zip(clients, counts, strict=True)
        }
        names = [name for mine in owned.values() for name in mine]
        moves: list[HandOver] = []
        for _ in names:
            for client, mine in owned.items():
                choice = choose_hand_over(
                    client,
                    mine,
                    holders=[one for one, its in owned.items() for _ in its],
                    standby_by_client={one: names for one in clients if one != client},
                )
                if choice is not None:
                    mine.remove(choice.lease_name)
                    owned[choice.client_id].append(choice.lease_name)
                    moves.append(choice)
        sizes = sorted(map(len, owned.values()))
        assert sizes[-1] == math.ceil(len(names) / len(clients)), sizes
        assert len(moves) <= len(names)
        assert not [
            client
            for client, mine in owned.items()
            if choose_hand_over(
                client,
                mine,
                holders=[one for one, its in owned.items() for _ in its],
                standby_by_client={one: names for one in clients if one != client},
            )
        ]


def reporting(client_id: str, *standby: str, **changes: Any) -> ReportingClient:
    """Return a client that reports for which leases it stands by."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    client = ReportingClient(client_id, "1", now, 1.0, False, LeaseReport(list(standby)))
    return client._replace(**changes)


def test_standbys(engine: Any) -> None:
    """Only another client that lives, is not stopping, and waits for a lease can get it."""
    connection: Any = None
    spreader = LeaseSpreader([], engine, connection, None, heartbeat_age_max=30.0)
    clients = [
        reporting("a", "s:s0"),
        reporting("b", "s:s0", "s:other"),
        reporting("c", "s:other"),
        reporting("d", "s:s0", is_stopping=True),
        reporting("e", "s:s0", seconds_since_heartbeat=31.0),
        reporting("f", report=None),
    ]
    assert spreader._find_standby_leases_by_client(clients, frozenset({"s:s0", "s:s1"})) == {
        "b": {"s:s0"}
    }


def test_fewest_leases_first() -> None:
    """With `spread_leases`, a client tries later for each lease that it holds, by more than the
    random delay of an attempt, so that the client with the fewest leases gets a free one."""
    engine = LeaseEngine(
        MemoryLeases(), holder="a", timing=TIMING, timer=Timer(), should_spread=True
    )
    delays = [engine._compute_acquire_delay(count) for count in range(10)]
    assert all(later - earlier > ACQUIRE_JITTER_MAX for earlier, later in pairwise(delays))


@pytest.fixture
def engine() -> Any:
    """The parts of an engine that a spreader needs, with a timer that does not wait."""
    return SimpleNamespace(holder="a", timing=TIMING, timer=VirtualTimer())


async def test_interval(engine: Any) -> None:
    """Two checks are never closer than the ttl, so a client hands over at most one singleton in
    this time. The time doubles after each hand-over that no client took, up to an hour."""
    slept: list[float] = []

    class RecordingTimer(VirtualTimer):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            spreader._failed_count = len(slept)
            if len(slept) == 12:
                raise LookupError

    engine.timer = RecordingTimer()
    connection: Any = None
    spreader = LeaseSpreader([], engine, connection, None, heartbeat_age_max=30.0)
    with pytest.raises(LookupError):
        await spreader.run(StopScope(), task_status=anyio.TASK_STATUS_IGNORED)
    for number, seconds in enumerate(slept):
        shortest = min(15.0 * 2**number, 3600.0)
        assert shortest <= seconds <= shortest * 1.1


def make_client(
    schema: Schema, client_id: str, *, spread: bool = True
) -> tuple[Client, list[Task]]:
    """Create a client with four singletons that take no part in leader election."""
    config = Config(
        schema=schema.name,
        id=client_id,
        candidate=False,
        leader_ttl=TTL,
        elect_interval=timedelta(milliseconds=200),
        soft_stop_timeout=timedelta(0),
        spread_leases=spread,
    )
    client, tasks = Client(schema.url, config=config), [Task() for _ in NAMES]
    for name, task in zip(NAMES, tasks, strict=True):
        client.singleton(name, task)
    return client, tasks


def spreader_of(client: Client) -> LeaseSpreader:
    """Return the spreader of a running client."""
    assert client._run is not None
    (found,) = [one for one in client._run._singleton_runners if isinstance(one, LeaseSpreader)]
    found.checked.init()
    return found


def held(*clients: Client) -> list[int]:
    """Return how many singletons each client holds."""
    return [sum(one.held for one in client.stats().singletons.values()) for client in clients]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check often, and report standbys at once."""
    monkeypatch.setattr(spreading, "CHECK_INTERVAL_SHARE_OF_TTL", 0.005)
    monkeypatch.setattr(heartbeat, "EARLY_HEARTBEAT_DELAY", 0.1)


@pytest.mark.usefixtures("quick")
async def test_joining_client(schema: Schema, log: list[Any]) -> None:
    """A client with four singletons hands two of them over to a client that joins, one in each
    check. Their functions are cancelled with the cause LEASE_HANDED_OVER, which counts as no loss.
    Then nothing moves any more."""
    (a, a_tasks), (b, b_tasks) = make_client(schema, "a"), make_client(schema, "b")
    async with a.subscribe(*LeaseEventKind) as events, running(a):
        await until(lambda: held(a) == [4])
        spreader = spreader_of(a)
        async with running(b):
            counts: list[int] = []
            while held(a, b) != [2, 2]:
                with anyio.fail_after(30):
                    await spreader.checked.wait()
                counts.append(sum(len(task.leases) for task in b_tasks))
                await until(lambda: sum(held(a, b)) == 4)
            for _ in range(4):
                await spreader.checked.wait()
            assert held(a, b) == [2, 2]
            assert [len(task.leases) for task in a_tasks] == [1] * 4
            assert sum(len(task.leases) for task in b_tasks) == 2
            losses = [one.losses for one in a.stats().singletons.values()]
            a.stop()
            changes = [(event.kind, event.lease) async for event in events if event.lease]
    released = [change for kind, change in changes if kind is LeaseEventKind.RELEASED]
    assert [change.cause for change in released] == [
        *[StopCause.LEASE_HANDED_OVER] * 2,
        *[StopCause.CLIENT_STOP] * 2,
    ]
    assert released[0].reason == "client 'b' runs fewer singletons"
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) == 1
    assert losses == [0] * 4
    seen = Counter(entry["event"] for entry in log)
    assert (seen[SINGLETON_HANDED_OVER], seen[SINGLETON_LOST_ITS_LEASE]) == (2, 0)


@pytest.mark.usefixtures("quick")
async def test_nothing_moves(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default no client hands a singleton over. With `spread_leases`, a client that runs fewer
    than two singletons sends no statement."""
    (a, _), (b, _) = make_client(schema, "a", spread=False), make_client(schema, "b")
    async with running(a):
        await until(lambda: held(a) == [4])
        sent = record_statements(monkeypatch)
        async with running(b):
            spreader = spreader_of(b)
            for _ in range(3):
                await spreader.checked.wait()
            assert held(a, b) == [4, 0]
            assert not [one for one in sent if "->> 'leases'" in one.text]


@pytest.mark.usefixtures("quick")
async def test_no_client_takes_it(schema: Schema, log: list[Any]) -> None:
    """If no client takes the lease that is handed over, this client acquires it again after a
    while, and waits longer before the next hand-over."""
    a, tasks = make_client(schema, "a")
    await schema.execute(
        "insert into riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, started_at, leases) values ('dead', '{}', '{}', false, true, '0',"
        " interval '1 minute', now(), $1::text::jsonb)",
        '{"standby": ["s:s1"], "lags": {}, "left_out": 0}',
    )
    async with running(a):
        spreader = spreader_of(a)
        before = spreader.check_interval
        await until(lambda: len(tasks[1].leases) == 2)
        await until(lambda: any(one["event"] == SINGLETON_HAND_OVER_FAILED for one in log))
        assert spreader.check_interval == 2 * before
        assert held(a) == [4]
        assert [len(task.leases) for task in tasks] == [1, 2, 1, 1]


async def test_missing_migration(schema: Schema) -> None:
    """A client with `spread_leases` does not start without the table of reports, and says what to
    do."""
    migrator = Migrator(schema.url, schema=schema.name, line="riverpy")
    await migrator.down(target=7)
    try:
        client, _ = make_client(schema, "a")
        with pytest.raises(SchemaMissingError, match="spread_leases"), anyio.fail_after(30):
            await client.run()
    finally:
        await migrator.up()
