"""`riverpy domain`: what it lists, how a queue changes hands, and its failures."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy._postgres.leaders import leader_elect, leader_fence_transaction
from riverpy._postgres.leases import lease_acquire, lease_fence_transaction
from riverpy.cli import _connected
from riverpy.cli._options import DatabaseSettings
from riverpy.cli.domain import assign_queue_to_domain
from riverpy.migrate import Migrator
from tests.cli.test_command import UNREACHABLE, invoke
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import asyncpg
    from click.testing import Result

    from tests._database import Schema

TTL = timedelta(hours=1)
BOUND = timedelta(seconds=30)
CLIENTS = """
INSERT INTO riverpy_client
  (client_id, queues, kinds, candidate, poll_only, version, dead_after, heartbeat_at, domain,
  settings)
SELECT name, queues::text[], '{}', candidate, true, '1', '60 s', now() - age, domain, 'same'
FROM (VALUES
  ('m1', '{mail}', true, interval '0', 'mail'),
  ('m2', '{mail,mail-slow}', false, '0', 'mail'),
  ('gone', '{mail}', true, '61 s', 'mail'),
  ('r1', '{report}', true, '0', 'report'),
  ('d1', '{default}', true, '0', 'default')
) AS given (name, queues, candidate, age, domain)
"""
OWNERS = """
INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)
VALUES ('mail', 'mail', 'm1', now()), ('mail-slow', 'mail', 'm2', now()),
  ('report', 'report', 'r1', now()),
  ('old', 'archive', 'a1', now() - interval '3 hours')
"""
OWNED = "SELECT jsonb_object_agg(queue, domain)::text FROM riverpy_queue_owner"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock' AND query ~ $1"
)


async def command(schema: Schema, *args: str) -> Result:
    """Run `riverpy domain` on the test's schema."""
    options = ("--database-url", schema.url, "--schema", schema.name)
    return await asyncio.to_thread(invoke, "domain", *args, *options)


