"""Leaders of domains: each has its own lease and maintains its own queues."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import HookPeriodicJobsStartFunc
from riverpy._clock import Timer
from riverpy._leading.leader_stores import DomainLeaseStore, SchemaLeaseStore
from riverpy._leading.term_fence import TermFence
from riverpy._leases.lease import Lease
from riverpy._leases.timing import LeaseTiming
from riverpy._log_events import (
    LEADER_WITHOUT_DOMAINS_FOUND,
    LEADER_WITHOUT_RIVERPY_FOUND,
    NO_LEADER_CANDIDATE_FOUND,
)
from riverpy._postgres.connection import (
    ConnectionOutageTracker,
    DedicatedConnection,
    close_connections,
    connect_for_maintenance,
)
from riverpy._postgres.domains import domain_assign_queue, domain_lock_maintenance
from riverpy._postgres.leases import lease_request_resign
from riverpy.errors import FencedOutError
from riverpy.periodic import PeriodicJob, PeriodicJobsStart
from riverpy.schedules import every
from tests.leading.domains.members import LONG, holders, member, owners
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.leading.domains.members import Member
    from tests.work.rig import Rig

FOREIGN = (
    "INSERT INTO river_leader (name, leader_id, elected_at, expires_at)"
    " VALUES ('default', 'go', now(), now() + interval '1 hour')"
)
BOUND = 20.0
"""Seconds for a statement: longer than a machine stalls."""
SCHEMA_HOLDER = "SELECT holder FROM riverpy_lease WHERE name = '@schema' AND expires_at >= now()"


async def due(rig: Rig, *queues: str) -> None:
    """Insert a due scheduled job in each queue. No client works it."""
    for queue in queues:
        await rig.schema.execute(
            "INSERT INTO river_job (kind, queue, max_attempts, args, state, scheduled_at)"
            " VALUES ('other', $1, 25, '{}', 'scheduled', now() - interval '1 minute')",
            queue,
        )


async def is_scheduled(rig: Rig, queue: str) -> None:
    """Wait until the due jobs of a queue are available, or later."""
    await rig.until(
        "SELECT count(*) FROM river_job WHERE queue = $1 AND state = 'scheduled'", 0, queue
    )


async def unscheduled(rig: Rig) -> list[str]:
    """Return the queues whose due jobs are still scheduled."""
    rows = await rig.schema.fetch(
        "SELECT DISTINCT queue FROM river_job WHERE state = 'scheduled' ORDER BY queue"
    )
    return [row["queue"] for row in rows]


async def own(rig: Rig, domain: str, queue: str, silent: str) -> None:
    """Let a domain without clients own a queue. Its last heartbeat is this old."""
    await rig.schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)"
        " VALUES ($1, $2, 'gone', now() - $3::text::interval)",
        queue,
        domain,
        silent,
    )


def services_of(one: Member, slot: int = 0) -> dict[str, Any]:
    """Return the services of a client's last term as leader of its domain (slot 0) or of the schema
    (slot 1)."""
    election_manager: Any = one.client._run._election_manager  # type: ignore[union-attr]
    return {
        service.name: service for service in election_manager.maintenance_elections[slot]._services
    }


async def passed(one: Member, slot: int = 0) -> None:
    """Wait for one more pass of a leader's scheduler that begins after this call."""
    scheduler: Any = None
    while scheduler is None:
        await asyncio.sleep(0.01)
        scheduler = services_of(one, slot).get("job scheduler")
    scheduler.run_once_succeeded.init()
    scheduler.wake()
    for _ in range(2):  # one may be in progress
        with anyio.fail_after(PATIENCE, reason="the scheduler does not pass"):
            await scheduler.run_once_succeeded.wait()
        scheduler.wake()


def lines_of(log: list[Any], text: str) -> list[Any]:
    """Return the log lines of this event."""
    return [entry for entry in log if text == entry["event"]]


# -- election


