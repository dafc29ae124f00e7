"""What an operator sees of clients of leader domains at work, and does to them."""

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
    """What a command prints that succeeds; the clients of the test log to the same stream."""
    options = ("--database-url", schema.url, "--schema", schema.name, "--json")
    result = await asyncio.to_thread(invoke, *args, *options)
    assert result.exit_code == 0
    (printed,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return json.loads(printed)


async def test_fleets_that_are_well(rig: Rig, schema: Schema) -> None:
    """Of two domains at work beside `default` the commands tell who leads which, and find nothing
    wrong; nor where there is no client of `default`."""
    async with (
        member(rig, "m", "mail", **LONG) as mail,
        member(rig, "r", "report", **LONG) as report,
    ):
        await mail.leads()
        await report.leads()
        await rig.until("SELECT count(*) FROM riverpy_lease WHERE expires_at >= now()", 3)
        assert (await call(schema, "doctor"))["level"] == "ok"
        async with member(rig, "d", None, **LONG) as default:
            await default.leads()
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
    """The leader of a domain resigns when it is asked to, another of the domain takes over, and
    leaders of other domains lead on."""
    async with member(rig, "a", "mail", **LONG) as first, member(rig, "d", None, **LONG) as default:
        await first.leads()
        await default.leads()
        async with member(rig, "b", "mail", **LONG) as second:
            result = await call(schema, "leader", "resign", "--domain", "mail")
            await first.leads(is_leader=False)
            await second.leads()
        assert result["resigned"]
        assert (result["before"]["leader_id"], result["after"]["leader_id"]) == ("a", "b")
        assert result["after"]["epoch"] > result["before"]["epoch"]
        assert default.client.is_leader


async def test_move_between_running_leaders(rig: Rig, schema: Schema) -> None:
    """A queue is moved under two leaders at work, and told of while clients of the old domain work
    it."""
    async with (
        member(rig, "m", "mail", "mail", "slow", **LONG) as mail,
        member(rig, "r", "report", **LONG) as report,
    ):
        await mail.leads()
        await report.leads()
        done = await call(schema, "domain", "move", "slow", "--to", "report")
        assert done == {"queue": "slow", "before": "mail", "after": "report", "leader": "r"}
        assert await owners(rig) == {"mail": "mail", "report": "report", "slow": "report"}
        listed = await call(schema, "domain", "list")
        assert [one["data"]["queue"] for one in listed["problems"]] == ["slow"]
        assert listed["problems"][0]["data"]["clients"] == ["m"]


async def test_move_is_no_sign_of_life(rig: Rig, schema: Schema) -> None:
    """A queue that is given by hand to a domain that is silent is as silent as that; one that is
    given to a domain which never had a client is an orphan at once."""
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
    """The command that the error of a refused start names lets the client start."""
    async with member(rig, "m", "mail", "one", **LONG):
        with pytest.raises(DomainConflictError) as raised:
            async with member(rig, "p", "pay", "one", **LONG):
                pass
        (said,) = re.findall("`riverpy ([^`]*)`", str(raised.value))
        assert (await call(schema, *said.split()))["before"] == "mail"
        async with member(rig, "p", "pay", "one", **LONG) as pay:
            await pay.leads()
    assert await owners(rig) == {"one": "pay"}
