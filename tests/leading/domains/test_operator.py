"""Commands for an operator of leader domains, with running clients."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import DomainConflictError
from tests.cli.test_command import invoke
from tests.leading.domains.members import LONG, member, owners
from tests.tools.doctor.conftest import long_timeouts

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.work.rig import Rig

__all__ = ["long_timeouts"]


async def call(schema: Schema, *args: str) -> Any:
    """Return the output of a command that succeeds. The clients of the test log to the same
    stream."""
    options = ("--database-url", schema.url, "--schema", schema.name, "--json")
    result = await asyncio.to_thread(invoke, *args, *options)
    assert result.exit_code == 0
    (printed,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return json.loads(printed)


async def test_healthy_domains(rig: Rig, schema: Schema) -> None:
    """With two domains and `default`, the commands show the leader of each and find no problem.
    This is the same without a client of `default`."""
    async with (
        member(rig, "m", "mail", **LONG) as mail,
        member(rig, "r", "report", **LONG) as report,
    ):
        await mail.until_leader()
        await report.until_leader()
        await rig.until("SELECT count(*) FROM riverpy_lease WHERE expires_at >= now()", 3)
        assert (await call(schema, "doctor"))["level"] == "ok"
        async with member(rig, "d", None, **LONG) as default:
            await default.until_leader()
            assert (await call(schema, "doctor"))["level"] == "ok"
            listed = await call(schema, "domain", "list")
            looked = await call(schema, "top", "--once")
    assert listed["problems"] == []
    domains = {one["domain"]: one for one in listed["domains"]}
    assert {name: one["leader"]["holder"] for name, one in domains.items()} == {
        "default": "d",
        "mail": "m",
        "report": "r",
    }
    assert [one["queue"] for one in domains["mail"]["queues"]] == ["mail"]
    assert domains["report"]["candidates"] == ["r"]
    assert {one["name"]: one["leader"]["leader_id"] for one in looked["domains"]} == {
        "mail": "m",
        "report": "r",
    }


async def test_resign(rig: Rig, schema: Schema) -> None:
    """On request the leader of a domain resigns, and another client of the domain becomes leader.
    Leaders of other domains keep their leases."""
    async with member(rig, "a", "mail", **LONG) as first, member(rig, "d", None, **LONG) as default:
        await first.until_leader()
        await default.until_leader()
        async with member(rig, "b", "mail", **LONG) as second:
            result = await call(schema, "leader", "resign", "--domain", "mail")
            await first.until_leader(is_leader=False)
            await second.until_leader()
        assert result["resigned"]
        assert (result["before"]["leader_id"], result["after"]["leader_id"]) == ("a", "b")
        assert result["after"]["epoch"] > result["before"]["epoch"]
        assert default.client.is_leader


async def test_move_between_running_leaders(rig: Rig, schema: Schema) -> None:
    """A queue is moved while both leaders run. Clients of the old domain that work it log the
    move."""
    async with (
        member(rig, "m", "mail", "mail", "slow", **LONG) as mail,
        member(rig, "r", "report", **LONG) as report,
    ):
        await mail.until_leader()
        await report.until_leader()
        done = await call(schema, "domain", "move", "slow", "--to", "report")
        assert done == {"queue": "slow", "before": "mail", "after": "report", "leader": "r"}
        assert await owners(rig) == {"mail": "mail", "report": "report", "slow": "report"}
        listed = await call(schema, "domain", "list")
        assert [one["data"]["queue"] for one in listed["problems"]] == ["slow"]
        assert listed["problems"][0]["data"]["clients"] == ["m"]


async def test_move_is_no_heartbeat(rig: Rig, schema: Schema) -> None:
    """A queue that an operator assigns to a silent domain keeps the age of that domain's last
    heartbeat. One that is assigned to a domain that never had a client is orphaned at once."""
    await rig.schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)"
        " VALUES ('old', 'mail', 'x', now() - interval '9 minutes'), ('moved', 'pay', 'x', now())"
    )
    await call(schema, "domain", "move", "moved", "--to", "mail")
    await call(schema, "domain", "claim", "new", "--domain", "report")
    listed = await call(schema, "domain", "list")
    found = {one["domain"]: one["queues"] for one in listed["domains"]}
    moved, old = found["mail"]
    assert moved["last_seen_at"] == old["last_seen_at"]
    assert [one["orphaned"] for one in (moved, *found["report"])] == [False, True]


async def test_conflict_is_settled(rig: Rig, schema: Schema) -> None:
    """After the command that the error of a refused start names, the client starts."""
    async with member(rig, "m", "mail", "one", **LONG):
        with pytest.raises(DomainConflictError) as raised:
            async with member(rig, "p", "pay", "one", **LONG):
                pass
        (said,) = re.findall("`riverpy ([^`]*)`", str(raised.value))
        assert (await call(schema, *said.split()))["before"] == "mail"
        async with member(rig, "p", "pay", "one", **LONG) as pay:
            await pay.until_leader()
    assert await owners(rig) == {"one": "pay"}
