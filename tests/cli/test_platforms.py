"""What riverpy does not need of its platform."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from riverpy import cli
from tests.cli.worker_process import JOBS, environment, running_worker

if TYPE_CHECKING:
    from tests._database import Schema

PLAIN_LOOP = """
sys.modules["uvloop"] = None


class PlainLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        super().__init__()
        print("plain loop", flush=True)

    def add_signal_handler(self, *_):
        raise NotImplementedError


asyncio.new_event_loop = PlainLoop
"""


def test_help_without_posix() -> None:
    """Where modules, functions and signals of POSIX are missing, as on Windows, and uvloop too,
    riverpy is imported and each command has its help (OP-10)."""
    script = Path(__file__).with_name("without_posix.py")
    done = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    commands = [*sorted(cli._COMMANDS), "riverpy"]
    assert [line.strip() for line in done.stdout.splitlines()] == [f"{one} 0" for one in commands]


async def test_loop_that_takes_no_signals(schema: Schema, tmp_path: Path) -> None:
    """Without uvloop, on an event loop to which no signal handler can be added, a worker works, and
    a signal stops it (OP-10)."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{\"what\": \"x\"}', 'do', 1)"
    )
    where = (f"--database-url={schema.url}", f"--schema={schema.name}")
    code = JOBS + PLAIN_LOOP
    async with running_worker(tmp_path, "jobs", *where, code=code) as worker:
        await worker.until_printed("job x")
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0
    assert "plain loop" in worker.printed
    assert [job["state"] for job in await schema.jobs()] == ["completed"]
