"""`riverpy queue`: what it lists, what it changes, and its failures."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import pytest

from riverpy import EventKind, InsertOpts, QueueConfig
from riverpy._postgres import queues
from tests.cli.test_command import UNREACHABLE, invoke
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from click.testing import Result

    from riverpy import Job
    from tests._database import Schema

IN_MAIL = InsertOpts(queue="mail")
PAUSED = "SELECT array_agg(name ORDER BY name) FROM river_queue WHERE paused_at IS NOT NULL"
ROWS = """
INSERT INTO river_queue (name, created_at, metadata, paused_at, updated_at) VALUES
  ('mail', '2026-03-01Z', '{"team": "a"}', NULL, '2026-03-03 04:05:06Z'),
  ('default', '2026-03-01Z', '{}', NULL, '2026-03-02Z'),
  ('report', '2026-03-01Z', '{}', '2026-03-04Z', '2026-03-04Z')
"""


async def command(schema: Schema, *args: str) -> Result:
    """Run `riverpy queue` on the test's schema."""
    options = ("--database-url", schema.url, "--schema", schema.name)
    return await asyncio.to_thread(invoke, "queue", *args, *options)


async def test_list(schema: Schema) -> None:
    """Each row is a line or an object. A note says that there are more rows than shown."""
    await schema.execute(ROWS)
    result = await command(schema, "list")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [re.split(" {2,}", line) for line in result.stdout.splitlines()] == [
        ["QUEUE", "PAUSED SINCE", "LAST USED", "CREATED"],
        ["default", "-", "2026-03-02 00:00:00", "2026-03-01 00:00:00"],
        ["mail", "-", "2026-03-03 04:05:06", "2026-03-01 00:00:00"],
        ["report", "2026-03-04 00:00:00", "2026-03-04 00:00:00", "2026-03-01 00:00:00"],
    ]
    result = await command(schema, "list", "--json", "--limit", "2")
    queues = json.loads(result.stdout)["queues"]
    assert [one["name"] for one in queues] == ["default", "mail"]
    assert queues[1] == {
        "name": "mail",
        "created_at": "2026-03-01T00:00:00Z",
        "metadata": {"team": "a"},
        "paused_at": None,
        "updated_at": "2026-03-03T04:05:06Z",
    }
    assert result.stderr == "there are more than 2 queues: raise --limit\n"
    assert (await command(schema, "list", "--limit", "3")).stderr == ""


async def test_pause_and_resume(schema: Schema) -> None:
    """Each named queue is reported, also one that needs no change. Other queues are not changed."""
    await schema.execute(ROWS)
    result = await command(schema, "pause", "mail", "report")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "queue mail is paused; running jobs keep running",
        "queue report has been paused since 2026-03-04 00:00:00 UTC",
    ]
    assert await schema.fetchval(PAUSED) == ["mail", "report"]
    result = await command(schema, "resume", "mail", "default", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "queues": [
            {"name": "mail", "action": "resumed", "message": "queue mail is resumed"},
            {"name": "default", "action": "none", "message": "queue default is not paused"},
        ]
    }
    assert await schema.fetchval(PAUSED) == ["report"]


async def test_all(schema: Schema) -> None:
    """`*` means all queues. If there is none, the error says so."""
    for verb in ("pause", "resume"):
        result = await command(schema, verb, "*")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == (
            "riverpy: there is no queue: one exists after a client has worked it\n"
        )
    await schema.execute(ROWS)
    result = await command(schema, "pause", "*")
    assert (result.exit_code, result.stdout) == (
        0,
        "all queues are paused; running jobs keep running\n",
    )
    assert await schema.fetchval(PAUSED) == ["default", "mail", "report"]
    result = await command(schema, "resume", "*")
    assert (result.exit_code, result.stdout) == (0, "all queues are resumed\n")
    assert await schema.fetchval(PAUSED) is None


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_missing_queue(schema: Schema, verb: str) -> None:
    """A queue that is not there is a line of its own and exit code 1; the others are changed
    (OP-04)."""
    await schema.execute(ROWS)
    result = await command(schema, verb, "nope", "mail")
    assert result.exit_code == 1
    assert result.stdout.startswith("queue mail is ")
    assert result.stderr == (
        "riverpy: there is no queue 'nope': a queue exists after a client has worked it\n"
    )


async def test_all_or_nothing(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is not stored if the clients cannot be notified."""
    await schema.execute(ROWS)

    async def fail(*_: object) -> None:
        raise ConnectionResetError("the connection is lost")

    monkeypatch.setattr(queues, "send_control_message", fail)
    result = await command(schema, "pause", "mail")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "riverpy: changing queue mail failed: the connection is lost\n"
    assert await schema.fetchval(PAUSED) == ["report"]


async def test_worker_obeys(schema: Schema) -> None:
    """A worker claims nothing from a paused queue, lets its running job finish, and claims again
    when the queue is resumed (OP-09)."""
    rig = Rig(schema)
    begun, go_on = asyncio.Queue[int](), asyncio.Event()

    @rig.job
    async def work(job: Job[Task]) -> None:
        begun.put_nowait(job.args.n)
        await go_on.wait()

    async with rig.working(queues={"mail": QueueConfig(max_workers=1)}) as client:
        await client.insert(Task(n=1), IN_MAIL)
        assert await begun.get() == 1
        result = await command(schema, "pause", "mail")
        assert result.stdout == "queue mail is paused; running jobs keep running\n"
        assert (await rig.event()).kind is EventKind.QUEUE_PAUSED
        await client.insert(Task(n=2), IN_MAIL)
        go_on.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
        result = await command(schema, "resume", "mail")
        assert result.stdout == "queue mail is resumed\n"
        kinds = [event.kind for event in await rig.take(2)]
        assert kinds == [EventKind.QUEUE_RESUMED, EventKind.JOB_COMPLETED]
        assert begun.get_nowait() == 2


def test_failure_is_one_line() -> None:
    """No database is one line, nothing on stdout, and no password."""
    for args in (["list"], ["pause", "a"], ["resume", "a"]):
        result = invoke("queue", *args, "--json", "--database-url", UNREACHABLE)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("riverpy: cannot connect to 127.0.0.1")
        assert result.stderr.count("\n") == 1
        assert "s3cret" not in result.stderr