async def test_life_of_a_leader(rig: Rig) -> None:
    """A client of a domain acquires the domain's lease and reports it. River's row of leaders does
    not change."""
    async with member(rig, "a", "mail") as a:
        first = await anext(a.changes)
        assert (first.is_leader, first.domain, first.epoch) == (False, "mail", None)
        begun = await a.until_leader()
        assert a.client.is_leader
        row = await rig.schema.fetchrow("SELECT * FROM riverpy_lease WHERE name = 'd:mail'")
        assert row is not None
        assert row["holder"] == "a"
        assert (begun.domain, begun.epoch) == ("mail", row["epoch"])
        assert begun.elected_at == row["acquired_at"]
        assert a.client.stats().is_leader
        renewed = "SELECT expires_at > $1 FROM riverpy_lease WHERE name = 'd:mail'"
        await rig.until(renewed, True, row["expires_at"])
        a.client.stop()
        ended = await a.until_leader(False)
        assert (ended.domain, ended.epoch) == ("mail", begun.epoch)
    assert await holders(rig) == {}
    assert await rig.schema.fetchval("SELECT count(*) FROM river_leader") == 0


async def test_not_a_candidate(rig: Rig) -> None:
    """A client with `candidate=False` becomes leader neither of its domain nor of the schema."""
    async with member(rig, "a", "mail", candidate=False), member(rig, "b", "pay") as b:
        await b.until_leader()
        await rig.until(SCHEMA_HOLDER, "b")
        assert await holders(rig) == {"d:pay": "b", "@schema": "b"}


@asynccontextmanager
async def notifications(schema: Schema, topic: str) -> AsyncGenerator[list[dict[str, Any]]]:
    """Record the notifications of a topic."""
    payloads: list[dict[str, Any]] = []
    async with schema.connected() as connection:
        await connection.add_listener(
            f"{schema.name}.{topic}", lambda *args: payloads.append(json.loads(args[3]))
        )
        yield payloads


async def test_stop_hands_over(rig: Rig, schema: Schema) -> None:
    """When a leader stops, a follower becomes leader through the notification, long before its next
    attempt. Nothing is sent on River's topic, so a leader in Go is not disturbed."""
    async with (
        notifications(schema, "river_leadership") as river,
        notifications(schema, "riverpy_lease") as ours,
    ):
        async with member(rig, "a", "mail", **LONG) as a:
            first = await a.until_leader()
            async with member(rig, "b", "mail", **LONG) as b:
                engine: Any = b.client._run._election_manager.lease_engine  # type: ignore[union-attr]
                engine.lease_denied.init()
                engine.wake_all_waiting_callers()  # its first attempt may have ended
                with anyio.fail_after(PATIENCE):
                    await engine.lease_denied.wait()
                a.client.stop()
                second = await b.until_leader()
        with anyio.fail_after(PATIENCE):
            while not any(one["lease"] == "d:mail" and one["holder"] == "b" for one in ours):
                await asyncio.sleep(0.01)
    assert first.epoch is not None
    assert second.epoch is not None
    assert second.epoch > first.epoch
    assert river == []


async def test_request_to_resign(rig: Rig) -> None:
    """A request with the name and epoch of a lease makes its leader resign, and another client
    becomes leader. Leaders of other domains keep their leases."""
    async with (
        member(rig, "a", "mail", **LONG) as a,
        member(rig, "p", "pay", **LONG) as p,
        rig.schema.connected() as connection,
    ):
        await a.until_leader()
        await p.until_leader()
        async with member(rig, "b", "mail", **LONG) as b:
            assert await lease_request_resign(connection, rig.schema.name, name="d:mail")
            await a.until_leader(False)
            await b.until_leader()
            assert p.client.is_leader


async def test_request_of_an_old_term(rig: Rig) -> None:
    """A request to resign with another epoch or another lease has no effect."""
    async with member(rig, "a", "mail", **LONG) as a:
        term = await a.until_leader()
        assert term.epoch is not None
        election_manager: Any = a.client._run._election_manager  # type: ignore[union-attr]
        receive = election_manager.notification_handler_by_topic["riverpy_lease"]
        for lease, epoch in (("d:mail", term.epoch - 1), ("d:pay", term.epoch)):
            receive(json.dumps({"lease": lease, "epoch": epoch, "action": "resign_requested"}))
            assert a.client.is_leader
        receive(json.dumps({"lease": "d:mail", "epoch": term.epoch, "action": "resign_requested"}))
        assert not a.client.is_leader


