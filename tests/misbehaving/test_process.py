"""Jobs that misbehave in a worker process: it keeps running, stays leader, and stops at SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import LEADER_ELECTED, LEFTOVER_TASKS_CANCELLED, UNCAUGHT_ERROR_RAISED
from tests.cli.worker_process import running_worker
from tests.misbehaving.harmful_jobs import functions

if TYPE_CHECKING:
    from tests._database import Schema

PATIENCE = 60.0
CODE = Path(__file__).with_name("harmful_jobs.py").read_text("utf-8")
FAILS = {
    "raise SystemExit": "3",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise OwnError": "own",
    "recurse": "maximum recursion depth exceeded",
    "recurse in C": "maximum recursion depth exceeded while encoding",
    "recurse in an error's text": "<unprintable Endless object>",
    "record a huge output": "has at most 33554432 bytes when encoded, got 100000000",
    "cancel itself": "CancelledError",
    "close the loop": "Cannot close a running event loop",
}
"""The error of each job whose attempt fails. All other jobs are completed."""


async def insert(schema: Schema, kind: str, name: str) -> int:
    """Insert a job with one attempt."""
    return await schema.fetchval(
        "INSERT INTO river_job (args, kind, max_attempts)"
        " VALUES (jsonb_build_object('name', $1::text), $2, 1) RETURNING id",
        name,
        kind,
    )


async def ended(schema: Schema, job_id: int) -> str:
    """Wait until a job is finished, and return its state."""
    sql = "SELECT state::text FROM river_job WHERE id = $1 AND finalized_at IS NOT NULL"
    async with asyncio.timeout(PATIENCE):
        while (state := await schema.fetchval(sql, job_id)) is None:
            await asyncio.sleep(0.01)
    return state


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_worker_survives_harmful_jobs(schema: Schema, tmp_path: Path, loop: str) -> None:
    """One worker survives jobs that raise exceptions meant to end the process, recurse to the limit
    in Python and in C, raise in `__del__`, leak tasks, threads and generators, fill the default
    executor, log a megabyte, record 100 MB, close its connections, and change the process, the
    loop, the streams and the signal handlers. After each of them another job is worked. At the end
    jobs in threads and processes are worked too. The worker has stayed leader, sends heartbeats,
    and stops at SIGTERM (SC-17)."""
    code = CODE if loop == "uvloop" else f"{CODE}\nsys.modules['uvloop'] = None\n"
    where = (f"--database-url={schema.url}", f"--schema={schema.name}")
    async with running_worker(tmp_path, "jobs", *where, code=code) as worker:
        await worker.until_logged(LEADER_ELECTED)
        term = await schema.fetchval("SELECT elected_at FROM river_leader")
        for name in functions:
            job_id = await insert(schema, "harmful", name)
            state = await ended(schema, job_id)
            errors = await schema.fetchval("SELECT errors FROM river_job WHERE id = $1", job_id)
            if name in FAILS:
                assert FAILS[name] in json.loads(errors[0])["error"], name
            assert state == ("discarded" if name in FAILS else "completed"), (name, errors)
            assert await ended(schema, await insert(schema, "good", "")) == "completed", name
        for kind in ("good_thread", "good_process"):
            assert await ended(schema, await insert(schema, kind, "")) == "completed", kind

        now = await schema.fetchval("SELECT clock_timestamp()")
        async with asyncio.timeout(PATIENCE):
            while not await schema.fetchval("SELECT heartbeat_at > $1 FROM riverpy_client", now):
                await asyncio.sleep(0.05)
        assert await schema.fetchval("SELECT elected_at FROM river_leader") == term
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0
    uncaught = worker.entries(UNCAUGHT_ERROR_RAISED)
    assert len(uncaught) >= 5
    assert {entry["place"] for entry in uncaught} == {"RaisesInFinalizer.__del__"}
    assert "ValueError: from __del__" in uncaught[0]["exception"]
    assert worker.entries(LEFTOVER_TASKS_CANCELLED)[0]["count"] == 1000
    (last,) = [entry["text"] for entry in worker.logged if "text" in entry]
    assert last.startswith(f"riverpy: ended although threads still run: {loop}_0, {loop}_1, ")