async def call(schema: Schema, *args: str) -> Any:
    """What a command prints that succeeds."""
    result = await command(schema, *args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


async def refused(schema: Schema, *args: str) -> str:
    """The error of a command that is refused and changes nothing."""
    before = await schema.fetchval(OWNED)
    result = await command(schema, *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert await schema.fetchval(OWNED) == before
    return result.stderr


async def owned(schema: Schema) -> dict[str, str]:
    """Which domain has which queue."""
    return json.loads(await schema.fetchval(OWNED) or "{}")


async def waits(schema: Schema, text: str, number: int = 1) -> None:
    """Until so many sessions wait for a lock in a statement with this text."""
    async with asyncio.timeout(PATIENCE), schema.connected() as connection:
        while await connection.fetchval(WAITING, text) < number:
            await asyncio.sleep(0.02)


async def lead(connection: asyncpg.Connection[Any], domain: str, holder: str) -> int:
    """Let somebody lead a domain; returns the epoch."""
    bid = await lease_acquire(connection, None, name=f"d:{domain}", holder=holder, ttl=TTL)
    assert bid is not None
    assert bid.is_granted
    return bid.epoch


async def within(connection: asyncpg.Connection[Any], domain: str, epoch: int) -> None:
    """Tie the open transaction to the term of the domain's leader."""
    assert await lease_fence_transaction(
        connection,
        None,
        name=f"d:{domain}",
        epoch=epoch,
        transaction_timeout=BOUND,
        lock_timeout=BOUND,
    )


async def soon(answer: Awaitable[Any]) -> Any:
    """An answer that must not take for ever."""
    async with asyncio.timeout(PATIENCE):
        return await answer


async def test_list_without_domains(schema: Schema) -> None:
    """Where there is no domain, default has all queues, and nothing is wrong with that."""
    found = await call(schema, "list")
    assert found == {
        "domains": [
            {
                "domain": "default",
                "lease": "river_leader",
                "leader": None,
                "clients": [],
                "candidates": [],
                "standbys": [],
                "queues": None,
            }
        ],
        "schema": None,
        "schema_standbys": [],
        "problems": [],
    }
    lines = (await command(schema, "list")).stdout.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "DOMAIN LEADER EPOCH SINCE LEASE CLIENTS CANDIDATES STANDBYS QUEUES",
        "default none - - - 0 0 none all others",
    ]


async def test_list(schema: Schema) -> None:
    """Each domain has its lease, holder, epoch, times, queues, running clients, candidates and
    standbys. Problems are listed with their fixes."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    await schema.execute(
        'UPDATE riverpy_client SET leases = \'{"standby": ["d:mail", "@schema"]}\''
        " WHERE client_id IN ('m1', 'm2')"
    )
    async with schema.connected() as connection:
        epoch = await lead(connection, "mail", "m1")
        await lease_acquire(connection, None, name="@schema", holder="m1", ttl=TTL)
        await lease_acquire(connection, None, name="s:mine", holder="m1", ttl=TTL)
        await leader_elect(connection, None, leader_id="go_1", ttl=TTL)
    found = await call(schema, "list")
    domains = {one["domain"]: one for one in found["domains"]}
    assert list(domains) == ["default", "archive", "mail", "report"]
    mail = domains["mail"]
    assert mail["lease"] == "d:mail"
    assert mail["clients"] == ["m1", "m2"]
    assert mail["candidates"] == ["m1"]
    assert mail["standbys"] == ["m2"]  # m1 is the leader
    assert found["schema_standbys"] == ["m2"]
    assert domains["report"]["standbys"] == []
    assert [one["queue"] for one in mail["queues"]] == ["mail", "mail-slow"]
    assert mail["queues"][1]["claimed_by"] == "m2"
    assert not mail["queues"][1]["orphaned"]
    assert domains["archive"]["queues"][0]["orphaned"]
    leader = mail["leader"]
    assert (leader["holder"], leader["epoch"], leader["foreign"]) == ("m1", epoch, False)
    assert 0 <= leader["held_for"] < 3600
    assert leader["held_for"] + leader["expires_in"] == pytest.approx(3600)
    assert domains["report"]["leader"] is None
    assert (domains["default"]["leader"]["epoch"], domains["default"]["leader"]["foreign"]) == (
        None,
        True,
    )
    assert found["schema"]["holder"] == "m1"
    problems = [(one["level"], one["text"]) for one in found["problems"]]
    assert [text.partition(":")[0] for _, text in problems] == [
        'no client of domain "archive" wrote a heartbeat for 3h',
        'domain "report" has no leader, although 1 client could become leader',
        "go_1 is the leader of default. It is not a riverpy client and does not support domains",
    ]
    result = await command(schema, "list")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    row = next(line for line in lines if line[0] == "mail")
    assert row[1:3] == ["m1", str(epoch)]
    assert row[-5:] == ["2", "1", "m2", "mail,", "mail-slow"]
    assert next(line for line in lines if line[0] == "report")[-2] == "?"
    assert next(line for line in lines if line and line[0] == "@schema")[1] == "m1"
    assert "go_1 (not riverpy)" in result.stdout
    await schema.execute("DELETE FROM riverpy_lease WHERE name = '@schema'")
    await schema.execute("UPDATE river_leader SET leader_id = 'd1'")
    lines = (await command(schema, "list")).stdout.splitlines()
    assert next(line for line in lines if line.startswith("@schema")).split()[1:3] == [
        "as",
        "default",
    ]
    assert "fix: start a worker of it (riverpy worker --leader-domain archive)" in result.stdout


async def test_released_and_expired_leads(schema: Schema) -> None:
    """A released or expired lease has no holder, and is no reason to list a domain."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at) VALUES"
        " ('d:a', 1, 'x', '15 s', '-infinity'), ('d:b', 1, 'x', '15 s', now() - interval '1 s'),"
        " ('@schema', 1, 'x', '15 s', '-infinity')"
    )
    found = await call(schema, "list")
    assert [one["domain"] for one in found["domains"]] == ["default"]
    assert found["schema"] is None