# -- the fence


class Holder:
    """One process that tries to become leader of a domain."""

    def __init__(self, schema: Schema, name: str) -> None:
        self.name = name
        self.url, self.schema = schema.url, schema.name
        outage = ConnectionOutageTracker()
        self.reserved = DedicatedConnection("reserved", self._connect, outage)
        self.maintenance = DedicatedConnection("maintenance", self._connect, outage)
        self.store: DomainLeaseStore = DomainLeaseStore(self.reserved, schema.name)
        self.lease_name = "d:mail"

    async def _connect(self) -> Any:
        return await connect_for_maintenance(self.url, self.name, through_pooler=False)

    async def elect(self) -> TermFence | None:
        """Return the fence of the term if the attempt succeeded."""
        ttl = timedelta(seconds=30)
        answer = await self.store.acquire(self.lease_name, self.name, ttl, timeout=BOUND)
        if answer is None or not answer.is_granted:
            return None
        timer = Timer()
        self.lease = Lease(
            self.lease_name,
            answer,
            attempted_at=timer.seconds_since_boot(),
            store=self.store,
            timing=LeaseTiming(ttl=30.0, attempt_interval=10.0),
            timer=timer,
        )
        return TermFence(self.lease)

    async def renew(self) -> bool:
        """Whether the term was extended."""
        terms = [(self.lease.name, self.lease.epoch)]
        return bool(await self.store.renew(self.name, terms, timeout=BOUND))

    async def resign(self) -> bool:
        """Whether the term was ended."""
        lease = self.lease
        return await self.store.release(lease.name, lease.epoch, self.name, timeout=BOUND)


async def until_elected(one: Holder) -> TermFence:
    """Repeat the attempt while a transaction of the last term is open."""
    while (fence := await one.elect()) is None:
        pass
    return fence


async def test_old_leader_cannot_write(schema: Schema) -> None:
    """A leader of a domain that was frozen for longer than its lease can neither commit under its
    old epoch nor renew or release the lease of its successor. While it has a fenced transaction
    open, the takeover waits, and a denied attempt does not."""
    a, b, c = holders_of_lead = [Holder(schema, name) for name in "abc"]
    try:
        old = await a.elect()
        assert old is not None
        async with old.transaction(a.maintenance, "writing") as connection:
            await connection.execute(f'UPDATE "{schema.name}".river_job SET priority = 1')
            assert await c.elect() is None  # it does not wait
            assert await a.renew()
            await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
            taking = asyncio.ensure_future(until_elected(b))
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'b'"
                " AND datname = current_database() AND wait_event_type = 'Lock'"
            )
            while not await schema.fetchval(waiting):
                await asyncio.sleep(0.01)
        new = await taking
        assert b.lease.epoch > a.lease.epoch
        with pytest.raises(FencedOutError):
            async with old.transaction(a.maintenance, "writing"):
                pytest.fail("the transaction began")
        assert not a.lease.is_held
        assert not await a.renew()
        assert not await a.resign()
        async with new.transaction(b.maintenance, "writing") as connection:
            await connection.execute(f'UPDATE "{schema.name}".river_job SET priority = 1')
    finally:
        for one in holders_of_lead:
            await close_connections([one.reserved, one.maintenance])


async def test_attempt_for_the_schema_delays_no_renewal(schema: Schema) -> None:
    """An attempt to acquire the schema lease soon gives up waiting for a fenced transaction of the
    last term. So the domain's lease is renewed in time over the same connection."""
    a, b = (Holder(schema, name) for name in "ab")
    for one in (a, b):
        one.store, one.lease_name = SchemaLeaseStore(one.reserved, schema.name), "@schema"
    try:
        old = await a.elect()
        assert old is not None
        async with old.transaction(a.maintenance, "writing"):
            await schema.execute("UPDATE riverpy_lease SET expires_at = now() - interval '1 s'")
            assert await b.elect() is None
        assert await b.elect() is not None
    finally:
        for one in (a, b):
            await close_connections([one.reserved, one.maintenance])


# -- queues of a domain


