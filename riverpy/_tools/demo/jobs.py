"""The jobs of `riverpy demo`: their args and their code."""

from __future__ import annotations

import hashlib
import threading
import zlib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import msgspec

from riverpy.errors import JobCancel, JobSnooze
from riverpy.insert_opts import InsertOpts, UniqueOpts
from riverpy.job import Job  # noqa: TC001 (the annotations of the jobs are read at run time)
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy.job import JobArgs

READ_CHUNK_BYTES = 1024 * 1024
RETRY_DELAY = timedelta(milliseconds=500)
SNOOZE_DELAY = timedelta(seconds=1)


class CompressFileArgs(msgspec.Struct, frozen=True):
    """The args of a job that hashes and compresses a file."""

    kind: ClassVar[str] = "compress_file"
    path: str


class CountFilesArgs(msgspec.Struct, frozen=True):
    """The args of a job that counts the files in a directory. The job is unique by its args."""

    kind: ClassVar[str] = "count_files"
    path: str
    pattern: str

    def insert_opts(self) -> InsertOpts:
        """Return options that allow only one job for each directory and pattern."""
        return InsertOpts(unique_opts=UniqueOpts(by_args=True))


class FailOnceArgs(msgspec.Struct, frozen=True):
    """The args of a job that fails at its first attempt and succeeds at its second."""

    kind: ClassVar[str] = "fail_once"
    number: int


class SnoozeOnceArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "snooze_once"


class CancelItselfArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "cancel_itself"


class RunUntilCancelledArgs(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "run_until_cancelled"


def make_args_per_feature(directory: str) -> list[JobArgs]:
    """Return the args of one job for each feature to show, such as a retry or a snooze. The most
    important jobs are first, because `--jobs` limits the number of jobs."""
    return [
        FailOnceArgs(1),
        CountFilesArgs(directory, "*"),
        SnoozeOnceArgs(),
        CancelItselfArgs(),
        RunUntilCancelledArgs(),
        FailOnceArgs(2),
        FailOnceArgs(3),
        CountFilesArgs(directory, "*.py"),
        CountFilesArgs(directory, "*.txt"),
    ]


class DemoJobFunctions:
    """The functions that work the jobs of the demo.

    Args:
        cancel_job: a function that takes the id of a job and cancels the job.
    """

    def __init__(self, cancel_job: Callable[[int], Awaitable[object]]) -> None:
        self._cancel_job = cancel_job
        self._stop_requested = threading.Event()
        self.workers = Workers()
        self.workers.blocking_job(timeout=None)(self.compress_file)
        self.workers.blocking_job(timeout=None)(self.count_files)
        self.workers.job(next_retry=lambda _job: RETRY_DELAY)(self.fail_once)
        self.workers.job(self.snooze_once)
        self.workers.job(self.cancel_itself)
        self.workers.job(timeout=None)(self.run_until_cancelled)

    def stop_blocking_jobs(self) -> None:
        """Request that the jobs in threads end. The client cannot cancel a thread."""
        self._stop_requested.set()

    def compress_file(self, job: Job[CompressFileArgs]) -> None:
        """Hash and compress the file. This runs in a thread, because it uses the processor."""
        try:
            job.record_output(self._compress_and_hash(Path(job.args.path)))
        except OSError as error:
            raise JobCancel(f"cannot read it: {error.strerror}") from error

    def _compress_and_hash(self, path: Path) -> dict[str, object]:
        digest, compressor = hashlib.sha256(), zlib.compressobj()
        bytes_in = bytes_out = 0
        with path.open("rb") as file:
            while chunk := file.read(READ_CHUNK_BYTES):
                if self._stop_requested.is_set():
                    # This is no OSError: `compress_file` reports OSError as an unreadable file.
                    raise RuntimeError("the demo was stopped")
                digest.update(chunk)
                bytes_in += len(chunk)
                bytes_out += len(compressor.compress(chunk))
        bytes_out += len(compressor.flush())
        return {"bytes_in": bytes_in, "bytes_out": bytes_out, "sha256": digest.hexdigest()}

    def count_files(self, job: Job[CountFilesArgs]) -> None:
        """Count the files. This runs in a thread, because it blocks."""
        job.record_output({"files": len(list(Path(job.args.path).glob(job.args.pattern)))})

    async def fail_once(self, job: Job[FailOnceArgs]) -> None:
        """Fail at the first attempt. The error is stored in the row."""
        if job.attempt == 1:
            raise RuntimeError("this job always fails at its first attempt")

    async def snooze_once(self, job: Job[SnoozeOnceArgs]) -> None:
        """Snooze once. A snooze uses no attempt. The job's metadata counts the snoozes."""
        if "snoozes" not in job.metadata:
            raise JobSnooze(SNOOZE_DELAY)

    async def cancel_itself(self, job: Job[CancelItselfArgs]) -> None:
        """Cancel the job, so that it is not retried."""
        raise JobCancel("there is nothing to do")

    async def run_until_cancelled(self, job: Job[RunUntilCancelledArgs]) -> None:
        """Let the client cancel this job, and run until the cancellation arrives."""
        await self._cancel_job(job.id)
        await anyio.sleep_forever()
