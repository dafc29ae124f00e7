"""Queues that clients claim for their domain at the start."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import riverpy
from riverpy import Config, DomainConflictError, JobRetention, SchemaMissingError
from riverpy._leading.membership import compute_settings_digest
from riverpy._log_events import (
    DOMAIN_HEARTBEAT_LOST,
    DOMAIN_HEARTBEAT_RESTORED,
    QUEUE_MOVED_TO_ANOTHER_DOMAIN,
    QUEUE_OF_ANOTHER_DOMAIN_FOUND,
)
from riverpy._postgres.domains import owner_claim_queues, owner_lock_all
from riverpy.migrate import Migrator
from riverpy.periodic import PeriodicJob, PeriodicJobs
from riverpy.schedules import every
from tests.leading.domains.members import member, owners
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from tests.work.rig import Rig

CLIENTS = "SELECT string_agg(client_id, ',' ORDER BY client_id) FROM riverpy_client"


async def own(rig: Rig, domain: str, *queues: str, silent: str = "1 minute") -> None:
    """Let a domain without clients own these queues. Its last heartbeat is this old."""
    for queue in queues:
        await rig.schema.execute(
            "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)"
            " VALUES ($1, $2, 'gone', now() - $3::text::interval)",
            queue,
            domain,
            silent,
        )


def lines_of(log: list[Any], text: str) -> list[Any]:
    """Return the log lines of this event."""
    return [entry for entry in log if text == entry["event"]]


# -- claimed


@pytest.mark.parametrize("domain_queues", [None, []])
async def test_claims_what_it_works(rig: Rig, domain_queues: Any) -> None:
    """With `domain_queues` None or empty, a client claims the queues that it works."""
    async with member(rig, "a", "mail", "one", "two", domain_queues=domain_queues):
        assert await owners(rig) == {"one": "mail", "two": "mail"}
    assert await owners(rig) == {"one": "mail", "two": "mail"}


async def test_claims_domain_queues(rig: Rig) -> None:
    """A client claims the queues in `domain_queues`, which may differ from those that it works."""
    async with member(rig, "a", "mail", "one", domain_queues=["two", "three", "two"]):
        assert await owners(rig) == {"three": "mail", "two": "mail"}


async def test_default_claims_nothing(rig: Rig) -> None:
    """A client of `default` claims no queue, and can work a queue that a domain owns."""
    await own(rig, "mail", "one")
    async with member(rig, "a", None, "one"), member(rig, "b", "default", "one", "two"):
        assert await owners(rig) == {"one": "mail"}
    async with member(rig, "c", "mail", "one") as c:
        row = await rig.schema.fetchrow("SELECT * FROM riverpy_client WHERE client_id = 'c'")
        assert row is not None
        assert row["domain"] == "mail"
        assert row["settings"] == compute_settings_digest(c.client.config, c.client.periodic_jobs)


async def test_without_the_tables(rig: Rig) -> None:
    """A client of a domain does not start without version 6 of line `riverpy`. The error has the
    command that creates the tables, and nothing is registered."""
    await Migrator(rig.url, schema=rig.schema.name, line="riverpy").down(target=5)
    with pytest.raises(SchemaMissingError, match=r"riverpy migrate up --line riverpy --database"):
        async with member(rig, "a", "mail"):
            pass
    assert await rig.schema.fetchval(CLIENTS) is None


# -- conflicts


async def test_conflict_is_an_error(rig: Rig) -> None:
    """If another domain with live clients owns a queue, the start fails. The error names the queue,
    both domains and the clients. Neither the client nor a queue is registered."""
    async with member(rig, "a", "mail", "one"):
        with pytest.raises(DomainConflictError) as raised:
            async with member(rig, "b", "pay", "two", "one"):
                pass
        error = raised.value
        assert isinstance(error, riverpy.ConfigError)
        assert (error.queue, error.owner, error.client_ids) == ("one", "mail", ["a"])
        for word in ("'one'", "'mail'", "'pay'", "(a)", "claim one --domain pay --force"):
            assert word in str(error)
        assert await owners(rig) == {"one": "mail"}
        assert await rig.schema.fetchval(CLIENTS) == "a"


async def test_conflict_with_a_domain_that_is_gone(rig: Rig) -> None:
    """A domain without live clients keeps its queues. The error names the setting for a
    takeover."""
    await own(rig, "mail", "one", silent="1 day")
    with pytest.raises(DomainConflictError, match="on_domain_conflict='takeover'") as raised:
        async with member(rig, "b", "pay", "one"):
            pass
    assert raised.value.client_ids == []
    async with member(rig, "b", "pay", "one", on_domain_conflict="takeover"):
        assert await owners(rig) == {"one": "pay"}
        row = await rig.schema.fetchrow("SELECT * FROM riverpy_queue_owner")
        assert row is not None
        assert row["claimed_by"] == "b"


async def test_no_takeover_from_the_living(rig: Rig) -> None:
    """With `takeover` a client takes no queue from a domain that has a live client."""
    async with member(rig, "a", "mail", "one"):
        with pytest.raises(DomainConflictError):
            async with member(rig, "b", "pay", "one", on_domain_conflict="takeover"):
                pass
        assert await owners(rig) == {"one": "mail"}


async def test_conflict_with_a_warning(rig: Rig, log: list[Any]) -> None:
    """With `warn` the client works the queue and does not claim it. This is logged once."""
    async with (
        member(rig, "a", "mail", "three", domain_queues=["one"], candidate=False),
        member(rig, "b", "pay", "one", "two", on_domain_conflict="warn") as b,
    ):
        await b.until_leader()
        assert await owners(rig) == {"one": "mail", "two": "pay"}
        (entry,) = lines_of(log, QUEUE_OF_ANOTHER_DOMAIN_FOUND)
        assert (entry["queue"], entry["owner"], entry["domain"]) == ("one", "mail", "pay")
        await rig.work(b.client, Task(), opts=riverpy.InsertOpts(queue="one"))


async def test_start_race(rig: Rig) -> None:
    """If clients of several domains start at once with one queue, one client claims it and the
    others are refused."""
    outcomes: list[str | None] = []
    stop = anyio.Event()

    async def start(number: int) -> None:
        try:
            async with member(rig, f"c{number}", f"d{number}", "one", candidate=False):
                outcomes.append(f"d{number}")
                await stop.wait()
        except DomainConflictError:
            outcomes.append(None)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(start, number)
        with anyio.fail_after(PATIENCE):
            while len(outcomes) < 4:
                await anyio.sleep(0.01)
        (winner,) = filter(None, outcomes)
        assert await owners(rig) == {"one": winner}
        stop.set()


async def test_claims_wait_for_each_other(rig: Rig) -> None:
    """A client that starts while the claim of another one is not committed waits for it and is then
    refused. Without the wait it would take the queue over."""
    refused = anyio.Event()

    async def start() -> None:
        with pytest.raises(DomainConflictError):
            async with member(rig, "b", "pay", "one", candidate=False):
                pass
        refused.set()

    async with anyio.create_task_group() as tasks:
        async with rig.schema.connected() as rival, rival.transaction():
            place = rival, rig.schema.name
            await owner_lock_all(*place)
            await owner_claim_queues(*place, queues=["one"], domain="mail", client_id="a")
            tasks.start_soon(start)
            await rig.until(
                "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))",
                1,
                rival.get_server_pid(),
            )
        with anyio.fail_after(PATIENCE):
            await refused.wait()
    assert await owners(rig) == {"one": "mail"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"leader_domain": ""}, "a domain name must not be empty"),
        ({"leader_domain": "a" * 65}, "at most 64 characters"),
        ({"leader_domain": "A"}, "lower-case"),
        ({"leader_domain": "a b"}, "lower-case"),
        ({"leader_domain": "@schema"}, "lower-case"),
        ({"leader_domain": 5}, "leader_domain must be str"),
        ({"leader_domain": "a", "domain_queues": "mail"}, "list of queue names"),
        ({"leader_domain": "a", "domain_queues": [5]}, "list of queue names"),
        ({"leader_domain": "a", "domain_queues": ["No Queue"]}, "a queue name must have"),
        ({"domain_queues": ["mail"]}, "requires leader_domain"),
        ({"leader_domain": "default", "domain_queues": ["a"]}, "requires leader_domain"),
        ({"leader_domain": "a", "leader_ttl": timedelta(days=2)}, "leader_ttl must be 1 day"),
        ({"on_domain_conflict": "fight"}, "must be one of 'error', 'warn', 'takeover'"),
    ],
)
def test_bad_settings(settings: Any, text: str) -> None:
    """Each bad value is a ConfigError that names it."""
    with pytest.raises(riverpy.ConfigError, match=text):
        Config(**settings)


# -- kept


async def test_heartbeats_of_a_domain(rig: Rig) -> None:
    """A client of a domain writes heartbeats for all queues of the domain, also those that only
    other clients claim. So a queue is not orphaned before its domain is."""
    await own(rig, "mail", "one", "two", silent="1 day")
    await own(rig, "pay", "three", silent="1 day")
    async with member(rig, "a", "mail", "one", dead_after=timedelta(seconds=0.6)):
        seen = (
            "SELECT string_agg(queue, ',' ORDER BY queue) FROM riverpy_queue_owner"
            " WHERE last_seen_at > now() - interval '10 minutes'"
        )
        await rig.until(seen, "one,two")
        at = await rig.schema.fetchval("SELECT max(last_seen_at) FROM riverpy_queue_owner")
        await rig.until(
            "SELECT min(last_seen_at) > $1 FROM riverpy_queue_owner WHERE domain = 'mail'", True, at
        )


async def test_domain_without_heartbeats(rig: Rig, log: list[Any]) -> None:
    """A client that cannot write heartbeats of its domain warns once, and logs when it can
    again."""

    async def until_told(text: str) -> None:
        with anyio.fail_after(PATIENCE, reason=f"it is not said: {text}"):
            while not any(text == entry["event"] for entry in log):
                await anyio.sleep(0.02)

    async with member(rig, "a", "mail", candidate=False, dead_after=timedelta(seconds=0.6)) as a:
        membership: Any = a.client._run._domain_membership  # type: ignore[union-attr]
        await rig.schema.execute("ALTER TABLE riverpy_queue_owner RENAME TO away")
        await until_told(DOMAIN_HEARTBEAT_LOST)
        await rig.schema.execute("ALTER TABLE away RENAME TO riverpy_queue_owner")
        await until_told(DOMAIN_HEARTBEAT_RESTORED)
        membership.heartbeat_written.init()
        with anyio.fail_after(PATIENCE):
            await membership.heartbeat_written.wait()
    events = {DOMAIN_HEARTBEAT_LOST, DOMAIN_HEARTBEAT_RESTORED}
    levels = [entry["log_level"] for entry in log if entry["event"] in events]
    assert levels == ["warning", "info"]


async def test_id_comes_back_without_a_domain(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client of a domain crashed and starts again under the same id without a domain, its old
    domain does not count it as a client. So another domain may take its queue over."""
    monkeypatch.setattr("riverpy._clients.heartbeat.UNREGISTER_TIMEOUT", PATIENCE)
    async with member(rig, "a", "mail", "mail"):
        crashed = await rig.schema.fetchrow("SELECT domain, settings FROM riverpy_client")
        assert crashed is not None
    await rig.schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, started_at, domain, settings)"
        " VALUES ('a', '{mail}', '{}', true, false, '1', '1 second', now(), $1, $2)",
        *crashed,
    )
    second = timedelta(seconds=1)
    async with member(rig, "a", None, "mail", candidate=False, dead_after=second):
        row = await rig.schema.fetchrow("SELECT domain, settings FROM riverpy_client")
        assert row is not None
        assert tuple(row) == ("default", "default")
        async with member(rig, "b", "post", "mail", on_domain_conflict="takeover"):
            assert await owners(rig) == {"mail": "post"}


