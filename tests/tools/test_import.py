"""What an import, a command and a worker load."""

from __future__ import annotations

import subprocess
import sys
from asyncio import to_thread
from typing import TYPE_CHECKING

import pytest

from tests.cli.worker_process import running_worker

if TYPE_CHECKING:
    from pathlib import Path

    from tests._database import Schema

RARELY_USED = (
    *(
        "cronsim",
        "difflib",
        "importlib.metadata",
        "importlib.resources",
        "lzma",
        "multiprocessing",
        "rich",
        "shutil",
    ),
    *("structlog", "tomllib", "zoneinfo", "riverpy.testing", "riverpy.web", "riverpy.embedded"),
    *("riverpy._tools.doctor", "riverpy._tools.embedded", "riverpy._tools.top"),
    *("psycopg", "sqlalchemy", "riverpy._postgres.sessions.psycopg"),
    "riverpy._postgres.sessions.sqlalchemy",
    *("pickle", "riverpy._tools.health.server", "riverpy._tools.health.worker_health"),
    *(
        "riverpy._tools.health.probes",
        "riverpy.migrate",
        "riverpy.leases",
        "riverpy._leases.memory",
    ),
    *("riverpy._leases.spreading", "riverpy._waiting.waiter", "riverpy._fleet.follower"),
    *("riverpy._work.blocking", "riverpy._work.child_process", "riverpy._work.steps"),
)
"""Modules that only some programs use."""
LIBRARY = ("riverpy._tools", "riverpy.cli.", "click", *RARELY_USED)
RUN = "from riverpy.cli import main; main({}, standalone_mode=False)"
JOBS = """
import sys
from typing import Any
import riverpy

workers = riverpy.Workers()


@workers.job(kind="loaded")
async def loaded(job: riverpy.Job[dict[str, Any]]) -> None:
    print(" ".join(sys.modules), flush=True)


client = riverpy.Client(workers=workers, queues={"default": riverpy.QueueConfig()})
"""


def find_loaded(code: str) -> list[str]:
    """Run the code in a new interpreter, in a directory without a `pyproject.toml`. Return the
    names of the loaded modules."""
    code = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return result.stderr.split()


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        pytest.param("import riverpy", ("riverpy.", "asyncio", "asyncpg", "msgspec"), id="package"),
        pytest.param("from riverpy import Client, Worker", LIBRARY, id="library"),
        pytest.param(
            RUN.format(["--version"]),
            ("asyncpg", "riverpy._postgres", "riverpy.client", "riverpy._work", *RARELY_USED),
            id="version",
        ),
    ],
)
def test_loads_only_what_it_uses(code: str, unwanted: tuple[str, ...]) -> None:
    """An import or a command loads no module that it does not need: such modules take time and
    memory."""
    assert [name for name in find_loaded(code) if name.startswith(unwanted)] == []


async def test_insert_loads_only_what_it_uses(schema: Schema) -> None:
    """`riverpy insert` loads no module of other commands, or that only some programs use."""
    options = [f"--database-url={schema.url}", f"--schema={schema.name}"]
    loaded = await to_thread(find_loaded, RUN.format(["insert", "mail", *options]))
    assert len(await schema.jobs()) == 1
    unwanted = ("riverpy.cli.worker", *RARELY_USED)
    assert [name for name in loaded if name.startswith(unwanted)] == []


async def test_worker_loads_only_what_it_uses(schema: Schema, tmp_path: Path) -> None:
    """A worker that is the leader and runs a job has loaded no module that only some workers
    use."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{}', 'loaded', 25)"
    )
    options = (f"--database-url={schema.url}", f"--schema={schema.name}")
    async with running_worker(tmp_path, "jobs", "--drain", *options, code=JOBS) as worker:
        assert await worker.exit_code() == 0
    (line,) = worker.printed
    assert [name for name in line.split() if name.startswith(RARELY_USED)] == []
