"""The job kind `steps` in Python: a job with resumable steps, which are in its args. `go/steps.go`
does the same, and describes each word."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from riverpy import Job, JobCancel, JobSnooze, Worker
from tests.interop.conform import Boom
from tests.interop.inserting import request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.interop.conform import Connect
    from tests.interop.inserting import Request
    from tests.interop.river_go import Row

KIND = "steps"


class Spec(msgspec.Struct, frozen=True):
    """One step."""

    name: str
    does: str = ""
    cursor: str = ""


class StepArgs(msgspec.Struct, frozen=True):
    """The args. The JSON keys are those of the Go struct."""

    kind: ClassVar[str] = KIND
    message: str = ""
    steps: list[Spec] = []
    then: str = ""


def steps(*specs: Spec, then: str = "", message: str = "no luck", **opts: Any) -> Request:
    """Return a request for a job with these steps."""
    args = StepArgs(message, list(specs), then)
    return request(msgspec.json.encode(args).decode(), kind=KIND, **opts)


class Rollback(Exception):
    """Ends a transaction that is rolled back."""


class StepWorker(Worker[StepArgs]):
    """Worker of the kind. `emit` gets each event, and `signal` waits for a message."""

    def __init__(
        self,
        emit: Callable[[Row], None],
        signal: Callable[[str], Awaitable[object]],
        connect: Connect,
    ) -> None:
        self._emit, self._signal, self._connect = emit, signal, connect

    def next_retry(self, job: Job[StepArgs]) -> timedelta:
        return timedelta(milliseconds=job.metadata.get("retry_ms", 0))

    async def work(self, job: Job[StepArgs]) -> None:
        self._print("job_started", job)
        types: dict[str, Any] = {"any": Any, "int": int}
        for spec in job.args.steps:
            if spec.cursor:
                await job.step(spec.name, self._run, job, spec, cursor=types[spec.cursor])
            else:
                await job.step(spec.name, self._run, None, job, spec)
        await self._do(job, job.args.then)

    def _print(self, event: str, job: Job[StepArgs], **more: object) -> None:
        self._emit({"event": event, "id": job.id, "attempt": job.attempt, **more})

    async def _run(self, cursor: Any, job: Job[StepArgs], spec: Spec) -> None:
        self._print("step", job, name=spec.name, cursor=cursor)
        await self._do(job, spec.does)

    async def _do(self, job: Job[StepArgs], words: str) -> None:
        for limited in words.split():
            word, _, attempt = limited.partition("@")
            if not attempt or int(attempt) == job.attempt:
                await self._word(job, *word.partition("=")[::2])

    async def _word(self, job: Job[StepArgs], word: str, value: str) -> None:
        message = job.args.message
        match word:
            case "set":
                job.set_cursor(msgspec.json.decode(value))
            case "tx":
                await self._store(job, commit=value == "commit")
            case "signal":
                await self._signal(message)
            case "nest":
                await job.step("nested", asyncio.sleep, 0)
            case "fail":
                raise RuntimeError(message)
            case "panic":
                raise Boom(message)
            case "cancel":
                raise JobCancel(message)
            case "snooze-once":
                if not job.metadata.get("snoozes"):
                    raise JobSnooze(timedelta(hours=1))
            case "end":
                raise asyncio.CancelledError
            case _:
                raise ValueError(f"no such word: {word!r}")

    async def _store(self, job: Job[StepArgs], *, commit: bool) -> None:
        with suppress(Rollback):
            async with self._connect() as connection, connection.transaction():
                await job.checkpoint(connection)
                if not commit:
                    raise Rollback
