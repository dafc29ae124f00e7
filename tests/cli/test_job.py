"""`riverpy job cancel` and `retry`: what they change, what they say, and their failures."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy import EventKind, InsertOpts, UniqueOpts
from riverpy.cli import _changes, _connected
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.cli.test_command import UNREACHABLE, invoke
from tests.kit.damaged_rows import DAMAGE, VALUES, damage
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from click.testing import Result

    from riverpy import Job
    from tests._database import Schema

STATES = "SELECT id, state::text, max_attempts, scheduled_at <= now() AS due FROM river_job"
ROWS = """
INSERT INTO river_job
  (id, state, kind, args, attempt, max_attempts, scheduled_at, finalized_at, metadata, attempted_by)
SELECT id, state::river_job_state, 'task', '{}', attempt, 3, now() + due, finalized_at, '{}',
  CASE WHEN state = 'running' THEN '{gone}'::text[] END
FROM (VALUES
  (1, 'available', 0, interval '-1 min', NULL),
  (2, 'scheduled', 0, '1 hour', NULL),
  (3, 'retryable', 1, '1 hour', NULL),
  (4, 'pending', 0, '1 hour', NULL),
  (5, 'running', 1, '-1 min', NULL),
  (6, 'completed', 1, '-1 min', now()),
  (7, 'cancelled', 1, '-1 min', now()),
  (8, 'discarded', 3, '-1 min', now())
) AS v (id, state, attempt, due, finalized_at)
"""


async def command(schema: Schema, *args: str, setting: str = "") -> Result:
    """Run `riverpy job` on the test's schema, with a setting of the server if given."""
    options = ("--database-url", schema.url + setting, "--schema", schema.name)
    return await asyncio.to_thread(invoke, "job", *args, *options)


async def test_show_prints_tracebacks_as_lines(schema: Schema) -> None:
    """Each error is lines below the columns, without what commands a terminal; an entry that is not
    understood is shown as it is, and `--json` has each entry as it is stored."""
    trace = 'Traceback (most recent call last):\n  File "jobs.py", line 3\nValueError: no\x1b[2J\n'
    entries: list[dict[str, object]] = [
        {"at": "2026-01-01T00:00:00Z", "attempt": 1, "error": "ValueError: no", "trace": trace},
        {"at": 5},
    ]
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, errors)"
        " SELECT 'task', '{}', 25, array_agg(e::jsonb) FROM unnest($1::text[]) e",
        [json.dumps(entry) for entry in entries],
    )
    result = await command(schema, "show", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split(None, 1) for line in result.stdout.splitlines()]
    assert ["kind", "task"] in lines
    assert re.search(r"^scheduled_at +2\S+ \S+ \(\d\S* ago\)$", result.stdout, re.MULTILINE)
    assert re.sub(r"Z \(\w+ ago\)", "Z (… ago)", result.stdout).endswith(
        """
error of attempt 1 at 2026-01-01T00:00:00Z (… ago): ValueError: no
  Traceback (most recent call last):
    File "jobs.py", line 3
  ValueError: no?[2J

error {"at": 5}
"""
    )
    shown = json.loads((await command(schema, "show", "1", "--json")).stdout)
    assert shown["errors"] == entries


async def test_list_and_show_beside_damaged_rows(schema: Schema) -> None:
    """Jobs that the server cannot read are named, whatever column is damaged, and the others are
    listed. To show one of them fails with its id and what to do."""
    await schema.execute(ROWS)
    ids = dict(zip(range(2, 7), VALUES, strict=True))
    for job_id, column in ids.items():
        await damage(schema, job_id, column)
    result = await command(schema, "list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ID", "8", "7", "1"]
    assert result.exit_code == 1
    assert result.stderr.startswith("riverpy: the server cannot read jobs 6, 5, 4, 3, 2 (")
    result = await command(schema, "list", "--json")
    printed = json.loads(result.stdout)
    assert [job["id"] for job in printed["jobs"]] == [8, 7, 1]
    assert [one["id"] for one in printed["damaged"]] == [6, 5, 4, 3, 2]
    assert all(DAMAGE in one["error"] for one in printed["damaged"])
    assert result.exit_code == 1
    for job_id in ids:
        result = await command(schema, "show", str(job_id))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"riverpy: the server cannot read job {job_id} (")
        assert "delete the row" in result.stderr


async def test_changes_beside_a_damaged_row(schema: Schema) -> None:
    """A job that the server cannot read is named, and the others are changed."""
    await schema.execute(ROWS)
    await damage(schema, 2, "errors")
    result = await command(schema, "cancel", "1", "2", "3")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["job 1 is cancelled", "job 3 is cancelled"]
    assert result.stderr.startswith("riverpy: the server cannot read job 2 (")


