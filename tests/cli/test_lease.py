"""`riverpy lease`: leases are listed and shown, and their holders requested to release them."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from riverpy import LeaseManager
from riverpy._dsn import PG_VARIABLES
from riverpy._log_events import SINGLETON_LOST_ITS_LEASE
from riverpy.cli import lease, main
from tests.leases.singletons.rig import Task, make_client, running, soon

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    from tests._database import Schema

    Command = Callable[..., Result]

LONG = timedelta(minutes=10)
"""A holder that resigned does not try again during a test."""


@pytest.fixture
def command(schema: Schema) -> Command:
    """Runs a command on the test's schema."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))

    def run(*args: str, typed: str | None = None) -> Result:
        line = ["lease", *args, "--database-url", schema.url, "--schema", schema.name]
        return runner.invoke(main, line, input=typed)

    return run


async def call(command: Command, *args: str) -> tuple[int, Any]:
    """The exit code of a command, and the JSON that it prints."""
    result = await asyncio.to_thread(command, *args, "--json")
    assert result.stdout.count("\n") == 1
    return result.exit_code, json.loads(result.stdout)


async def test_list_and_show(command: Command, schema: Schema) -> None:
    """Leases are listed by name with their holders, epochs, times and states. Only with `--all`
    the leases of domains and of the schema are listed. One lease is shown in the same form."""
    result = await asyncio.to_thread(command, "list")
    assert (result.exit_code, result.stdout.split(":")[0]) == (0, "there is no lease")
    assert await call(command, "list") == (
        0,
        {"leases": [], "clients_without_report": []},
    )
    async with LeaseManager(schema.url, schema=schema.name, holder="host:1:a") as manager:
        freed = await manager.try_acquire("mailbox")
        assert freed is not None
        await manager.release(freed)
        held = await manager.try_acquire("projection:totals")
        assert held is not None
        await schema.execute(
            "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
            " SELECT name, 7, 'gone', '15 s', now() + age FROM (VALUES"
            " ('s:old', interval '-90 s'), ('s:set-back', '1 h'), ('d:mail', '15 s'),"
            " ('@schema', '15 s'), ('unknown', '15 s')) AS v(name, age)"
        )
        code, printed = await call(command, "list")
        text = (await asyncio.to_thread(command, "list")).stdout
        _, shown = await call(command, "show", "projection:totals")
    assert code == 0
    assert [(one["name"], one["state"]) for one in printed["leases"]] == [
        ("mailbox", "released"),
        ("old", "expired"),
        ("projection:totals", "held"),
        ("set-back", "expired"),
    ]
    assert {one["scope"] for one in printed["leases"]} == {"user"}
    released, old, totals, _ = printed["leases"]
    assert (released["holder"], released["expires_at"], released["expires_in"]) == (
        "host:1:a",
        None,
        None,
    )
    assert -120 < old["expires_in"] <= -90
    row = await schema.fetchrow("SELECT * FROM riverpy_lease WHERE name = 's:projection:totals'")
    assert row is not None
    assert 0 < totals.pop("expires_in") <= 15
    assert shown["lease"].pop("expires_in") <= 15
    assert shown["lease"] == totals
    assert (totals["holder"], totals["epoch"]) == ("host:1:a", held.epoch)
    assert totals["acquired_at"] == row["acquired_at"].isoformat().replace("+00:00", "Z")
    assert totals["expires_at"] is not None
    lines = text.splitlines()
    assert lines[0].split() == ["NAME", "HOLDER", "EPOCH", "SINCE", "STANDBYS", "LEASE"]
    for line, state in zip(
        lines[1:],
        (
            "released",
            "expired 1m30s ago",
            "held: expires in 15s",
            "the server's clock was set back",
        ),
        strict=True,
    ):
        assert state in line.replace("1m31s", "1m30s").replace("in 14s", "in 15s")

    _, printed = await call(command, "list", "--all")
    scopes = {one["name"]: one["scope"] for one in printed["leases"]}
    assert scopes.items() >= {"mail": "domain", "@schema": "schema", "unknown": "other"}.items()
    assert len(scopes) == 7
    result = await asyncio.to_thread(command, "list", "--limit", "2")
    assert len(result.stdout.splitlines()) == 3
    assert "there are more than 2 leases" in result.stderr


