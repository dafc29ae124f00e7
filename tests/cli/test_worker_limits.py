"""`riverpy worker --max-jobs`, `--max-age` and `--max-rss` as processes."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._log_events import CLIENT_STOP_STARTED, WORKER_LIMIT_REACHED, WORKER_STOPPED
from riverpy.cli import _worker_limits, main
from riverpy.cli._run import EXIT_LIMIT_REACHED, EXIT_USAGE_ERROR
from riverpy.cli._settings import SettingsError, SettingValue
from riverpy.cli._types import parse_size
from riverpy.cli._worker_limits import JITTER_FRACTION, WorkerLimits, add_jitter
from tests.cli.worker_process import JOBS, running_worker

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests._database import Schema
    from tests.cli.worker_process import WorkerProcess

MEMORY_JOBS = f"""{JOBS}
class Grow(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "grow"


@workers.job
async def grow(job: riverpy.Job[Grow]) -> None:
    left.append(b"x" * (256 << 20))
"""
UNSET: SettingValue[Any] = SettingValue()


def worker_of(
    schema: Schema, tmp_path: Path, *args: str, code: str = JOBS, **environ: str
) -> AbstractAsyncContextManager[WorkerProcess]:
    """A worker of this schema."""
    where = (f"--database-url={schema.url}", f"--schema={schema.name}")
    return running_worker(tmp_path, "jobs", *args, *where, code=code, **environ)


async def insert(schema: Schema, what: str, *, kind: str = "do", count: int = 1) -> None:
    """Insert jobs that do this."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) "
        "SELECT jsonb_build_object('what', $1::text), $2, 25 FROM generate_series(1, $3)",
        what,
        kind,
        count,
    )


async def test_max_jobs(schema: Schema, tmp_path: Path) -> None:
    """After --max-jobs attempts the worker claims no more. A running job finishes, although a
    signal arrives during the stop, and the exit code is 10."""
    await insert(schema, "wait")
    await insert(schema, "nothing", count=3)
    async with worker_of(schema, tmp_path, "--max-jobs=3", "--soft-stop=1h") as worker:
        entry = await worker.until_logged(WORKER_LIMIT_REACHED)
        assert (entry["limit"], entry["value"], entry["maximum"]) == ("max-jobs", "3", "3")
        await worker.until_logged(CLIENT_STOP_STARTED)
        await insert(schema, "never")
        await worker.send_each(signal.SIGTERM, signal.SIGHUP)
        (tmp_path / "release").touch()
        assert await worker.exit_code() == EXIT_LIMIT_REACHED
    states = [job["state"] for job in await schema.jobs()]
    assert states == ["completed"] * 4 + ["available"]
    assert len(worker.entries(WORKER_LIMIT_REACHED)) == 1
    assert worker.entries(WORKER_STOPPED)[0]["unstored"] == 0


async def test_max_age_and_memory(schema: Schema, tmp_path: Path) -> None:
    """A worker that is old enough stops, and so does one whose job keeps much memory. Both name
    their limit in the log, also if it comes from a variable."""
    async with worker_of(schema, tmp_path, "--max-age=1s", "--max-jobs=1000") as worker:
        assert await worker.exit_code() == EXIT_LIMIT_REACHED
    (entry,) = worker.entries(WORKER_LIMIT_REACHED)
    assert entry["limit"] == "max-age"
    assert worker.entries(WORKER_STOPPED)

    await insert(schema, "", kind="grow")
    async with worker_of(schema, tmp_path, code=MEMORY_JOBS, RIVERPY_MAX_RSS="200MiB") as worker:
        assert await worker.exit_code() == EXIT_LIMIT_REACHED
    (entry,) = worker.entries(WORKER_LIMIT_REACHED)
    assert entry["limit"] == "max-rss"
    assert parse_size(entry["value"]) > 256 * 1024**2
    assert [job["state"] for job in await schema.jobs()] == ["completed"]


async def test_signal_before_limit(schema: Schema, tmp_path: Path) -> None:
    """A limit that is reached during another stop changes nothing: the exit code is 0."""
    await insert(schema, "wait")
    async with worker_of(schema, tmp_path, "--max-jobs=1", "--soft-stop=1h") as worker:
        await worker.until_printed("job wait")
        worker.send(signal.SIGTERM)
        await worker.until_logged(CLIENT_STOP_STARTED)
        (tmp_path / "release").touch()
        assert await worker.exit_code() == 0
    assert worker.entries(WORKER_LIMIT_REACHED) == []


async def test_second_signal_after_limit(schema: Schema, tmp_path: Path) -> None:
    """The second signal after a limit cancels running jobs. The cancelled job is released."""
    await insert(schema, "sleep")
    await insert(schema, "nothing")
    async with worker_of(schema, tmp_path, "--max-jobs=1", "--soft-stop=1h") as worker:
        await worker.until_logged(CLIENT_STOP_STARTED)
        await worker.send_each(signal.SIGTERM, signal.SIGTERM)
        assert await worker.exit_code() == EXIT_LIMIT_REACHED
    assert [job["state"] for job in await schema.jobs()] == ["available", "completed"]


async def test_memory_limit_that_is_too_low(schema: Schema, tmp_path: Path) -> None:
    """A worker that would stop at once is refused, so that it is not restarted again and again."""
    async with worker_of(schema, tmp_path, "--max-rss=20MiB") as worker:
        assert await worker.exit_code() == EXIT_USAGE_ERROR
    (entry,) = worker.logged
    assert "--max-rss: the limit 20MiB is too low" in entry["text"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-jobs=0", "'0' is not a whole number from 1 to 1000000000"),
        ("--max-age=999ms", "expected a duration of at least 1s"),
        ("--max-rss=512", "'512' is not a size"),
    ],
)
def test_wrong_limit(option: str, message: str) -> None:
    """A wrong value is refused before the module is loaded."""
    result = CliRunner().invoke(main, ["worker", "nowhere", option])
    assert result.exit_code == EXIT_USAGE_ERROR
    assert message in result.stderr


def test_memory_limit_on_other_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--max-rss is refused where the memory cannot be read, by the name of its source."""
    monkeypatch.setattr(_worker_limits, "MEMORY_FILE", tmp_path / "statm")
    with pytest.raises(SettingsError, match="RIVERPY_MAX_RSS: this limit needs the file"):
        WorkerLimits(UNSET, UNSET, SettingValue(1024, "RIVERPY_MAX_RSS"))


def test_jitter() -> None:
    """Each process chooses its own limit within 10 % of the setting, whatever seed user code gives
    to the shared generator."""
    chosen: set[float] = set()
    for _ in range(100):
        random.seed(1)
        chosen.add(add_jitter(1000))
    assert len(chosen) > 90
    assert all(abs(one - 1000) <= 1000 * JITTER_FRACTION for one in chosen)
    assert max(chosen) - min(chosen) > 1000 * JITTER_FRACTION
