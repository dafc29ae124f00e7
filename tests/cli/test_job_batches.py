"""`riverpy job list`, `retry`, `cancel` and `delete` with filters: what they choose, ask, show and
report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._calls import batched_change
from riverpy.cli import _job_batches
from tests.cli.test_job import ROWS, command

if TYPE_CHECKING:
    from tests._database import Schema

MANY = """
INSERT INTO river_job
  (state, kind, args, max_attempts, attempt, finalized_at, tags, metadata, errors)
SELECT 'discarded', 'kind' || i % 2, '{}', 3, 3, now(), '{red}', '{"tenant": 7}',
  ARRAY[jsonb_build_object('error', 'TimeoutError: ' || i % 3)]
FROM generate_series(1, $1::int) AS i
"""
COUNT = "SELECT count(*) FROM river_job WHERE state = 'available'"


async def listed(schema: Schema, *args: str) -> dict[str, Any]:
    """Return the JSON object of a list."""
    result = await command(schema, "list", "--json", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


async def test_list(schema: Schema) -> None:
    """Each option chooses jobs; `--after` continues a list; a full page prints the next cursor."""
    await schema.execute(MANY, 12)
    cases: list[tuple[list[str], list[int]]] = [
        (["--id", "3", "--id", "7"], [7, 3]),
        (["--kind", "kind1", "--ascending", "--limit", "2"], [1, 3]),
        (["--state", "discarded", "--error", "Error: 2"], [11, 8, 5, 2]),
        (["--tag", "red", "--any-tag", "blue"], []),
        (["--queue", "default", "--priority", "1", "--id", "4"], [4]),
        (["--metadata", '{"tenant": 7}', "--limit", "1", "--order", "time"], [12]),
    ]
    for args, ids in cases:
        assert [job["id"] for job in (await listed(schema, *args))["jobs"]] == ids, args
    args = ["--order", "finalized_at", "--limit", "5"]
    cursor = (await listed(schema, *args))["cursor"]
    found = await listed(schema, *args, "--after", cursor)
    assert [job["id"] for job in found["jobs"]] == [7, 6, 5, 4, 3]
    result = await command(schema, "list", *args, "--after", cursor)
    assert result.stderr == f"riverpy: there may be more jobs: add --after {found['cursor']}\n"
    result = await command(schema, "list", "--after", cursor)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ordered by finalized_at, not by id" in result.stderr


async def test_changes_by_filter(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that pass the filters are changed. The result and the progress are printed, as text or
    as one JSON object."""
    monkeypatch.setattr(batched_change, "JOBS_PER_BATCH", 10)
    monkeypatch.setattr(_job_batches, "PROGRESS_NOTE_INTERVAL", 0)
    await schema.execute(MANY, 50)
    result = await command(schema, "retry", "--kind", "kind1", "--state", "discarded", "--yes")
    assert (result.exit_code, result.stderr) == (0, "10 of 25 jobs\n20 of 25 jobs\n25 of 25 jobs\n")
    assert result.stdout.startswith("retried 25 jobs in ")
    result = await command(schema, "cancel", "--error", "TimeoutError: 0", "--yes", "--json")
    assert json.loads(result.stdout) == {
        "action": "cancelled",
        "matched": 8,
        "complete": True,
        "changed": 8,
        "running": 0,
        "unchanged": 0,
        "missing": 0,
        "refused": 0,
        "reasons": [],
    }
    await schema.execute("UPDATE river_job SET state = 'running' WHERE id = 1")
    await schema.execute(
        "UPDATE river_job SET unique_key = 'k', unique_states = B'00000001' WHERE id = 2"
    )
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, unique_key,"
        " unique_states) VALUES ('other', '{}', 1, 'k', B'00000001')"
    )
    result = await command(schema, "retry", "--kind", "kind0", "--kind", "kind1", "--yes")
    assert result.exit_code == 1
    assert result.stderr.endswith("job 2 was refused: another job has the same unique key\n")
    assert ", 1 refused in " in result.stdout
    result = await command(schema, "delete", "--tag", "red", "--limit", "9", "--yes", "--json")
    assert json.loads(result.stdout)["matched"] == 9
    result = await command(schema, "delete", "--tag", "red", "--yes")
    assert result.stdout.startswith("deleted 41 jobs, 1 running, not deleted in ")
    result = await command(schema, "retry", "--state", "running", "--yes", "--json")
    assert [json.loads(result.stdout)[key] for key in ("running", "unchanged")] == [1, 1]
    result = await command(schema, "cancel", "--state", "completed", "--yes")
    assert result.stdout.startswith("cancelled 0 jobs (ended jobs are not changed) in ")
    result = await command(schema, "delete", "--kind", "none", "--yes")
    assert (result.exit_code, result.stdout[:15]) == (0, "deleted 0 jobs ")