REPORTS = """
INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version, dead_after,
    heartbeat_at, started_at, leases)
SELECT id, '{}', '{}', true, true, '1', '60 s', now() - age, now() - n * interval '1 h', leases
FROM (VALUES
    (4, 'one', interval '3 s', '{"standby": [], "lags": {"s:totals":
        {"epoch": 7, "count": 40, "age": 65, "reported_ago": 2}}}'::jsonb),
    (3, 'two', '1 s', '{"standby": ["s:totals", "s:other"]}'),
    (2, 'three', '1 s', '{"standby": ["s:totals"]}'),
    (1, 'silent', '2 min', '{"standby": ["s:totals"]}'),
    (0, 'old', '1 s', null)) AS v(n, id, age, leases)
"""


async def test_standbys_and_lag(command: Command, schema: Schema) -> None:
    """The live clients that stand by for a lease are named, in the order of their starts, and also
    the clients that do not report it. The lag of the holder is shown with its age, but only in the
    term in which it was reported."""
    await schema.execute(REPORTS)
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:totals', 7, 'one', '1 h', now() + interval '1 h')"
    )
    _, printed = await call(command, "show", "totals")
    shown = printed["lease"]
    assert (shown["standbys"], printed["clients_without_report"]) == (["two", "three"], ["old"])
    assert (shown["lag"]["count"], shown["lag"]["age"]) == (40, 65.0)
    assert 5 <= shown["lag"]["reported_ago"] < 60
    assert (await call(command, "list"))[1]["leases"][0]["standbys"] == ["two", "three"]
    text = (await asyncio.to_thread(command, "show", "totals")).stdout
    assert "40 items, the oldest 1m5s, reported " in text
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["STANDBY", "two", "three"]
    assert 'clients without a complete report: "old"' in text
    for change in ("epoch = 8", "holder = 'two'", "expires_at = now() - ttl"):
        await schema.execute(
            "UPDATE riverpy_lease SET epoch = 7, holder = 'one', expires_at = now() + ttl"
        )
        await schema.execute(f"UPDATE riverpy_lease SET {change}")
        assert (await call(command, "show", "totals"))[1]["lease"]["lag"] is None
    await schema.execute("UPDATE riverpy_client SET leases = '{}'")
    text = (await asyncio.to_thread(command, "show", "totals")).stdout
    assert "no running client reports that it stands by" in text


