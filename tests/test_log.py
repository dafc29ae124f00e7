"""The log of riverpy in a program that uses it as a library."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
import structlog
import structlog.testing

import riverpy
from riverpy import _log as log_module
from riverpy._log import EVENT_WINDOW_SECONDS, EVENTS_PER_WINDOW_MAX, RepeatedFailureLog, get_logger
from riverpy._log_events import JOB_FAILED

if TYPE_CHECKING:
    from pathlib import Path

    from tests._database import Schema

PROGRAM = """
import asyncio, json, logging, sys
from typing import ClassVar
import msgspec, riverpy
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
if "silent" in sys.argv:
    logging.getLogger("riverpy").setLevel("ERROR")
if "structlog" in sys.argv:
    import structlog
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr),
                        processors=[structlog.processors.JSONRenderer()])

workers = riverpy.Workers()

class Failing(msgspec.Struct):
    kind: ClassVar[str] = "failing"

@workers.job
async def failing(job: riverpy.Job[Failing]) -> None:
    raise ValueError("no such order")

async def main():
    client = riverpy.Client(sys.argv[1], workers=workers,
                            config=riverpy.Config(schema=sys.argv[2]),
                            queues={"default": riverpy.QueueConfig()})
    async with client:
        await client.insert(Failing(), riverpy.InsertOpts(max_attempts=1))
        await client.run(drain=True)

asyncio.run(main())
print(json.dumps({"ok": True}))
"""


class Failing(msgspec.Struct):
    """A job that fails."""

    kind: ClassVar[str] = "failing"


@pytest.fixture
def _unconfigured() -> None:
    """The program has not configured structlog."""
    structlog.reset_defaults()


def failing_workers() -> riverpy.Workers:
    """Workers whose one job raises."""
    workers = riverpy.Workers()

    @workers.job
    async def failing(_job: riverpy.Job[Failing]) -> None:
        raise ValueError("no such order")

    assert failing
    return workers


@pytest.mark.parametrize("choice", ["plain", "silent", "structlog"])
def test_lines_go_where_the_program_wants_them(schema: Schema, tmp_path: Path, choice: str) -> None:
    """stdout holds the program's data alone; the log goes to its `logging`, whose levels count, or
    to the structlog that it has configured (FR-18)."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", schema.url, schema.name, choice],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": True}
    if choice == "silent":
        assert "riverpy" not in done.stderr
    elif choice == "plain":
        assert "\nriverpy jobs failed kinds={'failing': {'failed': 1" in done.stderr
    else:
        assert '"event": "jobs failed"' in done.stderr
        assert "riverpy jobs failed" not in done.stderr


