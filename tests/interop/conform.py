"""The job kind `conform` in Python: a job does the steps in its args. `go/conform.go` does the
same, and describes each step."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from riverpy import Job, JobCancel, JobSnooze, Worker
from tests.interop.inserting import request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.interop.inserting import Request
    from tests.interop.river_go import Row

KIND = "conform"
EFFECTS = "CREATE TABLE effects (job_id bigint, attempt int, language text)"
"""The table for the step `effect`. The test creates it in its schema."""


class Conform(msgspec.Struct, frozen=True):
    """The args. The JSON keys are those of the Go struct, in its order."""

    kind: ClassVar[str] = KIND
    message: str = ""
    behavior: str = ""
    duration_ms: int = 0
    output: Any = UNSET


def conform(behavior: str = "", **args_and_opts: Any) -> Request:
    """Return a request for a job with these steps. `message`, `duration_ms` and `output` are args;
    all others are insert options."""
    names = set(Conform.__struct_fields__) & set(args_and_opts)
    args = Conform(behavior=behavior, **{name: args_and_opts.pop(name) for name in names})
    return request(msgspec.json.encode(args).decode(), kind=KIND, **args_and_opts)


class Done(Exception):
    """The job has no more steps."""


class Boom(Exception):
    """The exception of the step `panic`."""


class InsertEffect(Protocol):
    """Stores a side effect."""

    def __call__(self, job_id: int, attempt: int, /) -> Awaitable[object]: ...


class Connect(Protocol):
    """Returns a connection to the database of the job."""

    def __call__(self) -> AbstractAsyncContextManager[Any]: ...


class ConformWorker(Worker[Conform]):
    """Worker of the kind. `emit` gets each event as a line in the form of Go."""

    def __init__(
        self, emit: Callable[[Row], None], insert_effect: InsertEffect, connect: Connect
    ) -> None:
        self._emit = emit
        self._insert_effect = insert_effect
        self._connect = connect
        self._released: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def release(self, message: str) -> None:
        """Release the jobs that wait for this message."""
        self._released[message].set()

    async def signal(self, message: str) -> None:
        """Wait until this message is released."""
        await self._released[message].wait()

    def release_all(self) -> None:
        """Release all waiting jobs."""
        for event in self._released.values():
            event.set()

    def timeout(self, job: Job[Conform]) -> timedelta | UnsetType | None:
        ms = job.metadata.get("timeout_ms", 0)
        return UNSET if ms == 0 else None if ms < 0 else timedelta(milliseconds=ms)

    def next_retry(self, job: Job[Conform]) -> timedelta | None:
        metadata = job.metadata
        if job.attempt < metadata.get("until", 0):
            return timedelta(0)
        ms = metadata.get("retry_ms")
        return None if ms is None else timedelta(milliseconds=ms)

    async def work(self, job: Job[Conform]) -> None:
        self._print("job_started", job)
        try:
            for step in job.args.behavior.split():
                await self._do(step, job)
        except Done:
            pass

    def _print(self, event: str, job: Job[Conform]) -> None:
        self._emit(
            {
                "event": event,
                "id": job.id,
                "kind": job.kind,
                "attempt": job.attempt,
                "message": job.args.message,
            }
        )

    async def _do(self, step: str, job: Job[Conform]) -> None:
        args = job.args
        released = self._released[args.message]
        seconds = args.duration_ms / 1000
        match step:
            case "signal":
                await released.wait()
            case "insist":
                await insistently(released.wait)
            case "sleep":
                await asyncio.sleep(seconds)
            case "swallow":
                until = time.monotonic() + seconds
                await insistently(lambda: asyncio.sleep(max(0.0, until - time.monotonic())))
            case "cancelled":
                await until_cancelled()
                self._print("cancel_noticed", job)
            case "first":
                if job.attempt > 1:
                    raise Done
            case "effect":
                await self._insert_effect(job.id, job.attempt)
            case "print":
                self._print("effect", job)
            case "complete":
                async with self._connect() as connection, connection.transaction():
                    await job.complete_tx(connection)
            case "log":
                if job.has_log:
                    job.log.info(job.args.message)
            case "reserved":
                job.set_metadata("river:mine", 1)
            case "output":
                job.record_output({"n": 1} if args.output is UNSET else args.output)
            case _:
                end(step, job)


def end(step: str, job: Job[Conform]) -> None:
    """Do one of the steps that end a job."""
    message = job.args.message
    delay = timedelta(milliseconds=job.args.duration_ms)
    match step:
        case "return":
            raise Done
        case "fail":
            raise RuntimeError(message)
        case "panic":
            raise Boom(message)
        case "cancel":
            raise JobCancel(message)
        case "snooze":
            raise JobSnooze(delay)
        case "snooze-once":
            if not job.metadata.get("snoozes"):
                raise JobSnooze(delay)
        case "end":
            raise asyncio.CancelledError
        case _:
            raise ValueError(f"no such step: {step!r}")


async def insistently(wait: Callable[[], Awaitable[object]]) -> None:
    """Wait to the end in spite of cancellations."""
    while True:
        try:
            await wait()
        except asyncio.CancelledError:
            continue
        return


async def until_cancelled() -> None:
    """Wait for the cancellation, and swallow it."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


def error_text(language: str, message: str, *, panics: bool = False) -> str:
    """Return the text of a failure's error entry. River's is the error's own text; riverpy's has
    its type too."""
    if language == "go":
        return message
    return f"{'Boom' if panics else 'RuntimeError'}: {message}"