async def test_client_of_default_marks_its_row(rig: Rig) -> None:
    """A client of `default` writes into its row that it supports domains: at its start, and after
    each reconnect, because the row may have been deleted and created again."""
    said = "SELECT settings FROM riverpy_client"
    async with member(rig, "c", None, dead_after=timedelta(seconds=0.6)) as c:
        assert await rig.schema.fetchval(said) == "default"
        heartbeat: Any = c.client._run._heartbeat  # type: ignore[union-attr]
        await rig.schema.execute("DELETE FROM riverpy_client")
        with anyio.fail_after(PATIENCE, reason="the new row is not marked"):
            while await rig.schema.fetchval(said) != "default":
                heartbeat._last_heartbeat_at = -math.inf
                await anyio.sleep(0.1)


async def test_settings_follow_the_periodic_jobs(rig: Rig) -> None:
    """The digest of a client's maintenance settings changes with its periodic jobs."""
    async with member(rig, "a", "mail", dead_after=timedelta(seconds=0.6)) as a:
        said = "SELECT settings FROM riverpy_client"
        first = await rig.schema.fetchval(said)
        a.client.periodic_jobs.add(PeriodicJob(every(timedelta(hours=1)), Task, id="hourly"))
        await rig.until(f"{said.replace('settings', 'settings <> $1')}", True, first)