async def test_delete_by_ids(schema: Schema) -> None:
    """Each job is reported. A running and a missing one are refused, and the others are deleted."""
    await schema.execute(ROWS)
    result = await command(schema, "delete", "1", "5", "8", "99", "--yes")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "job 1 was available: it is deleted",
        "job 8 was discarded: it is deleted",
    ]
    assert result.stderr.startswith("riverpy: job 5 is running, so it was not deleted")
    assert result.stderr.endswith("riverpy: there is no job 99\n")
    assert [row["id"] for row in await schema.jobs()] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["retry"], "Missing argument 'ID...': give ids, or options that choose jobs"),
        (["retry", "1", "--limit", "1"], "give either ids or options that choose jobs, not both"),
        (["retry", "--kind", "a"], "there is no terminal to ask for confirmation: add --yes"),
        (["delete", "1"], "there is no terminal to ask for confirmation: add --yes"),
        (["cancel", "--metadata", "[1]"], "'[1]' is not a JSON object"),
        (["cancel", "--metadata", "{}", "--yes"], "the filter metadata is empty"),
        (["list", "--priority", "5"], "'5' is not a whole number from 1 to 4"),
        (["list", "--order", "finalized_at", "--state", "running"], "got running"),
        (["list", "--error", ""], "the text must not be empty"),
    ],
)
async def test_refusals(schema: Schema, args: list[str], said: str) -> None:
    """A call that is not allowed prints one line, has exit code 2, and changes nothing."""
    await schema.execute(ROWS)
    before = await schema.jobs()
    result = await command(schema, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert await schema.jobs() == before


def heed_signals() -> None:
    """Undo that a shell starts its background commands with ignored signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, controller: int) -> None:
        self.process = process
        self._controller = controller
        self.text = ""

    @classmethod
    async def start(cls, schema: Schema, *args: str) -> Terminal:
        """Start `riverpy job` with its stdin and stderr on the terminal."""
        controller, terminal = os.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "riverpy", "job", *args),
            *("--database-url", schema.url, "--schema", schema.name),
            stdin=terminal,
            stderr=terminal,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"},
            preexec_fn=heed_signals,
        )
        os.close(terminal)
        return cls(process, controller)

    async def until(self, wanted: str) -> None:
        """Wait until the terminal shows this text."""
        with anyio.fail_after(60, reason=f"no {wanted!r}"):
            while wanted not in self.text:
                await anyio.wait_readable(self._controller)
                self.text += os.read(self._controller, 4096).decode()

    async def until_asleep(self) -> None:
        """Wait until the command waits for input. A signal shortly before has no effect until it
        gets input."""
        status = Path(f"/proc/{self.process.pid}/status")
        looks = 0
        with anyio.fail_after(60, reason="the command does not wait"):
            while looks < 5:
                looks = looks + 1 if "State:\tS" in status.read_text() else 0
                await anyio.sleep(0.02)

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._controller, f"{text}\n".encode())

    async def end(self) -> tuple[int, str]:
        """Return the exit code and what stdout has."""
        with anyio.fail_after(60):
            out, _ = await self.process.communicate()
        os.close(self._controller)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a POSIX terminal and /proc")
async def test_question_progress_and_interruption(schema: Schema, tmp_path: Path) -> None:
    """On a terminal the command asks with the number of jobs and shows a bar. A signal at the
    question ends it at once. A signal during the change ends it between two batches, and the
    command says truly what it did."""
    await schema.execute(MANY, 3_500)
    filters = ["--kind", "kind0", "--kind", "kind1", "--state", "discarded"]
    terminal = await Terminal.start(schema, "retry", *filters, "--limit", "7")
    await terminal.until(
        "Retry the first 7 of 3,500 jobs (kind kind0, kind1; state discarded)? [y/N]: "
    )
    terminal.type("n")
    assert await terminal.end() == (130, "")
    assert await schema.fetchval(COUNT) == 0
    terminal = await Terminal.start(schema, "retry", *filters)
    await terminal.until("[y/N]: ")
    await terminal.until_asleep()
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.end() == (130, "")
    terminal = await Terminal.start(schema, "retry", *filters)
    async with schema.connected() as other:
        # The third batch waits for its statement, so the signal arrives during it.
        await other.execute("BEGIN; SELECT pg_advisory_xact_lock(77)")
        await schema.execute(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN new; END$$;"
            "CREATE TRIGGER hold BEFORE UPDATE ON river_job FOR EACH ROW WHEN (old.id = 2500)"
            " EXECUTE FUNCTION hold()"
        )
        try:
            await terminal.until("[y/N]: ")
            terminal.type("y")
            await terminal.until("57%")
            terminal.process.send_signal(signal.SIGHUP)
            await terminal.until("stopping after this batch")
            await other.execute("ROLLBACK")
            code, out = await terminal.end()
        finally:
            await schema.execute("DROP TRIGGER hold ON river_job; DROP FUNCTION hold")
    assert code == 129
    assert re.fullmatch("retried 3,000 jobs in [^,]+, then interrupted: 500 left\n", out)
    assert await schema.fetchval(COUNT) == 3_000
    result = await command(schema, "retry", *filters, "--yes")
    assert result.stdout.startswith("retried 500 jobs in ")