async def test_each_leader_schedules_its_own_queues(rig: Rig) -> None:
    """With two domains and `default`, each leader schedules jobs in its own queues only."""
    await due(rig, "a1", "b1", "default", "x")
    async with member(rig, "a", "a", "a1") as a:
        await a.until_leader()
        await is_scheduled(rig, "a1")
        await passed(a)
        assert await unscheduled(rig) == ["b1", "default", "x"]
        async with member(rig, "b", "b", "b1", candidate=False), member(rig, "c", None) as c:
            await c.until_leader()
            await is_scheduled(rig, "x")
            await passed(c)
            await passed(a)
            assert await unscheduled(rig) == ["b1"]
            async with member(rig, "b2", "b", "b2") as b:
                await b.until_leader()
                await is_scheduled(rig, "b1")


async def test_each_kind_of_work(rig: Rig) -> None:
    """The leader of a domain rescues, cleans and schedules only in its queues. It rescues jobs of
    dead clients whatever their kind, also while a River in Go is the leader of `default`, which
    would discard unknown kinds."""
    await rig.schema.execute(FOREIGN)
    await rig.schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, heartbeat_at) VALUES ('dead', '{}', '{}', false, false, '1',"
        " interval '1 second', now() - interval '1 minute')"
    )
    for queue in ("mail", "else"):
        await due(rig, queue)
        await rig.schema.execute(
            "INSERT INTO river_job (kind, queue, max_attempts, args, state, attempt, attempted_by,"
            " attempted_at) VALUES ('strange', $1, 25, '{}', 'running', 1, '{dead}', now())",
            queue,
        )
        await rig.schema.execute(
            "INSERT INTO river_job (kind, queue, max_attempts, args, state, finalized_at)"
            " VALUES ('old', $1, 25, '{}', 'completed', now() - interval '2 days')",
            queue,
        )
    of = "SELECT string_agg(state::text, ' ' ORDER BY id) FROM river_job WHERE queue = $1"
    async with member(rig, "a", "mail", dead_after=timedelta(seconds=2)) as a:
        await a.until_leader()
        await rig.until(
            "SELECT count(*) FROM river_job WHERE queue = 'mail' AND state IN"
            " ('scheduled', 'running', 'completed')",
            0,
        )
        await passed(a)
        assert await rig.schema.fetchval(of, "else") == "scheduled running completed"


async def test_queue_that_is_claimed_later(rig: Rig) -> None:
    """If another client of the domain claims a queue later, the leader maintains it from its next
    pass on. It maintains all queues of its domain, also those that it does not work."""
    await due(rig, "one", "two", "three")
    async with member(rig, "a", "mail", "one", **LONG) as a:
        await a.until_leader()
        await is_scheduled(rig, "one")
        await passed(a)
        assert await unscheduled(rig) == ["three", "two"]
        async with member(rig, "b", "mail", "two", candidate=False):
            await is_scheduled(rig, "two")
        await passed(a)
        assert await unscheduled(rig) == ["three"]


async def test_queue_that_is_moved(rig: Rig) -> None:
    """If an administrator moves a queue, the leader of its new domain maintains it from the next
    pass on, and the old one does not."""
    async with (
        member(rig, "a", "mail", "one", **LONG) as a,
        member(rig, "b", "pay", "two", **LONG) as b,
    ):
        await a.until_leader()
        await b.until_leader()
        async with rig.schema.connected() as connection, connection.transaction():
            await domain_lock_maintenance(connection, rig.schema.name, domains=["mail", "pay"])
            await domain_assign_queue(
                connection, rig.schema.name, queue="one", domain="pay", assigned_by="me"
            )
        assert await owners(rig) == {"one": "pay", "two": "pay"}
        slots = [one.client._run._election_manager._domain_election for one in (a, b)]  # type: ignore[union-attr]
        for slot in slots:
            slot.forget_queue_owners()
        scopes = [await slot._domain_queues.read_queue_scope() for slot in slots]  # type: ignore[union-attr]
        assert [sorted(scope.queues) for scope in scopes] == [[], ["one", "two"]]  # type: ignore[union-attr]
        await due(rig, "one")
        await passed(b)
        assert await unscheduled(rig) == []


