"""`riverpy leader`: the leader is shown, and requested to resign."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy.cli import _connected, leader, main
from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    from tests._database import Schema

    Command = Callable[..., Result]

LONG = {"elect_interval": timedelta(minutes=10), "leader_ttl": timedelta(minutes=25)}
"""Who resigned sits out for longer than a test takes."""


@pytest.fixture
def command(schema: Schema) -> Command:
    """Runs a command on the test's schema."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))

    def run(*args: str) -> Result:
        return runner.invoke(
            main, ["leader", *args, "--database-url", schema.url, "--schema", schema.name]
        )

    return run


async def call(command: Command, *args: str) -> tuple[int, Any]:
    """The exit code of a command, and the JSON that it prints."""
    result = await asyncio.to_thread(command, *args, "--json")
    assert result.stdout.count("\n") == 1
    return result.exit_code, json.loads(result.stdout)


async def seat(schema: Schema, leader_id: str, seconds: float) -> None:
    """Make a client the leader that receives no notifications."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ($1, now(), now() + make_interval(secs => $2))",
        leader_id,
        seconds,
    )


async def test_show(command: Command, schema: Schema) -> None:
    """The leader is shown with its lease, and the candidates with heartbeats."""
    assert await call(command, "show") == (
        0,
        {"leader": None, "candidates": [], "standbys": []},
    )
    text = (await asyncio.to_thread(command, "show")).stdout
    assert text == "there is no leader\n\nno client of riverpy takes part in leader election\n"
    await seat(schema, "host:1:abc", 3600)
    await schema.execute(
        "INSERT INTO riverpy_client"
        " (client_id, queues, kinds, candidate, poll_only, version, dead_after, heartbeat_at)"
        " SELECT name, '{}', '{}', name <> 'other', false, '1', '60 s', now() - age"
        " FROM (VALUES ('one', interval '0'), ('other', '0'), ('dead', '61 s')) AS v(name, age)"
    )
    code, shown = await call(command, "show")
    row = await schema.fetchrow("SELECT * FROM river_leader")
    assert row is not None
    assert code == 0
    assert [one["client_id"] for one in shown["candidates"]] == ["one"]
    expires_in = shown["leader"].pop("expires_in")
    assert 0 < expires_in <= 3600
    assert shown["leader"] == {
        "leader_id": "host:1:abc",
        "elected_at": row["elected_at"].isoformat().replace("+00:00", "Z"),
        "expires_at": row["expires_at"].isoformat().replace("+00:00", "Z"),
        "expired": False,
        "epoch": None,
    }
    text = (await asyncio.to_thread(command, "show")).stdout
    assert "host:1:abc" in text
    assert "unless renewed" in text


async def test_show_domain(command: Command, schema: Schema) -> None:
    """Of a domain its lease is shown, with the epoch, and its candidates; default's are its own."""
    await seat(schema, "plain", 3600)
    await schema.execute(
        "INSERT INTO riverpy_client"
        " (client_id, queues, kinds, candidate, poll_only, version, dead_after, domain)"
        " SELECT name, '{}', '{}', true, false, '1', '60 s', domain"
        " FROM (VALUES ('one', 'default'), ('two', 'mail'), ('three', 'other')) AS v(name, domain)"
    )
    text = (await asyncio.to_thread(command, "show", "--domain", "mail")).stdout
    assert text.splitlines()[-1].endswith("  ?")  # no report yet
    await schema.execute(
        "UPDATE riverpy_client SET leases = '{\"standby\": [\"d:mail\"]}' WHERE client_id = 'two';"
        "UPDATE riverpy_client SET leases = '{\"standby\": [\"default\"]}' WHERE client_id = 'one'"
    )
    assert (await call(command, "show", "--domain", "mail"))[1]["standbys"] == ["two"]
    text = (await asyncio.to_thread(command, "show")).stdout
    assert text.splitlines()[-1].endswith("  yes")
    assert (await call(command, "show", "--domain", "mail"))[1]["leader"] is None
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('d:mail', 7, 'two', '1 h', now() + interval '1 h'),"
        " ('d:other', 9, 'three', '15 s', '-infinity')"
    )
    _, shown = await call(command, "show", "--domain", "mail")
    assert (shown["leader"]["leader_id"], shown["leader"]["epoch"]) == ("two", 7)
    assert [one["client_id"] for one in shown["candidates"]] == ["two"]
    assert shown["standbys"] == []  # it is the leader
    text = (await asyncio.to_thread(command, "show", "--domain", "mail")).stdout
    assert text.splitlines()[-1].endswith("  leader")
    assert (await call(command, "show", "--domain", "other"))[1]["leader"] is None
    _, shown = await call(command, "show")
    assert (shown["leader"]["leader_id"], shown["leader"]["epoch"]) == ("plain", None)
    assert [one["client_id"] for one in shown["candidates"]] == ["one"]