async def test_cancel(schema: Schema) -> None:
    """Of jobs in each state, waiting ones are cancelled, ended ones are not changed, and each is
    reported."""
    await schema.execute(ROWS)
    result = await command(schema, "cancel", *map(str, range(1, 9)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "job 1 is cancelled",
        "job 2 is cancelled",
        "job 3 is cancelled",
        "job 4 is cancelled",
        "job 5 is running: its worker is notified to cancel it",
        "job 6 is completed already: nothing was changed",
        "job 7 is cancelled already: nothing was changed",
        "job 8 is discarded already: nothing was changed",
    ]
    states = {row["id"]: row["state"] for row in await schema.fetch(STATES)}
    assert states == dict.fromkeys((1, 2, 3, 4, 7), "cancelled") | {
        5: "running",
        6: "completed",
        8: "discarded",
    }


async def test_retry(schema: Schema) -> None:
    """A job in each state: all but a running and a due one are available now, and one that has no
    attempts left has one more."""
    await schema.execute(ROWS)
    result = await command(schema, "retry", *map(str, range(1, 9)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "job 1 is available already: nothing was changed",
        "job 2 was scheduled: it is available now",
        "job 3 was retryable: it is available now",
        "job 4 was pending: it is available now",
        "job 5 is running: nothing was changed",
        "job 6 was completed: it is available now",
        "job 7 was cancelled: it is available now",
        "job 8 was discarded: it is available now, with one more attempt",
    ]
    rows = {row["id"]: tuple(row)[1:] for row in await schema.fetch(STATES)}
    assert rows == dict.fromkeys(range(1, 8), ("available", 3, True)) | {
        5: ("running", 3, True),
        8: ("available", 4, True),
    }


async def test_state_of_newer_river(fresh_database_url: str) -> None:
    """Jobs in a state that only a newer version of River knows can be retried, cancelled and
    deleted."""
    async with connected(fresh_database_url) as connection:
        await migrate_all(connection)
        await connection.execute("ALTER TYPE river_job_state ADD VALUE 'hibernating'")
        await connection.execute(
            "INSERT INTO river_job (id, kind, args, max_attempts, state)"
            " SELECT id, 'task', '{}', 3, 'hibernating' FROM generate_series(1, 3) AS id"
        )
    for verb, said in (
        ("retry", "job 1 was hibernating: it is available now\n"),
        ("cancel", "job 2 is cancelled\n"),
        ("delete", "job 3 was hibernating: it is deleted\n"),
    ):
        job_id = said.split()[1]
        options = ("--database-url", fresh_database_url, *(["--yes"] if verb == "delete" else []))
        result = await asyncio.to_thread(invoke, "job", verb, job_id, *options)
        assert (result.exit_code, result.stdout) == (0, said), result.output


async def test_json(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout has one object with the result of each job; stderr shows the progress."""
    await schema.execute(ROWS)
    monkeypatch.setattr(_changes, "PROGRESS_NOTE_INTERVAL", 0)
    result = await command(schema, "cancel", "2", "5", "6", "99", "--json")
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert json.loads(result.stdout) == {
        "jobs": [
            {"id": 2, "action": "cancelled", "message": "job 2 is cancelled"},
            {
                "id": 5,
                "action": "cancel requested",
                "message": "job 5 is running: its worker is notified to cancel it",
            },
            {
                "id": 6,
                "action": "none",
                "message": "job 6 is completed already: nothing was changed",
            },
            {"id": 99, "action": "failed", "message": "there is no job 99"},
        ]
    }
    assert result.stderr.splitlines() == [f"{number} of 4 jobs" for number in range(1, 5)]


@pytest.mark.parametrize(
    ("verb", "said"), [("cancel", "is cancelled"), ("retry", "was scheduled: it is available now")]
)
async def test_missing_jobs(schema: Schema, verb: str, said: str) -> None:
    """A job that is not there is a line of its own and exit code 1; the others are changed
    (OP-04)."""
    await schema.execute(ROWS)
    result = await command(schema, verb, "98", "2", "99")
    assert (result.exit_code, result.stdout) == (1, f"job 2 {said}\n")
    assert result.stderr == "riverpy: there is no job 98\nriverpy: there is no job 99\n"


async def test_retry_of_a_unique_job(schema: Schema) -> None:
    """A job whose unique key another job has now is reported; the others are retried."""
    rig = Rig(schema)
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True))
    async with rig.client() as client:
        old, other = [(await client.insert(Task(n=n), unique)).job.id for n in (1, 2)]
        for job_id in (old, other):
            await client.job_cancel(job_id)
        await client.insert(Task(n=1), unique)
    result = await command(schema, "retry", str(old), str(other))
    assert result.exit_code == 1
    assert result.stdout == f"job {other} was cancelled: it is available now\n"
    assert result.stderr == (
        f"riverpy: job {old} cannot be retried: another job has the same unique key\n"
    )


async def test_worker_obeys(schema: Schema) -> None:
    """A running job is cancelled by the command, and runs again by the other one."""
    rig = Rig(schema)
    begun = asyncio.Queue[int]()

    @rig.job
    async def work(job: Job[Task]) -> None:
        begun.put_nowait(job.attempt)
        if job.attempt == 1:
            await anyio.sleep_forever()

    async with rig.working(fetch_poll_interval=timedelta(seconds=0.5)) as client:
        inserted = await client.insert(Task())
        job_id = str(inserted.job.id)
        assert await begun.get() == 1
        result = await command(schema, "cancel", job_id)
        assert result.stdout == f"job {job_id} is running: its worker is notified to cancel it\n"
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        result = await command(schema, "retry", job_id)
        assert result.stdout == f"job {job_id} was cancelled: it is available now\n"
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED


@pytest.mark.parametrize("as_json", [False, True])
async def test_locked_row(schema: Schema, *, as_json: bool) -> None:
    """A row that another session has locked ends the command, with one line that names the job. The
    earlier results are printed."""
    await schema.execute(ROWS)
    options = ["--json"] if as_json else []
    setting = f"{'&' if '?' in schema.url else '?'}lock_timeout=100"
    async with schema.connected() as connection, connection.transaction():
        await connection.execute("SELECT FROM river_job WHERE id = 3 FOR UPDATE")
        result = await command(schema, "cancel", "2", "3", "4", *options, setting=setting)
    assert result.exit_code == 1
    assert result.stderr == (
        "riverpy: changing job 3 failed: canceling statement due to lock timeout; those after it"
        " are unchanged\n"
    )
    done = json.loads(result.stdout)["jobs"][0]["message"] if as_json else result.stdout.strip()
    assert done == "job 2 is cancelled"
    states = [row["state"] for row in await schema.fetch(f"{STATES} WHERE id IN (3, 4) ORDER BY 1")]
    assert states == ["retryable", "pending"]


async def test_no_answer(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that gets no answer is waited for in bounds; its transaction ends in silence."""
    await schema.execute(ROWS)
    bounded = _connected.wait_for_statement

    async def impatient(purpose: str, answer: Awaitable[Any]) -> Any:
        monkeypatch.setattr(_connected, "STATEMENT_TIMEOUT", 0.1)
        return await bounded(purpose, answer)

    monkeypatch.setattr(_changes, "wait_for_statement", impatient)
    async with schema.connected() as connection, connection.transaction():
        await connection.execute("SELECT FROM river_job WHERE id = 3 FOR UPDATE")
        result = await command(schema, "cancel", "3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "riverpy: changing job 3 failed: it took longer than 0.1 s\n"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "riverpy: Missing argument 'ID...'"),
        (["1", "x"], 2, "riverpy: Invalid value for 'ID...': 'x' is not a whole number"),
        (["0"], 2, "riverpy: Invalid value for 'ID...': '0' is not a whole number"),
        (["1"], 1, "riverpy: cannot connect to 127.0.0.1"),
    ],
)
def test_failure_is_one_line(args: list[str], code: int, said: str) -> None:
    """A wrong id, none, or no database: one line, nothing on stdout, and no password."""
    for verb in ("cancel", "retry"):
        result = invoke("job", verb, *args, "--json", "--database-url", UNREACHABLE)
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.startswith(said)
        assert result.stderr.count("\n") == 1
        assert "s3cret" not in result.stderr


async def test_show_log_and_progress(schema: Schema) -> None:
    """`show` prints the progress and how many log entries there are. `--log` prints each attempt
    below a headline, without what commands a terminal, and with `--json` the list of entries."""
    entries = [{"attempt": 1, "log": "one\ntwo\x1b[2J\n"}, {"text": 5}]
    progress = {"done": 30, "total": 120, "text": "copying", "at": "2026-01-01T00:00:00Z"}
    metadata = {"river:log": entries, "riverpy:progress": progress}
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, metadata)"
        " VALUES ('task', '{}', 25, $1::jsonb), ('task', '{}', 25, '[1]')",
        json.dumps(metadata),
    )
    shown = (await command(schema, "show", "1")).stdout
    assert re.search(r"^progress +30 of 120 \(25 %\): copying \(.* ago\)$", shown, re.MULTILINE)
    assert '"river:log": "2 entries: show them with --log"' in shown
    as_json = json.loads((await command(schema, "show", "1", "--json")).stdout)
    assert (as_json["progress"], as_json["metadata"]) == (progress, metadata)
    result = await command(schema, "show", "1", "--log")
    assert result.stdout == (
        'attempt 1:\n  one\n  two?[2J\n\nentry 2 is not in River\'s form:\n  {"text": 5}\n'
    )
    result = await command(schema, "show", "1", "--log", "--json")
    assert json.loads(result.stdout) == entries
    result = await command(schema, "show", "2", "--log")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "job 2 has no stored log\n"