async def test_default_is_notified_of_the_first_domain(rig: Rig) -> None:
    """A leader of `default` that was elected before any domain owned a queue is notified of the
    first claim and stops maintaining the queue at once."""
    async with member(rig, "c", None, **LONG) as c:
        await c.until_leader()
        await passed(c)
        async with member(rig, "a", "mail", "one", candidate=False):
            slot: Any = c.client._run._election_manager._domain_election  # type: ignore[union-attr]
            with anyio.fail_after(PATIENCE):
                while "one" in await slot._domain_queues.read_queue_scope():
                    await asyncio.sleep(0.01)
            await due(rig, "one", "two")
            await is_scheduled(rig, "two")
            await passed(c)
            assert await unscheduled(rig) == ["one"]


async def test_orphans(rig: Rig) -> None:
    """The leader of `default` maintains a queue whose domain had no heartbeat for ten minutes,
    until a client of the domain is back. It does not maintain one with a newer heartbeat."""
    await own(rig, "mail", "one", "11 minutes")
    await own(rig, "pay", "two", "9 minutes")
    await due(rig, "one", "two")
    async with member(rig, "c", None, dead_after=timedelta(seconds=1)) as c:
        await c.until_leader()
        await is_scheduled(rig, "one")
        await passed(c)
        assert await unscheduled(rig) == ["two"]
        async with member(rig, "a", "mail", "x", candidate=False):
            slot: Any = c.client._run._election_manager._domain_election  # type: ignore[union-attr]
            with anyio.fail_after(PATIENCE):
                while "one" in await slot._domain_queues.read_queue_scope():
                    await asyncio.sleep(0.01)


# -- the schema leader


async def test_schema_leader_without_default(rig: Rig) -> None:
    """If `default` has no leader, one client of the domains is the schema leader: it rebuilds
    indexes, deletes rows of dead clients and maintains orphaned queues. It does not maintain the
    queues of `default`, and it resigns when `default` has a leader."""
    await own(rig, "gone", "orphan", "11 minutes")
    await due(rig, "orphan", "default")
    async with member(rig, "a", "mail", dead_after=timedelta(seconds=1)) as a:
        await rig.until(SCHEMA_HOLDER, "a")
        await is_scheduled(rig, "orphan")
        await passed(a, 1)
        assert {"reindexer", "client cleaner"} <= services_of(a, 1).keys()
        assert await unscheduled(rig) == ["default"]
        async with member(rig, "c", None) as c:
            await c.until_leader()
            await rig.until(SCHEMA_HOLDER, None)
            engine = a.client._run._election_manager.maintenance_elections[1].lease_engine  # type: ignore[union-attr]
            engine.lease_denied.init()
            with anyio.fail_after(PATIENCE, reason="it is elected beside the leader of default"):
                await engine.lease_denied.wait()
            await is_scheduled(rig, "default")
        await rig.until(SCHEMA_HOLDER, "a")


async def test_schema_beside_a_foreign_leader(rig: Rig, log: list[Any]) -> None:
    """If River in Go is the leader of `default`, it rebuilds the indexes, and the schema leader
    only maintains our tables. A warning with the effects on the domain is logged once for each
    term."""
    await rig.schema.execute(FOREIGN)
    async with member(rig, "a", "mail") as a:
        await a.until_leader()
        await rig.until(SCHEMA_HOLDER, "a")
        await passed(a, 1)
        assert "client cleaner" in services_of(a, 1)
        assert "reindexer" not in services_of(a, 1)
        (entry,) = lines_of(log, LEADER_WITHOUT_RIVERPY_FOUND)
        assert (entry["leader_id"], entry["domain"]) == ("go", "mail")
        assert (entry["queues"], entry["kinds"]) == (["mail"], list(rig.workers))
        await rig.schema.execute("DELETE FROM river_leader")
        with anyio.fail_after(PATIENCE, reason="the schema's leader does not take the indexes up"):
            while "reindexer" not in services_of(a, 1):
                await asyncio.sleep(0.01)


