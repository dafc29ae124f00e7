"""The log of a job: what is stored for each attempt, from which loggers, within which limits."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec
import pytest
import structlog

from riverpy import (
    AttemptLog,
    ClientStateError,
    ConfigError,
    EventKind,
    InsertOpts,
    Job,
    JobCancel,
    JobSnooze,
)
from riverpy.joblog import JobLog, JobLogHandler, append_log_entry, record_event
from tests._database import connected
from tests.work.rig import Rig, Task, metadata_of

if TYPE_CHECKING:
    from collections.abc import Generator

LOG = "river:log"


@pytest.fixture
def logger() -> Generator[logging.Logger]:
    """Return a logger with the handler of job logs."""
    logger = logging.getLogger("test_joblog")
    handler = JobLogHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)


async def test_each_attempt(rig: Rig, logger: logging.Logger) -> None:
    """An attempt appends one entry to what the row held, whether it fails, is snoozed or cancelled.
    Lines of its tasks and threads belong to it, and lines below the level and of other code do not.
    A second JobLog changes nothing."""

    async def in_task(said: str) -> None:
        logger.error("task of %s", said)

    @rig.job(next_retry=lambda job: timedelta(0))
    async def work(job: Job[Task]) -> None:
        said = f"attempt {job.attempt}"
        logger.info("info of %s", said)
        logger.debug("too low")
        await asyncio.to_thread(logger.warning, "thread\0 of %s", said)
        await asyncio.create_task(in_task(said))
        match len(job.metadata[LOG]):
            case 1:
                raise ValueError("failed")
            case 2:
                raise JobSnooze(timedelta(0))
            case _:
                raise JobCancel("enough")

    logger.info("outside of a job")
    before = {"attempt": 9, "log": "of River\n", "more": 1.50}
    opts = InsertOpts(metadata={LOG: [before], "mine": 1})
    job_id = (await rig.insert(Task(), opts)).job.id
    await rig.work_due_jobs(middleware=[JobLog(), JobLog(level="ERROR")])
    found = metadata_of(await rig.row(job_id))
    entries = [
        {
            "attempt": n,
            "log": f"INFO info of attempt {n}\nWARNING thread\ufffd of attempt {n}\n"
            f"ERROR task of attempt {n}\n",
        }
        for n in (1, 2, 2)
    ]
    assert found[LOG] == [before, *entries]
    assert found["mine"] == 1


async def test_jobs_beside_each_other(rig: Rig, logger: logging.Logger) -> None:
    """Lines of jobs that run at the same time are not mixed, in threads of blocking jobs and with
    structlog too. A job that logs nothing stores nothing, and without JobLog `job.log` says what to
    do."""
    log = structlog.wrap_logger(None, processors=[record_event, _drop])
    both = threading.Barrier(2)

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        for number in range(3):
            both.wait(30)
            logger.info("line %d of %d", number, job.args.n)
        try:
            raise ValueError(job.args.n)
        except ValueError:
            log.exception("caught", number=job.args.n)
            job.log.exception("said %s", job.args.n)
        log.debug("too low")
        job.log.debug("too low")

    @rig.job(args=Quiet)
    async def quiet(job: Job[Quiet]) -> None:
        assert job.has_log is (job.args.n == 0)
        if job.args.n:
            with pytest.raises(ClientStateError, match=r"middleware=\[riverpy.joblog.JobLog\(\)\]"):
                job.log.info("no")

    async with rig.working(middleware=[JobLog()]) as client:
        for args in (Task(1), Task(2), Quiet(0)):
            await client.insert(args)
        ends = await rig.take(3)
    assert {event.kind for event in ends} == {EventKind.JOB_COMPLETED}
    for job in (event.job for event in ends):
        if job.kind == "quiet":
            assert job.metadata == {}
            continue
        n = json.loads(job.encoded_args)["n"]
        ((_, text),) = [entry.values() for entry in job.metadata[LOG]]
        lines = [line for line in text.splitlines() if not line.startswith((" ", "Traceback"))]
        assert lines[:3] == [f"INFO line {number} of {n}" for number in range(3)]
        assert [line.partition(" ")[2] for line in lines[3:]] == [
            f"ERROR caught number={n}",
            f"{n}",
            f"ERROR said {n}",
            f"{n}",
        ]
    assert (await rig.run_one(Quiet(1)))["state"] == "completed"


async def test_completed_in_a_transaction(rig: Rig) -> None:
    """The log and the progress of a job that completes itself in a transaction are stored."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        job.log.info("before")
        job.progress(1)
        async with connected(rig.url) as connection, connection.transaction():
            await job.complete_tx(connection)
        job.log.info("after")

    found = metadata_of(await rig.run_one_on_pool(middleware=[JobLog()]))
    assert found["riverpy:progress"]["done"] == 1
    assert [line.split()[-1] for line in found[LOG][0]["log"].splitlines()] == ["before", "after"]


def test_messages_that_cannot_be_formatted() -> None:
    """A message whose values do not fit, or have no text, is stored with a note and raises nothing.
    A mapping fills named places. The time of a handler is that of `job.log`."""

    class Silent:
        def __repr__(self) -> str:
            raise ValueError

    log = AttemptLog()
    for args in [("%d", "x"), ("100% %s", "x"), ("%s", Silent()), ("%(a)s", {"a": 1})]:
        log.info(args[0], *args[1:])
    log.info(Silent())  # type: ignore[arg-type]
    text = log.close()
    assert [line.split(" INFO ")[1] for line in text.splitlines()] == [
        "%d [not formatted, TypeError; values: 'x']",
        "100% %s [not formatted, ValueError; values: 'x']",
        "%s [not formatted, ValueError; values: <unprintable Silent object>]",
        "1",
        "<unprintable Silent object>",
    ]
    record = logging.LogRecord("name", logging.INFO, "", 0, "said", None, None)
    record.created = 0.5
    assert JobLogHandler().format(record) == "1970-01-01T00:00:00.500Z INFO name: said"


def test_limits() -> None:
    """The first bytes are kept, without a part of a character, and the rest is counted. Later lines
    are not kept even if they would fit. A closed log ignores lines. The oldest entries go first,
    and the newest stays."""
    log = AttemptLog(max_bytes=6)
    log.append("ab")
    log.append("éé\ud800")
    log.append("")
    assert log.close() == (
        "ab\né\n… 5 more bytes were logged: the limit is 6 bytes for each attempt\n"
    )
    log.append("late")
    assert log.close().startswith("… 5 more")
    old = [{"attempt": n, "log": "x" * 3_000_000} for n in (1, 2, 3)]
    kept = json.loads(append_log_entry(json.dumps({LOG: old}), 4, "y" * 2_000_000))
    assert [entry["attempt"] for entry in kept] == [2, 3, 4]
    (newest,) = json.loads(append_log_entry("{}", 5, "\0" * 2_000_000))
    assert newest["attempt"] == 5
    for odd in ('{"river:log": 5}', '["river:log"]', '{"mine": "river:log"}'):
        assert json.loads(append_log_entry(odd, 1, "a")) == [{"attempt": 1, "log": "a"}]


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": 2**21 + 1}, {"level": "LOUD"}, {"level": None}]
)
def test_refused_settings(options: dict[str, Any]) -> None:
    """Settings without a meaning are refused."""
    with pytest.raises(ConfigError, match=f"JobLog: {next(iter(options))} must be"):
        JobLog(**options)


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


class Quiet(msgspec.Struct):
    """The args of a job that logs nothing."""

    kind: ClassVar[str] = "quiet"
    n: int