async def test_singleton_moves_to_another_client(
    command: Command, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a request the holder of a singleton releases it, another client acquires it, and the
    command names the holder. Without a terminal or a yes no request is sent."""
    one, two = make_client(schema, "one", ttl=3 * LONG, interval=LONG), make_client(schema, "two")
    tasks = Task(), Task()
    one.singleton("totals", tasks[0])
    two.singleton("totals", tasks[1])
    async with running(one):
        first = await soon(tasks[0].began)
        async with running(two):
            result = await asyncio.to_thread(command, "resign", "totals")
            assert (result.exit_code, result.stdout) == (2, "")
            assert "add --yes" in result.stderr
            terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
            monkeypatch.setattr(lease, "sys", terminal)
            result = await asyncio.to_thread(command, "resign", "totals", typed="n\n")
            assert result.exit_code == 130
            assert "Ask one to release the lease 'totals'" in result.stderr
            assert first.is_held
            with capture_logs() as entries:
                code, printed = await call(command, "resign", "totals", "--yes", "--wait", "40s")
                second = await soon(tasks[1].began)
            assert tasks[0].ended.qsize() == 1
            shown = (await call(command, "show", "totals"))[1]["lease"]
    assert (code, printed["resigned"]) == (0, True)
    levels = [one["log_level"] for one in entries if one["event"] == SINGLETON_LOST_ITS_LEASE]
    assert levels == ["info"]
    assert (printed["before"]["holder"], printed["before"]["epoch"]) == ("one", first.epoch)
    after = printed["after"]
    assert after["holder"] == "two"
    assert (shown["holder"], shown["epoch"], shown["state"]) == ("two", second.epoch, "held")
    assert second.epoch > first.epoch
    assert " LAST HOLDER " in (await asyncio.to_thread(command, "show", "totals")).stdout
    result = await asyncio.to_thread(command, "resign", "totals", "--yes")
    assert (result.exit_code, result.stdout) == (
        1,
        "the lease 'totals' has no holder: two held it last (released)\n",
    )


async def test_holder_keeps_its_lease(command: Command, schema: Schema) -> None:
    """If the holder does not receive the request, the exit code is 1, and the text gives reasons.
    The request is sent with the epoch of the term."""
    heard = asyncio.Queue[Any]()
    async with (
        LeaseManager(schema.url, schema=schema.name, holder="polls") as manager,
        schema.connected() as connection,
    ):
        held = await manager.try_acquire("mailbox")
        assert held is not None
        await connection.add_listener(
            f"{schema.name}.riverpy_lease", lambda *args: heard.put_nowait(json.loads(args[3]))
        )
        result = await asyncio.to_thread(command, "resign", "mailbox", "--yes", "--wait", "1ms")
        assert result.exit_code == 1
        assert "polls still holds the lease 'mailbox' after 1ms: " in result.stdout
        assert "because it is a LeaseManager" in result.stdout
        message = await soon(heard)
        assert (message["lease"], message["epoch"]) == ("s:mailbox", held.epoch)
        assert message["action"] == "resign_requested"
        code, printed = await call(command, "resign", "mailbox", "--yes", "--wait", "1ms")
        assert (code, printed["resigned"]) == (1, False)
        assert printed["after"]["epoch"] == held.epoch


async def test_wait_ends_with_the_term(
    command: Command, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends when the lease is released, acquired by another or the same holder, expired, or
    its row deleted. A term that ended during the question gets no request."""
    request = lease.lease_request_resign
    is_requested: list[bool] = []

    async def change_then_request(change: str, *args: Any, **kwargs: Any) -> bool:
        async with schema.connected() as connection:  # this is another event loop
            await connection.execute(change)
        is_requested.append(await request(*args, **kwargs))
        return is_requested[-1]

    monkeypatch.setattr(lease, "NEXT_HOLDER_WAIT", 0.1)
    for change, text in (
        ("UPDATE riverpy_lease SET expires_at = '-infinity'", "(released); it has no holder yet"),
        ("UPDATE riverpy_lease SET expires_at = now() - ttl", "(expired); it has no holder yet"),
        ("UPDATE riverpy_lease SET epoch = 8, holder = 'b'", "any more; b holds it now"),
        ("UPDATE riverpy_lease SET epoch = 8", "a released the lease 'x' and acquired it again"),
        ("DELETE FROM riverpy_lease", "any more; it has no holder yet"),
    ):
        await schema.execute("DELETE FROM riverpy_lease")
        await schema.execute(
            "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
            " VALUES ('s:x', 7, 'a', '1 h', now() + interval '1 h')"
        )
        monkeypatch.setattr(lease, "lease_request_resign", partial(change_then_request, change))
        result = await asyncio.to_thread(command, "resign", "x", "--yes", "--wait", "40s")
        assert (result.exit_code, result.stderr) == (0, "")
        assert text in result.stdout
    assert is_requested == [False] * 5


async def test_wrong_names(command: Command, schema: Schema) -> None:
    """An invalid name is refused. An unknown name is refused with similar names, and the name of a
    domain with the commands for it."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:projection:totals', 7, 'a', '15 s', '-infinity'),"
        " ('d:mail', 7, 'a', '15 s', '-infinity')"
    )
    for verb in (["show"], ["resign", "--yes"]):
        for name, code, text in (
            ("a b", 2, "the name of a lease must have printable ASCII characters"),
            (
                "projection:total",
                1,
                "the name 'projection:total'; did you mean 'projection:totals'? (see `riverpy",
            ),
            ("zzz", 1, "the name 'zzz' (see `riverpy lease list`)"),
            ("mail", 1, "`riverpy leader show --domain mail`"),
        ):
            result = await asyncio.to_thread(command, *verb, name)
            assert (result.exit_code, result.stdout) == (code, "")
            assert text in result.stderr


async def test_missing_table(command: Command, schema: Schema) -> None:
    """Without the line `riverpy` each command fails with the command that creates the table."""
    await schema.execute("UPDATE river_migration SET line = 'hidden' WHERE line = 'riverpy'")
    try:
        for args in (["list"], ["show", "x"], ["resign", "x", "--yes"]):
            result = await asyncio.to_thread(command, *args)
            assert (result.exit_code, result.stdout) == (1, "")
            assert "lacks the table of leases: run `riverpy migrate up --line riverpy" in (
                result.stderr
            )
    finally:  # the schema is used again
        await schema.execute("UPDATE river_migration SET line = 'riverpy' WHERE line = 'hidden'")