async def test_leader_of_default_that_is_old(rig: Rig, log: list[Any]) -> None:
    """Clients of domains log once for each term if the leader of `default` is of a version that
    does not support domains. They do not log a newer one."""
    text = LEADER_WITHOUT_DOMAINS_FOUND
    await rig.schema.execute(FOREIGN)
    await rig.schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, started_at) VALUES ('go', '{}', '{}', true, false, '1', '1 hour', now())"
    )

    async def checked(*, times: int) -> None:
        watch: Any = a.client._run._leader_watch  # type: ignore[union-attr]
        for _ in range(times):
            watch.leader_checked.init()
            with anyio.fail_after(PATIENCE):
                await watch.leader_checked.wait()

    async with member(rig, "a", "mail", dead_after=timedelta(seconds=0.6)) as a:
        await checked(times=3)
        (entry,) = lines_of(log, text)
        assert (entry["leader_id"], entry["domain"]) == ("go", "mail")
        assert (entry["queues"], entry["log_level"]) == (["mail"], "warning")
        await rig.schema.execute("UPDATE riverpy_client SET settings = 'x' WHERE client_id = 'go'")
        await rig.schema.execute("UPDATE river_leader SET elected_at = now()")
        await checked(times=3)
        assert len(lines_of(log, text)) == 1


# -- periodic jobs


async def test_periodic_jobs_of_domains(rig: Rig) -> None:
    """Each domain and `default` can have periodic jobs with the same id. Their rows differ by the
    domain's name, their jobs do not."""

    def hourly() -> PeriodicJob:
        return PeriodicJob(
            every(timedelta(hours=1)), Task, id="hourly", run_on_start="first_registration"
        )

    async with (
        member(rig, "a", "mail", periodic_jobs=[hourly()]) as a,
        member(rig, "b", "pay", periodic_jobs=[hourly()]) as b,
        member(rig, "c", None, periodic_jobs=[hourly()]) as c,
    ):
        for one in (a, b, c):
            await one.until_leader()
        ids = "SELECT string_agg(id, ' ' ORDER BY id COLLATE \"C\") FROM riverpy_periodic"
        await rig.until(f"{ids} WHERE last_run_at IS NOT NULL", "hourly hourly@mail hourly@pay")
        rows = await rig.schema.fetch("SELECT metadata FROM river_job WHERE kind = 'task'")
        assert len(rows) == 3
        said = {json.loads(row["metadata"])["river:periodic_job_id"] for row in rows}
        assert said == {"hourly"}


async def test_hook_sees_its_own_domain(rig: Rig) -> None:
    """The hook for the start of a term gets only the states of its own domain's periodic jobs, with
    ids that can be used to add jobs (not `daily@mail`)."""
    seen: dict[str, list[str]] = {}

    def saw(domain: str) -> HookPeriodicJobsStartFunc:
        async def see(start: PeriodicJobsStart) -> None:
            seen[domain] = sorted(start.states)

        return HookPeriodicJobsStartFunc(see)

    for job_id in ("daily", "daily@mail", "hourly@mail", "weekly@pay"):
        await rig.schema.execute(
            "INSERT INTO riverpy_periodic (id, schedule) VALUES ($1, '@daily')",
            job_id,
        )
    async with (
        member(rig, "a", "mail", hooks=[saw("mail")]) as a,
        member(rig, "c", None, hooks=[saw("default")]) as c,
    ):
        for one in (a, c):
            await one.until_leader()
            await passed(one)
    assert seen == {"mail": ["daily", "hourly"], "default": ["daily"]}


# -- no leader


async def test_domain_without_a_candidate(rig: Rig, log: list[Any]) -> None:
    """A client warns if no client can become leader of its domain, even if other clients could
    become leader of `default`."""
    settings = {
        "dead_after": timedelta(seconds=0.6),
        "elect_interval": timedelta(seconds=0.2),
        "leader_ttl": timedelta(seconds=0.5),
    }
    async with member(rig, "c", None), member(rig, "a", "mail", candidate=False, **settings):
        with anyio.fail_after(PATIENCE, reason="it is not said"):
            while not lines_of(log, NO_LEADER_CANDIDATE_FOUND):
                await asyncio.sleep(0.02)
        (entry,) = lines_of(log, NO_LEADER_CANDIDATE_FOUND)
        assert entry["domain"] == "mail"