async def test_resign_in_domain(command: Command, schema: Schema) -> None:
    """The request goes only to the holder of the domain's lease, with its epoch. A leader that
    receives no notifications stays the leader. Without a leader no request is sent."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('d:mail', 7, 'two', '1 h', '-infinity')"
    )
    assert (await call(command, "resign", "--domain", "mail"))[0] == 1
    await schema.execute("UPDATE riverpy_lease SET expires_at = now() + interval '1 h'")
    heard = asyncio.Queue[tuple[str, Any]]()
    async with schema.connected() as connection:
        for topic in ("riverpy_lease", "river_leadership"):
            await connection.add_listener(
                f"{schema.name}.{topic}",
                lambda *args: heard.put_nowait((args[2].split(".")[1], json.loads(args[3]))),
            )
        result = await asyncio.to_thread(command, "resign", "--domain", "mail", "--wait", "1ms")
        with anyio.fail_after(20):
            topic, message = await heard.get()
    assert result.exit_code == 1
    assert "two is still the leader after 1ms" in result.stdout
    assert topic == "riverpy_lease"
    assert message == {
        "v": 1,
        "lease": "d:mail",
        "epoch": 7,
        "holder": "two",
        "action": "resign_requested",
    }


async def test_wrong_domain(command: Command, schema: Schema) -> None:
    """An invalid name is refused, and an unknown one too, with similar names. Without the tables of
    domains the error names the command that creates them."""
    for verb in ("show", "resign"):
        result = await asyncio.to_thread(command, verb, "--domain", "No")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "a domain name must have" in result.stderr
    await schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by) VALUES ('a', 'mailing', 'x')"
    )
    for verb in ("show", "resign"):
        result = await asyncio.to_thread(command, verb, "--domain", "mailling")
        assert (result.exit_code, result.stdout) == (1, "")
        assert (
            "has the domain 'mailling'; did you mean 'mailing'? (see `riverpy domain list`)"
            in result.stderr
        )
    await schema.execute("UPDATE river_migration SET line = 'hidden' WHERE line = 'riverpy'")
    try:
        result = await asyncio.to_thread(command, "show", "--domain", "mail")
    finally:  # the schema is used again
        await schema.execute("UPDATE river_migration SET line = 'riverpy' WHERE line = 'hidden'")
    assert result.exit_code == 1
    assert "riverpy migrate up --line riverpy" in result.stderr


async def test_show_expired(command: Command, schema: Schema) -> None:
    """An expired lease is shown as expired."""
    await seat(schema, "gone", -1)
    _, shown = await call(command, "show")
    assert shown["leader"]["expired"]
    assert shown["leader"]["expires_in"] < 0
    assert "expired" in (await asyncio.to_thread(command, "show")).stdout


async def test_show_without_our_table(command: Command, schema: Schema) -> None:
    """Without the line `riverpy` the candidates are not known."""
    await schema.execute("UPDATE river_migration SET line = 'hidden' WHERE line = 'riverpy'")
    try:
        assert await call(command, "show") == (
            0,
            {"leader": None, "candidates": None, "standbys": None},
        )
        result = await asyncio.to_thread(command, "show")
    finally:  # the schema is used again
        await schema.execute("UPDATE river_migration SET line = 'riverpy' WHERE line = 'hidden'")
    assert "there is no leader" in result.stdout
    assert "riverpy migrate up" in result.stdout


async def test_resign_hands_over(command: Command, schema: Schema) -> None:
    """The leader resigns and pauses, so that another client becomes leader. Both are named."""
    rig = Rig(schema)
    rig.job(_nothing)
    async with rig.working(id="a", **LONG):
        await rig.until("SELECT leader_id FROM river_leader", "a")
        async with rig.working(id="b", **LONG):
            code, result = await call(command, "resign", "--wait", "40s")
            assert code == 0
            assert result["resigned"]
            assert (result["before"]["leader_id"], result["after"]["leader_id"]) == ("a", "b")
            async with rig.working(id="c", **LONG):
                told = await asyncio.to_thread(command, "resign", "--wait", "40s")
            assert told.stdout == "b resigned; c is the leader now\n"


async def test_nobody_obeys(command: Command, schema: Schema) -> None:
    """If the leader does not receive the request, the output says that it is still the leader."""
    await seat(schema, "deaf", 3600)
    result = await asyncio.to_thread(command, "resign", "--wait", "300ms")
    assert result.exit_code == 1
    assert "deaf is still the leader after 300ms" in result.stdout
    code, printed = await call(command, "resign", "--wait", "1ms")
    assert code == 1
    assert not printed["resigned"]
    assert printed["after"]["leader_id"] == "deaf"


@pytest.mark.parametrize("is_expired", [True, False])
async def test_nobody_leads(command: Command, schema: Schema, *, is_expired: bool) -> None:
    """Without a leader no request is sent, and the exit code is 1."""
    if is_expired:
        await seat(schema, "gone", -1)
    result = await asyncio.to_thread(command, "resign")
    assert result.exit_code == 1
    assert result.stdout.startswith("there is no leader")
    assert (await call(command, "resign"))[0] == 1


async def test_resigned_and_nobody_yet(
    command: Command, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another candidate there is no leader until the old one has paused for an interval."""
    looks: list[object] = []
    look = leader._read_leader

    async def late(*args: Any) -> object:
        """All reads but the first happen after the leader has resigned."""
        found = await look(*args)
        while looks and found is not None:
            await anyio.sleep(0.01)
            found = await look(*args)
        looks.append(found)
        return found

    monkeypatch.setattr(leader, "_read_leader", late)
    monkeypatch.setattr(leader, "LEADER_READ_INTERVAL", 0)
    rig = Rig(schema)
    rig.job(_nothing)
    async with rig.working(id="a", **LONG):
        await rig.until("SELECT leader_id FROM river_leader", "a")
        result = await asyncio.to_thread(command, "resign", "--wait", "300ms")
        assert (result.exit_code, result.stdout) == (0, "a resigned; there is no leader yet\n")


async def _nothing(job: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("verb", "table"),
    [("show", "river_leader"), ("show", "riverpy_client"), ("resign", "river_leader")],
)
async def test_locked_table(
    command: Command, schema: Schema, monkeypatch: pytest.MonkeyPatch, verb: str, table: str
) -> None:
    """A locked table causes an error after a timeout; its text names the statement."""
    monkeypatch.setattr(_connected, "STATEMENT_TIMEOUT", 0.5)
    async with schema.connected() as connection, connection.transaction():
        await connection.execute(f"LOCK TABLE {schema.name}.{table} IN ACCESS EXCLUSIVE MODE")
        with anyio.fail_after(20):
            result = await anyio.to_thread.run_sync(command, verb, abandon_on_cancel=True)
    assert result.exit_code != 0
    assert "reading the" in result.stderr