@pytest.mark.usefixtures("_unconfigured")
@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
async def test_records_are_records_of_logging(
    schema: Schema, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    """caplog sees the lines as records of the logger "riverpy", with the keys as attributes and the
    place that logged them; lines of single jobs are made if its level is DEBUG (FR-18)."""
    caplog.set_level(level, logger="riverpy")
    client = riverpy.Client(
        schema.url,
        workers=failing_workers(),
        config=riverpy.Config(schema=schema.name),
        queues={"default": riverpy.QueueConfig()},
    )
    async with client:
        await client.insert(Failing(), riverpy.InsertOpts(max_attempts=1))
        await client.run(drain=True)
    records = [
        record for record in caplog.records if record.getMessage().startswith("jobs failed ")
    ]
    assert [(record.name, record.levelname) for record in records] == [("riverpy", "WARNING")]
    assert records[0].__dict__["kinds"]["failing"]["failed"] == 1
    assert records[0].filename == "summary.py"
    assert (JOB_FAILED in caplog.text) is (level == "DEBUG")


class Unprintable:
    """A value that must not be formatted."""

    def __repr__(self) -> str:
        raise AssertionError("formatted")


@pytest.mark.usefixtures("_unconfigured")
def test_record_is_formatted_by_handlers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A line that no handler writes is never formatted; one whose keys are attributes of every
    record, or whose text has a percent sign, is written like others (FR-18)."""
    caplog.set_level(logging.INFO, logger="riverpy")
    log = get_logger(client_id="me")
    log.debug("filtered", value=Unprintable())
    drops = logging.Filter("other")
    for handler in logging.getLogger().handlers:
        handler.addFilter(drops)
    try:
        log.info("dropped", value=Unprintable())
    finally:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(drops)
    assert not caplog.records
    log.info("100 % done", name="x y", only={"a": 1})
    get_logger().info("100 % done")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.with_rate_limit().exception("handler failed")
    assert [record.getMessage() for record in caplog.records] == [
        "100 % done name='x y' only={'a': 1} client_id='me'",
        "100 % done",
        "handler failed client_id='me'",
    ]
    assert caplog.records[0].name == "riverpy"
    assert caplog.records[0].__dict__["name_"] == "x y"
    assert "ValueError: wrong" in caplog.text


def test_limited_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is logged ten times a minute at its level, then at debug, which is announced once;
    another event has its own limit (OP-07)."""
    now = 5.0
    monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: now))
    limited = get_logger().with_rate_limit()
    with structlog.testing.capture_logs() as log:
        for job_id in range(1000):
            limited.error("it happened", job_id=job_id)
        limited.error("another thing happened")
    shown = [entry for entry in log if entry["log_level"] != "debug"]
    assert [entry.get("job_id") for entry in shown[:EVENTS_PER_WINDOW_MAX]] == [
        *range(EVENTS_PER_WINDOW_MAX)
    ]
    assert shown[EVENTS_PER_WINDOW_MAX]["limited_event"] == "it happened"
    assert [entry["event"] for entry in shown[EVENTS_PER_WINDOW_MAX + 1 :]] == [
        "another thing happened"
    ]
    assert len(log) == 1002
    now += EVENT_WINDOW_SECONDS
    with structlog.testing.capture_logs() as log:
        limited.error("it happened", job_id=1)
    assert [entry["log_level"] for entry in log] == ["error"]


def test_limited_log_keeps_tracebacks() -> None:
    """Beyond the limit, an error is logged with its traceback too."""
    limited = get_logger().with_rate_limit()
    with structlog.testing.capture_logs() as log:
        for _ in range(EVENTS_PER_WINDOW_MAX + 1):
            limited.exception("it happened")
    entries = [entry for entry in log if entry["event"] == "it happened"]
    assert [entry["log_level"] for entry in entries] == ["error"] * EVENTS_PER_WINDOW_MAX + [
        "debug"
    ]
    assert [entry["exc_info"] for entry in entries] == [True] * len(entries)


def test_repeated_failure_log() -> None:
    """A failure is logged once at its level, then at debug until the recovery, which is logged
    once. A failure with another cause is logged at its level; a known one is not."""
    failures, error = RepeatedFailureLog(get_logger(queue="q")), ValueError("wrong")
    with structlog.testing.capture_logs() as log:
        failures.log_recovery("it works")
        failures.log_failure("it failed", is_cause_logged=True)
        assert not failures.is_failing
        for cause in ("a", "a", "b"):
            failures.log_failure("it failed", level="error", cause=cause, exc_info=error, n=1)
            assert failures.is_failing
        failures.log_recovery("it works", n=2)
        failures.log_recovery("it works")
        failures.log_failure("it failed")
        failures.log_recovery()
        assert not failures.is_failing
    assert [(entry["event"], entry["log_level"], "exc_info" in entry) for entry in log] == [
        ("it failed", "debug", False),
        ("it failed", "error", True),
        ("it failed", "debug", False),
        ("it failed", "error", True),
        ("it works", "info", False),
        ("it failed", "warning", False),
    ]
    assert (log[1]["n"], log[4]["n"]) == (1, 2)


def test_structlog_may_be_configured_late() -> None:
    """A logger that was made before the program configured structlog writes as configured
    (FR-18)."""
    structlog.reset_defaults()
    log = get_logger(client_id="me")
    with structlog.testing.capture_logs() as entries:
        log.warning("lost")
    assert entries == [{"event": "lost", "client_id": "me", "log_level": "warning"}]