async def test_move(schema: Schema) -> None:
    """A queue moves to another domain, to default, and back. The output has the old and the new
    domain, and the leaders are notified."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    heard = asyncio.Queue[Any]()
    async with schema.connected() as connection:
        epoch = await lead(connection, "report", "r1")
        await connection.add_listener(
            f"{schema.name}.riverpy_event", lambda *args: heard.put_nowait(json.loads(args[3]))
        )
        assert await call(schema, "move", "mail", "--to", "report") == {
            "queue": "mail",
            "before": "mail",
            "after": "report",
            "leader": "r1",
        }
        assert (await soon(heard.get()))["action"] == "ownership_changed"
        result = await command(schema, "move", "mail", "--to", "default")
        assert result.stdout == (
            "queue mail moved from domain report to default; domain default has no leader now\n"
        )
        assert (await soon(heard.get()))["action"] == "ownership_changed"
        assert epoch
    assert "mail" not in await owned(schema)
    assert (await call(schema, "move", "mail", "--to", "mail"))["before"] == "default"
    row = await schema.fetchrow("SELECT * FROM riverpy_queue_owner WHERE queue = 'mail'")
    assert row is not None
    assert (row["domain"], row["claimed_by"]) == ("mail", "riverpy domain")
    assert row["last_seen_at"] < row["claimed_at"]  # it is the domain's own


async def test_move_refuses(schema: Schema) -> None:
    """An unknown queue or domain, or a domain that has the queue already, is refused with exit code
    1 and advice, and nothing changes."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    assert "there is no queue 'nope'" in await refused(schema, "move", "nope", "--to", "mail")
    text = await refused(schema, "move", "mail", "--to", "nope")
    assert "no client or queue has the domain 'nope'" in text
    assert "riverpy domain claim mail --domain nope" in text
    text = await refused(schema, "move", "mail", "--to", "mail")
    assert text == "riverpy: queue 'mail' belongs to domain 'mail' already\n"
    text = await refused(schema, "move", "default", "--to", "default")
    assert "belongs to domain 'default' already" in text


async def test_claim(schema: Schema) -> None:
    """A queue without a domain, or of a domain without running clients, can be claimed. A queue of
    a domain with running clients needs --force."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    assert (await call(schema, "claim", "new", "--domain", "fresh"))["before"] == "default"
    assert (await call(schema, "claim", "newer", "--domain", "fresh"))["before"] == "default"
    lines = (await command(schema, "list")).stdout.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("new")] == ["never"] * 2
    assert any('domain "fresh" never had a client: ' in line for line in lines)
    assert (await call(schema, "claim", "old", "--domain", "report"))["before"] == "archive"
    text = await refused(schema, "claim", "mail", "--domain", "report")
    assert "queue 'mail' belongs to domain 'mail', which has 2 running clients" in text
    assert "--force" in text
    assert "already" in await refused(schema, "claim", "mail", "--domain", "mail")
    assert (await call(schema, "claim", "mail", "--domain", "report", "--force"))[
        "after"
    ] == "report"
    assert await owned(schema) == {
        "new": "fresh",
        "newer": "fresh",
        "old": "report",
        "mail": "report",
        "mail-slow": "mail",
        "report": "report",
    }


@pytest.mark.parametrize("written", ["mail", "report", "default"])
async def test_move_waits_for_fenced_writes(schema: Schema, written: str) -> None:
    """A move waits for a fenced transaction of the old or the new leader. During the wait the
    leader can renew its lease, and its next fence holds."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    to = "report" if written == "mail" else written
    async with schema.connected() as connection, schema.connected() as other:
        if written == "default":
            bid = await leader_elect(connection, None, leader_id="d1", ttl=TTL)
            assert bid is not None

            async def fence() -> None:
                assert await leader_fence_transaction(
                    connection,
                    None,
                    leader_id="d1",
                    elected_at=bid.acquired_at,
                    transaction_timeout=BOUND,
                    lock_timeout=BOUND,
                )
        else:
            epoch = await lead(connection, written, "holder")

            async def fence() -> None:
                await within(connection, written, epoch)

        transaction = connection.transaction()
        await transaction.start()
        await fence()
        moving = asyncio.create_task(command(schema, "move", "mail", "--to", to))
        await waits(schema, "for update$")
        assert not moving.done()
        await other.execute("UPDATE riverpy_lease SET expires_at = now() + ttl")
        await other.execute("UPDATE river_leader SET expires_at = now() + interval '60 s'")
        assert (await owned(schema))["mail"] == "mail"
        await transaction.commit()
        result = await soon(moving)
        assert (result.exit_code, result.stderr) == (0, "")
        async with connection.transaction():
            await fence()
    assert (await owned(schema)).get("mail", "default") == to


