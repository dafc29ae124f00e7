"""More log lines than their reader can take: the worker continues, and lost lines are counted."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from riverpy._log_events import LOG_LINES_DROPPED
from riverpy.cli._log_stream import LOG_BUFFER_BYTES_MAX, LogStream
from tests.cli.worker_process import RIVERPY, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests._database import Schema

PATIENCE = 30.0
LINES = 600
LENGTH = 10_000
JOBS = f"""
import logging
from typing import ClassVar

import msgspec
import riverpy

workers = riverpy.Workers()


class Task(msgspec.Struct):
    kind: ClassVar[str] = "task"
    n: int = 0


@workers.job
async def task(job: riverpy.Job[Task]) -> None:
    if job.args.n == 1:
        for number in range({LINES}):
            logging.getLogger("mine").warning("%05d %s", number, "x" * {LENGTH})


client = riverpy.Client(workers=workers, queues={{"default": riverpy.QueueConfig()}})
"""


def pipe() -> tuple[int, int]:
    """Return the read end and the write end of a pipe, like a shell's."""
    return os.pipe()


def journal() -> tuple[int, int]:
    """Return both ends of a socket, like systemd's."""
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


def terminal() -> tuple[int, int]:
    """Return both ends of a terminal."""
    reader, writer = os.openpty()
    return reader, writer


async def insert(schema: Schema, n: int) -> None:
    """Insert a job."""
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts)"
        " VALUES (jsonb_build_object('n', $1::int), 'task', 25)",
        n,
    )


async def until_completed(schema: Schema, count: int) -> None:
    """Wait until this many jobs are completed."""
    async with asyncio.timeout(PATIENCE):
        while True:
            jobs = await schema.jobs()
            if [job["state"] for job in jobs] == ["completed"] * count:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", [pipe, journal, terminal])
async def test_reader_of_the_log_has_stopped(
    schema: Schema, tmp_path: Path, ends: Callable[[], tuple[int, int]]
) -> None:
    """A job that logs 6 MB to a reader that does not read blocks nothing: it and other jobs are
    completed. When the reader continues it receives each line that was kept, in order, and the
    number of lost lines."""
    (tmp_path / "jobs.py").write_text(JOBS)
    reader, writer = ends()
    await insert(schema, 1)
    with subprocess.Popen(
        [
            *(RIVERPY, "worker", "jobs", "--log=json"),
            *(f"--database-url={schema.url}", f"--schema={schema.name}"),
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=writer,
    ) as process:
        os.close(writer)
        try:
            await until_completed(schema, 1)
            await insert(schema, 2)
            await until_completed(schema, 2)

            entries = await asyncio.to_thread(read_until, reader, LOG_LINES_DROPPED)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE) == 0
        finally:
            process.kill()
            os.close(reader)
    numbers = [int(entry["event"][:5]) for entry in entries if "xxx" in entry["event"]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) * LENGTH > LOG_BUFFER_BYTES_MAX * 0.8
    assert entries[-1]["lines"] >= LINES - len(numbers)


def read_until(reader: int, event: str) -> list[dict[str, object]]:
    """Return the log up to the line of this event."""
    entries: list[dict[str, object]] = []
    with os.fdopen(os.dup(reader), encoding="utf-8") as lines:
        for line in lines:
            entries.append(json.loads(line))
            if entries[-1]["event"] == event:
                return entries
    raise AssertionError(f"no line {event!r}")


@pytest.mark.parametrize("end", ["left", "crash"])
def test_log_of_a_process_that_ends(end: str) -> None:
    """Lines that were logged before a process exits or crashes are in the log, as far as they could
    be written without waiting."""
    leave = {
        "left": "from riverpy.cli._signals import exit_process; exit_process(3, 'the last note')",
        "crash": "os._exit(3)",
    }[end]
    code = (
        "import os, structlog; from riverpy.cli._logging import configure_logging; "
        f"configure_logging('json', 'info'); structlog.get_logger().info('the last line'); {leave}"
    )
    done = subprocess.run(
        [RIVERPY.with_name("python"), "-c", code],
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 3
    first, *others = done.stderr.decode().splitlines()
    assert json.loads(first)["event"] == "the last line"
    assert others == (["the last note"] if end == "left" else [])


FINALIZER = """
import structlog
from riverpy.cli._logging import configure_logging


class Cycle:
    def __del__(self):
        raise ValueError("mine")


def write(data):
    stream._write_nonblocking = write_at_once
    Cycle()
    return write_at_once(data)


stream = configure_logging("json", "info")
write_at_once, stream._write_nonblocking = stream._write_nonblocking, write
structlog.get_logger("riverpy").info("the line")
"""


def test_finalizer_while_a_line_is_written() -> None:
    """The garbage collector may run a finalizer while a line is written. If the finalizer raises,
    nothing blocks, and its own line follows."""
    done = subprocess.run(
        [RIVERPY.with_name("python"), "-c", FINALIZER],
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=PATIENCE,
        check=True,
    )
    first, second = map(json.loads, done.stderr.decode().splitlines())
    assert first["event"] == "the line"
    assert second["place"] == "Cycle.__del__"


def test_descriptor_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk loses log lines and raises nothing in the logging code. Logging continues when
    there is space."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        stream = LogStream(full)
        stream.write("lost\n")
        stream.wait_until_written(PATIENCE)
        with (tmp_path / "log").open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), full.fileno())
    assert stream._dropped_line_count == 1


def test_descriptor_that_others_made_unwaiting() -> None:
    """Another process sets a shared descriptor to non-blocking. No line is lost."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "w", encoding="utf-8") as end:
        stream = LogStream(end)
        text = "x" * 200_000 + "\n"
        stream.write(text)
        with os.fdopen(reader, encoding="utf-8") as lines:
            assert lines.readline() == text
        stream.wait_until_written(PATIENCE)


def test_file_is_closed(tmp_path: Path) -> None:
    """After its file was closed, a line is still written there, and not to the file, socket or pipe
    that has the number of the descriptor now. Without the stream no descriptor stays open."""
    log = (tmp_path / "log").open("w", encoding="utf-8")
    number = log.fileno()
    stream = LogStream(log)
    log.close()
    with (tmp_path / "other").open("w", encoding="utf-8") as other:
        assert other.fileno() == number
        stream.write("line\n")
    assert (tmp_path / "log").read_text() == "line\n"
    assert (tmp_path / "other").read_text() == ""
    own = stream._descriptor
    del stream
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)


@pytest.mark.parametrize("ends", [pipe, journal])
def test_reader_has_gone(ends: Callable[[], tuple[int, int]]) -> None:
    """When the reader has exited, the code that waits for a stop is notified once, even while a
    line waits for the reader. Later lines are discarded."""
    reader, writer = ends()
    calls = Counter[str]()
    is_told = threading.Event()

    def broken() -> None:
        calls["broken"] += 1
        is_told.set()

    with os.fdopen(writer, "w", encoding="utf-8") as end:
        stream = LogStream(end)
        stream.on_reader_ended = broken
        stream.write("x" * 1_000_000)  # more than fits, so a thread continues to write
        os.close(reader)
        assert is_told.wait(PATIENCE)
        stream.write("y")
        stream.write("z")
        end.write("of others")
        end.flush()
    assert calls == {"broken": 1}