def test_settings_differ() -> None:
    """Two clients have the same digest if and only if they have the same periodic jobs and
    retention, in any order."""
    hourly, daily = (
        PeriodicJob(every(timedelta(hours=hours)), Task, id=f"each-{hours}") for hours in (1, 24)
    )
    short = JobRetention(completed=timedelta(hours=1))
    same = {
        compute_settings_digest(Config(id=name, retention_by_queue=by_queue), PeriodicJobs(jobs))
        for name, by_queue, jobs in (
            ("a", {"x": short, "y": short}, [hourly, daily]),
            ("b", {"y": short, "x": short}, [daily, hourly]),
        )
    }
    assert len(same) == 1
    others = {
        compute_settings_digest(Config(), PeriodicJobs()),
        compute_settings_digest(Config(), PeriodicJobs([hourly])),
        compute_settings_digest(Config(retention=short), PeriodicJobs()),
        compute_settings_digest(Config(retention_by_kind={"kind": short}), PeriodicJobs()),
        compute_settings_digest(Config(retention_by_queue={"kind": short}), PeriodicJobs()),
    }
    assert len(others | same) == 6


async def test_moved_queue_is_left(rig: Rig, log: list[Any]) -> None:
    """A client does not claim back a queue that an administrator moved. The move is logged once."""
    text = QUEUE_MOVED_TO_ANOTHER_DOMAIN
    async with member(rig, "a", "mail", "one", dead_after=timedelta(seconds=0.6)) as a:
        membership: Any = a.client._run._domain_membership  # type: ignore[union-attr]

        async def kept_twice() -> None:
            membership.heartbeat_written.init()
            for _ in range(2):  # one may be in progress
                with anyio.fail_after(PATIENCE):
                    await membership.heartbeat_written.wait()

        await kept_twice()
        assert not lines_of(log, text)
        await rig.schema.execute("UPDATE riverpy_queue_owner SET domain = 'pay'")
        await kept_twice()
        assert [entry["owner"] for entry in lines_of(log, text)] == ["pay"]
        await kept_twice()
        assert len(lines_of(log, text)) == 1
        await rig.schema.execute("DELETE FROM riverpy_queue_owner")
        await kept_twice()
        assert [entry["owner"] for entry in lines_of(log, text)] == ["pay", "default"]
        assert await owners(rig) == {}
