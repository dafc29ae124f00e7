"""The state of an effect that runs at most once: how the life of its claimant decides it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy import Claim, Client, Config, Execution, ExecutionState
from riverpy._calls import executions
from riverpy._log_events import EXECUTION_FAILURE_NOT_RECORDED
from tests.kit.fleet import ROOT

if TYPE_CHECKING:
    from typing import Any

    from tests._database import Schema

SHORTEN = "update riverpy_client set dead_after = interval '0.3 s'"
"""Shortens the wait of the test. The next heartbeat writes the client's own value again."""
IN_PROGRESS, UNKNOWN = ExecutionState.IN_PROGRESS, ExecutionState.UNKNOWN


async def refuse(_claim: Claim) -> None:
    """A function that must not run."""
    raise AssertionError("the function ran a second time")


async def ask(client: Client, key: str = "k") -> Execution[None]:
    """Return the state of the key, as another caller gets it."""
    return await client.run_at_most_once(key, refuse)


async def until_state(client: Client, state: ExecutionState) -> None:
    """Wait until another caller gets this state."""
    while (await ask(client)).state != state:
        await anyio.sleep(0.02)


async def test_life_of_the_claimant(schema: Schema) -> None:
    """While the claimant is alive, its effect is in progress. If the claimant is frozen for longer
    than its `dead_after`, the effect becomes unknown, and it is in progress again after the
    claimant continues. After kill -9 it becomes unknown and stays so, also when the leader has
    deleted the row of the dead client."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.leases.singletons.claimant", schema.url, schema.name, "k"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip().isdigit()
        async with Client(schema.url, config=Config(schema=schema.name, id="other")) as client:
            assert (await ask(client)).state == IN_PROGRESS
            process.send_signal(signal.SIGSTOP)
            assert (await ask(client)).state == IN_PROGRESS
            await schema.execute(SHORTEN)
            await until_state(client, UNKNOWN)
            process.send_signal(signal.SIGCONT)
            await until_state(client, IN_PROGRESS)
            process.kill()
            await process.wait()
            assert (await ask(client)).state == IN_PROGRESS
            await schema.execute(SHORTEN)
            await until_state(client, UNKNOWN)
            await schema.execute(
                "delete from riverpy_client;"
                " update riverpy_exec set claimed_at = claimed_at - interval '10 minutes'"
            )
            answer = await ask(client)
            assert (answer.state, answer.claimed_by) == (UNKNOWN, "claimant")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("claimed", "started", "heartbeat", "dead_after", "expected"),
    [
        ("-10 s", None, None, None, IN_PROGRESS),
        ("-61 s", None, None, None, UNKNOWN),
        ("infinity", None, None, None, UNKNOWN),
        ("-1 hour", "-2 hours", "+900 ms", "1 s", IN_PROGRESS),
        ("-1 hour", "-2 hours", "-90 s", "2 minutes", IN_PROGRESS),
        ("-9 s", "-2 hours", "-11 s", "10 s", IN_PROGRESS),
        ("+1 hour", "-2 hours", "-9 s", "10 s", IN_PROGRESS),
        ("-1 hour", "-2 hours", "+1 hour", "1 ms", UNKNOWN),
        # a later client has the id: the claimant was not registered, or is dead
        ("-61 s", "-30 s", "0 s", "2 minutes", UNKNOWN),
        ("-9 s", "-8 s", "0 s", "2 minutes", IN_PROGRESS),
        ("-11 s", "-8 s", "0 s", "10 s", UNKNOWN),
        # no client could write a heartbeat while the server was down
        ("-2 years", "-3 years", "-2 years", "1 year", IN_PROGRESS),
        ("-2 years", "-1 year", "-2 years", "1 year", UNKNOWN),
    ],
)
async def test_rows_of_the_claimant(
    schema: Schema,
    claimed: str,
    started: str | None,
    heartbeat: str | None,
    dead_after: str | None,
    expected: ExecutionState,
) -> None:
    """A claimant is alive if its claim, or a heartbeat of the run that claimed, is recent by its
    own limit; without heartbeats, for a minute. After a restart of the server the time begins
    again. Times are relative to the server's present time."""
    await schema.execute(
        f"""
        create function pg_temp.at(text) returns timestamptz language sql as
          $$select case $1 when 'infinity' then $1::timestamptz else now() + $1::interval end$$;
        insert into riverpy_exec (key, epoch, claimed_by, claimed_at)
          values ('k', 1, 'gone', pg_temp.at('{claimed}'));
        """
    )
    if started is not None:
        await schema.execute(
            f"""
            insert into riverpy_client (client_id, queues, kinds, candidate, poll_only, version,
              dead_after, started_at, heartbeat_at)
            values ('gone', '{{}}', '{{}}', true, false, '1', '{dead_after}',
              clock_timestamp() + '{started}', clock_timestamp() + '{heartbeat}')
            """
        )
    async with Client(schema.url, config=Config(schema=schema.name, id="other")) as client:
        assert (await ask(client)).state == expected


async def test_failure_that_cannot_be_recorded(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, log: list[Any]
) -> None:
    """If the failure of a function cannot be recorded, this is logged, and the next call of the
    client records it. Until then other callers get that the effect is in progress."""
    monkeypatch.setattr(executions, "CLAIM_RELEASE_TIMEOUT", 0.2)

    async def fail(_claim: Claim) -> None:
        await connection.execute("begin; lock table riverpy_exec in exclusive mode")
        raise LookupError("bounced")

    config = Config(schema=schema.name, id="claimant")
    async with Client(schema.url, config=config) as client, schema.connected() as connection:
        with pytest.raises(LookupError):
            await client.run_at_most_once("k", fail)
        await connection.execute("commit")
        (line,) = [one for one in log if one["event"] == EXECUTION_FAILURE_NOT_RECORDED]
        assert line["key"] == "k"
        async with Client(schema.url, config=Config(schema=schema.name, id="other")) as other:
            assert (await ask(other)).state == IN_PROGRESS
            assert (await ask(client)).state == UNKNOWN
            assert (await ask(other)).state == UNKNOWN
