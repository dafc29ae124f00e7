"""`riverpy periodic`: what it prints, what it changes, and its failures."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.cli.test_command import invoke

if TYPE_CHECKING:
    from click.testing import Result

    from tests._database import Schema

ROWS = """
INSERT INTO riverpy_periodic (id, schedule, next_run_at, last_run_at, paused_at) VALUES
  ('daily-report', 'cron 30 9 * * * Europe/Berlin', '2026-03-28 08:30Z', '2026-03-27 08:30Z', NULL),
  ('hourly', 'every 1h30m', '2026-03-28 08:30:00.5Z', NULL, NULL),
  ('own', 'Own', '2026-04-01Z', NULL, '2026-03-01Z'),
  ('ended', 'Own', NULL, NULL, NULL)
"""


async def command(schema: Schema, *args: str) -> Result:
    """Run `riverpy periodic` on the test's schema."""
    options = ("--database-url", schema.url, "--schema", schema.name)
    return await asyncio.to_thread(invoke, "periodic", *args, *options)


async def test_list(schema: Schema) -> None:
    """Each row is a line, or an object."""
    await schema.execute(ROWS)
    await schema.execute(
        "UPDATE riverpy_periodic SET run_requested_at = '2026-03-02Z' WHERE id = 'ended'"
    )
    result = await command(schema, "list")
    assert result.exit_code == 0
    assert [re.split(" {2,}", line) for line in result.stdout.splitlines()] == [
        ["ID", "SCHEDULE", "NEXT", "LAST", "PAUSED SINCE", "RUN REQUESTED"],
        [
            "daily-report",
            "cron 30 9 * * * Europe/Berlin",
            "2026-03-28 08:30:00",
            "2026-03-27 08:30:00",
            "-",
            "-",
        ],
        ["ended", "Own", "-", "-", "-", "2026-03-02 00:00:00"],
        ["hourly", "every 1h30m", "2026-03-28 08:30:00.500", "-", "-", "-"],
        ["own", "Own", "2026-04-01 00:00:00", "-", "2026-03-01 00:00:00", "-"],
    ]
    rows = json.loads((await command(schema, "list", "--json")).stdout)["periodic_jobs"]
    assert rows[0] == {
        "id": "daily-report",
        "schedule": "cron 30 9 * * * Europe/Berlin",
        "next_run_at": "2026-03-28T08:30:00Z",
        "last_run_at": "2026-03-27T08:30:00Z",
        "paused_at": None,
        "run_requested_at": None,
    }
    assert [row["id"] for row in rows] == ["daily-report", "ended", "hourly", "own"]


async def test_next(schema: Schema) -> None:
    """The coming slots are counted from the stored one, in UTC and on the clocks of the zone, also
    across a change of these."""
    await schema.execute(ROWS)
    result = await command(schema, "next", "daily-report", "-n", "3")
    assert result.stdout.splitlines() == [
        "UTC                  EUROPE/BERLIN",
        "2026-03-28 08:30:00  2026-03-28 09:30:00+01:00",
        "2026-03-29 07:30:00  2026-03-29 09:30:00+02:00",
        "2026-03-30 07:30:00  2026-03-30 09:30:00+02:00",
    ]
    result = await command(schema, "next", "hourly", "-n", "2")
    assert result.stdout.splitlines() == [
        "UTC",
        "2026-03-28 08:30:00.500",
        "2026-03-28 10:00:00.500",
    ]
    result = await command(schema, "next", "own")
    assert result.stdout.splitlines() == ["UTC", "2026-04-01 00:00:00"]
    assert "own is paused" in result.stderr
    assert "only the code of Own" in result.stderr
    assert json.loads((await command(schema, "next", "ended", "--json")).stdout) == {
        "id": "ended",
        "schedule": "Own",
        "paused": False,
        "due_times": [],
    }


async def test_changes(schema: Schema) -> None:
    """A run, a pause and a resume are stored, and the leader is notified of each."""
    await schema.execute(ROWS)
    async with schema.connected() as listener:
        heard: list[object] = []
        await listener.add_listener(
            f"{schema.name}.riverpy_event", lambda *message: heard.append(message[3])
        )
        for verb, said, column in (
            (
                "run",
                "run requested; there is no leader now, so the next leader inserts the job",
                "run_requested_at IS NOT NULL",
            ),
            ("pause", "paused", "paused_at IS NOT NULL"),
            ("resume", "resumed", "paused_at IS NULL"),
        ):
            result = await command(schema, verb, "hourly")
            assert (result.exit_code, result.stdout) == (0, f"hourly: {said}\n")
            assert await schema.fetchval(
                f"SELECT {column} FROM riverpy_periodic WHERE id = 'hourly'"
            )
            result = await command(schema, verb, "hourly", "--json")
            printed = json.loads(result.stdout)
            assert (printed["id"], printed["action"]) == ("hourly", said.partition(";")[0])
        await listener.execute("SELECT 1")
        message = '{"action" : "periodic_changed", "periodic_job_id" : "hourly"}'
        assert heard == [message] * 6


@pytest.mark.parametrize(
    ("seconds", "leader_id", "said"),
    [
        (60, "somebody", "the leader somebody inserts it if it has this job"),
        (-1, None, "there is no leader now, so the next leader inserts the job"),
    ],
)
async def test_run_says_who_leads(
    schema: Schema, seconds: float, leader_id: str | None, said: str
) -> None:
    """The output names the leader that inserts the job. An expired lease counts as no leader."""
    await schema.execute(ROWS)
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ('somebody', now(), now() + make_interval(secs => $1))",
        seconds,
    )
    result = await command(schema, "run", "hourly")
    assert (result.exit_code, result.stdout) == (0, f"hourly: run requested; {said}\n")
    result = await command(schema, "run", "hourly", "--json")
    assert json.loads(result.stdout) == {
        "id": "hourly",
        "action": "run requested",
        "leader_id": leader_id,
    }


async def test_run_in_domain(schema: Schema) -> None:
    """A run of a domain's job is for the leader of that domain to insert."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule) VALUES ('daily@mail', 'Own'), ('daily@x', 'O')"
    )
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at) VALUES"
        " ('d:mail', 7, 'm', '1 h', now() + interval '1 h'), ('d:x', 7, 'x', '15 s', now())"
    )
    result = await command(schema, "run", "daily@mail", "--json")
    assert json.loads(result.stdout)["leader_id"] == "m"
    result = await command(schema, "run", "daily@x", "--json")
    assert json.loads(result.stdout)["leader_id"] is None


@pytest.mark.parametrize("verb", ["next", "run", "pause", "resume"])
async def test_unknown_id(schema: Schema, verb: str) -> None:
    """An id that is not there is one line that names those that are alike, and exit code 1."""
    await schema.execute(ROWS)
    result = await command(schema, verb, "dayly-report")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "riverpy: there is no periodic job 'dayly-report': did you mean daily-report?\n"
    )


async def test_missing_table(schema: Schema) -> None:
    """Without the table each command names the one that makes it, with the database and schema."""
    await schema.execute("UPDATE river_migration SET line = 'hidden' WHERE line = 'riverpy'")
    try:
        for args in (["list"], ["next", "a"], ["run", "a"], ["pause", "a"], ["resume", "a"]):
            result = await command(schema, *args)
            assert result.exit_code == 1
            assert "run `riverpy migrate up --line riverpy --database-url " in result.stderr
            assert f" --schema {schema.name}`" in result.stderr
    finally:
        await schema.execute("UPDATE river_migration SET line = 'riverpy' WHERE line = 'hidden'")