async def test_move_gives_up(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move fails, with an error that names the reason, if a leader's transaction does not end."""
    monkeypatch.setattr(_connected, "STATEMENT_TIMEOUT", 0.5)
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    async with schema.connected() as connection:
        epoch = await lead(connection, "mail", "m1")
        async with connection.transaction():
            await within(connection, "mail", epoch)
            text = await refused(schema, "move", "mail", "--to", "report")
    assert text == "riverpy: waiting for the leaders' transactions took longer than 0.5 s\n"


async def test_two_moves_at_once(schema: Schema) -> None:
    """Two moves of one queue at the same time are both done, one after the other, without a
    deadlock."""
    await schema.execute(CLIENTS)
    await schema.execute(OWNERS)
    database = DatabaseSettings(schema.url, schema.name)
    async with schema.connected() as connection:
        epoch = await lead(connection, "mail", "m1")
        await lead(connection, "report", "r1")
        async with connection.transaction():
            await within(connection, "mail", epoch)
            moves = [
                asyncio.create_task(assign_queue_to_domain(database, "mail", to, lambda _: None))
                for to in ("report", "archive")
            ]
            await waits(schema, "for update$", 2)
    befores = [(await soon(move))[0] for move in moves]
    done = dict(zip(("report", "archive"), befores, strict=True))
    last = (await owned(schema))["mail"]
    other = ({"report", "archive"} - {last}).pop()
    assert done == {other: "mail", last: other}


async def test_old_tables(fresh_database_url: str) -> None:
    """Without the tables of domains the text has the command that makes them."""
    await Migrator(fresh_database_url).up()
    await Migrator(fresh_database_url, line="riverpy").up(target=5)
    for args in (["list"], ["move", "a", "--to", "b"], ["claim", "a", "--domain", "b"]):
        result = await asyncio.to_thread(
            invoke, "domain", *args, "--database-url", fresh_database_url
        )
        assert (result.exit_code, result.stdout) == (1, "")
        assert "riverpy migrate up --line riverpy --database-url" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["move", "Mail", "--to", "a"],
        ["move", "mail", "--to", "a b"],
        ["move", "mail", "--to", ""],
        ["claim", "mail", "--domain", "x" * 65],
        ["claim", "mail", "--domain", "default"],
        ["claim", "mail"],
        ["move", "mail"],
    ],
)
def test_wrong_names(args: list[str]) -> None:
    """A name that breaks the rule is refused before anything is asked, with exit code 2."""
    result = invoke("domain", *args, "--database-url", UNREACHABLE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_failure_is_one_line() -> None:
    """No database is one line, nothing on stdout, and no password."""
    for args in (["list"], ["move", "a", "--to", "b"], ["claim", "a", "--domain", "b"]):
        result = invoke("domain", *args, "--json", "--database-url", UNREACHABLE)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("riverpy: cannot connect to 127.0.0.1")
        assert "s3cret" not in result.stderr
