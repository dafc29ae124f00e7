"""Workers of each language with the same settings and the same output."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from riverpy import (
    Client,
    Config,
    EventKind,
    InsertOpts,
    JobRetention,
    QueueConfig,
    RawArgs,
    RiverError,
    Workers,
)
from riverpy.joblog import JobLog
from riverpy.periodic import PeriodicJob
from riverpy.schedules import cron, every
from tests.interop.conform import KIND, ConformWorker
from tests.interop.inserting import unique_opts_of
from tests.interop.river_go import GoProcess, Lines
from tests.interop.stepping import StepWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Event, JobRow, StopReport, StuckJob
    from tests._database import Schema
    from tests.interop.river_go import RiverGo, Row

LANGUAGES = ("go", "python")
OTHER = {"go": "python", "python": "go"}
SETTINGS_VARIABLE = "INTEROP_WORKER"
ROOT = Path(__file__).resolve().parents[2]
RIVERPY = Path(sys.executable).with_name("riverpy")
FOR_EVER = -1.0


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for which finished jobs are kept, or FOR_EVER."""

    cancelled: float = 86400
    completed: float = 86400
    discarded: float = 604800


class Periodic(msgspec.Struct, frozen=True, kw_only=True):
    """A periodic job in the form of `go/periodic.go`. Its args are `{"by": LANGUAGE}`."""

    id: str
    kind: str = KIND
    queue: str = "default"
    every_ms: int = 0
    cron: str = ""
    """The schedule: this or `every_ms`."""
    unique: dict[str, Any] = {}
    """Unique options, as in a request."""
    run_on_start: bool = False

    def job(self) -> PeriodicJob:
        """Return it in riverpy's form."""
        args = RawArgs(self.kind, '{"by":"python"}')
        opts = InsertOpts(queue=self.queue, unique_opts=unique_opts_of(self.unique))
        schedule = cron(self.cron) if self.cron else every(timedelta(milliseconds=self.every_ms))
        return PeriodicJob(
            schedule, lambda: (args, opts), id=self.id, run_on_start=self.run_on_start
        )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker of either language. Durations are in seconds; None is the default of the
    language."""

    queues: dict[str, int] = msgspec.field(default_factory=lambda: {"default": 10})
    """The slots of each queue."""
    poll: float = 3600
    candidate: bool = False
    """Whether it takes part in leader election."""
    known_kinds_only: bool = False
    poll_only: bool = False
    job_timeout: float | None = None
    rescue_after: float | None = None
    dead_after: float | None = None
    """Python only."""
    soft_stop_timeout: float | None = None
    hard_stop_timeout: float = 10
    """Python only; Go waits without a timeout."""
    stuck_threshold: float | None = None
    error_handler: str | None = None
    """The answer of the error handler, whose call is the event `error_handler`: `nothing`,
    `cancel`, or `panic`, which fails itself."""
    retention: Retention = Retention()
    reindex: str | None = None
    """Names of indexes, separated by commas, that are rebuilt about every second."""
    periodic: list[Periodic] = []
    leader_ttl: float = 15
    """Python only."""
    flags: list[str] = []
    """More flags of Go's verb `work`."""
    id: str | None = None

    def config(self, schema: str | None, emit: Any) -> Config:
        """Return riverpy's configuration."""
        optional = {
            "job_timeout": self.job_timeout,
            "rescue_after": self.rescue_after,
            "dead_after": self.dead_after,
            "soft_stop_timeout": self.soft_stop_timeout,
            "job_stuck_threshold": self.stuck_threshold,
        }
        values: dict[str, Any] = {
            name: timedelta(seconds=value) for name, value in optional.items() if value is not None
        }
        if self.soft_stop_timeout is None:
            values["soft_stop_timeout"] = None
        if self.error_handler is not None:
            values["error_handler"] = ErrorHandler(emit, self.error_handler)
        if self.reindex is not None:
            values["reindexer_index_names"] = self.reindex.split(",")
            values["reindexer_schedule"] = every(timedelta(seconds=1))
        kept = {
            name: None if value == FOR_EVER else timedelta(seconds=value)
            for name, value in msgspec.structs.asdict(self.retention).items()
        }
        return Config(
            middleware=[JobLog()],
            schema=schema,
            id=self.id,
            candidate=self.candidate,
            elect_interval=timedelta(seconds=min(5, self.leader_ttl / 3)),
            fetch_poll_interval=timedelta(seconds=self.poll),
            hard_stop_timeout=timedelta(seconds=self.hard_stop_timeout),
            job_stuck_handler=StuckHandler(emit),
            known_kinds_only=self.known_kinds_only,
            leader_ttl=timedelta(seconds=self.leader_ttl),
            poll_only=self.poll_only,
            retention=JobRetention(**kept),
            skip_unknown_job_check=True,
            **values,
        )

    def for_go(self) -> list[str]:
        """Return the flags of Go's verb `work`."""
        flags = ["--no-stagger", *self.flags]
        durations = {
            "fetch-poll-interval": self.poll,
            "job-timeout": self.job_timeout,
            "rescue-after": self.rescue_after,
            "soft-stop-timeout": self.soft_stop_timeout,
            "stuck-threshold": self.stuck_threshold,
            "reindex-every": None if self.reindex is None else 1.0,
            **{
                f"{name}-retention": -1e-9 if value == FOR_EVER else value
                for name, value in msgspec.structs.asdict(self.retention).items()
            },
        }
        for name, value in durations.items():
            if value is not None:
                # Go's 0 is its default; here it is a very short time.
                flags += [f"--{name}", f"{round(value * 1e9) or 1}ns"]
        texts = {
            "queues": ",".join(f"{name}:{slots}" for name, slots in self.queues.items()),
            "client-id": self.id,
            "error-handler": self.error_handler,
            "reindex": self.reindex,
            "periodic-jobs": msgspec.json.encode(self.periodic).decode(),
        }
        for name, text in texts.items():
            if text is not None:
                flags += [f"--{name}", text]
        switches = {
            "known-kinds-only": self.known_kinds_only,
            "no-election": not self.candidate,
            "poll-only": self.poll_only,
        }
        return flags + [f"--{name}" for name, is_on in switches.items() if is_on]


class ErrorHandler:
    """Emits each failure, and then does what the settings say."""

    def __init__(self, emit: Any, do: str) -> None:
        self._emit = emit
        self._do = do

    async def handle_error(self, job: JobRow, error: BaseException, /) -> bool | None:
        self._emit(
            {
                "event": "error_handler",
                "id": job.id,
                "attempt": job.attempt,
                "state": job.state.value,
                "error": str(error),
            }
        )
        if self._do == "panic":
            raise RuntimeError("the error handler fails")
        return self._do == "cancel"


class StuckHandler:
    """Emits each stuck job."""

    def __init__(self, emit: Any) -> None:
        self._emit = emit

    def handle_stuck(self, job: StuckJob, /) -> bool:
        self._emit(
            {
                "event": "job_stuck",
                "id": job.id,
                "kind": job.kind,
                "queue": job.queue,
                "total": job.total,
            }
        )
        return False


class Worker(Lines):
    """A worker of one language: a process, or riverpy in the process of the test.

    It emits `job_started` and the other events of `go/conform.go`, and the events of its client.
    """

    language: str
    id: str

    def release(self, message: str) -> None:
        """Release the jobs that wait for this message."""
        raise NotImplementedError

    def stop(self) -> None:
        """Start a soft stop: jobs may end."""
        raise NotImplementedError

    def stop_hard(self) -> None:
        """Start a hard stop: jobs are cancelled."""
        raise NotImplementedError

    async def stopped(self) -> None:
        """Wait until it has stopped."""
        raise NotImplementedError

    async def add_queue(self, name: str, slots: int) -> str:
        """Add a queue to the running client. Return the error: its type, or ""."""
        raise NotImplementedError

    async def remove_queue(self, name: str, seconds: float = 20.0) -> str:
        """Remove a queue. Return the error: its type, "timeout" if jobs still run, or ""."""
        raise NotImplementedError

    async def resize_queue(self, name: str, slots: int) -> str:
        """Change the slots of a queue without running jobs. Return the error."""
        return await self.remove_queue(name) or await self.add_queue(name, slots)


class ProcessWorker(Worker):
    """A process: the verb `work` of Go's program, or `riverpy worker`."""

    def __init__(self, language: str, process: GoProcess, client_id: str) -> None:
        super().__init__()
        self.language, self.id = language, client_id
        self.process = process

    async def line(self) -> Row:
        return await self.process.line()

    def release(self, message: str) -> None:
        self.process.send({"release": message})

    def stop(self) -> None:
        self.process.terminate()

    def stop_hard(self) -> None:
        self.process.terminate()
        self.process.interrupt()

    async def stopped(self) -> None:
        await self.process.wait()

    async def add_queue(self, name: str, slots: int) -> str:
        return await self._change_queue(do="add", queue=name, slots=slots)

    async def remove_queue(self, name: str, seconds: float = 20.0) -> str:
        timeout = int(seconds * 1000)
        return await self._change_queue(do="remove", queue=name, timeout_ms=timeout)

    async def _change_queue(self, *, queue: str, **change: Any) -> str:
        self.process.send({"queue": queue, **change})
        return (await self.until("queue_changed", queue=queue))["error"].rpartition(".")[2]


class PythonWorker(Worker):
    """riverpy in the test's own process."""

    language = "python"
    client: Client
    report: StopReport | None = None
    """The report of its run, once it has stopped."""

    def __init__(self, schema: Schema, settings: Settings) -> None:
        super().__init__()
        self._schema = schema
        self._lines = asyncio.Queue[Any]()
        self._stopped = anyio.Event()
        emit = self._lines.put_nowait
        self._conform = conform = ConformWorker(emit, self._insert_effect, schema.connected)
        steps = StepWorker(emit, conform.signal, schema.connected)
        self.client = Client(
            schema.url,
            workers=Workers().add(conform).add(steps),
            queues={name: QueueConfig(max_workers=n) for name, n in settings.queues.items()},
            config=settings.config(schema.name, self._lines.put_nowait),
            periodic_jobs=[periodic.job() for periodic in settings.periodic],
        )
        self.id = self.client.id

    async def line(self) -> Row:
        return await self._lines.get()

    def release(self, message: str) -> None:
        self._conform.release(message)

    def stop(self) -> None:
        self.client.stop()

    def stop_hard(self) -> None:
        self.client.stop_and_cancel()

    async def stopped(self) -> None:
        await self._stopped.wait()

    async def add_queue(self, name: str, slots: int) -> str:
        try:
            await self.client.queues.add(name, QueueConfig(max_workers=slots))
        except RiverError as error:
            return type(error).__name__
        return ""

    async def remove_queue(self, name: str, seconds: float = 20.0) -> str:
        try:
            removal = await self.client.queues.remove(name, timeout=timedelta(seconds=seconds))
        except RiverError as error:
            return type(error).__name__
        return "" if removal.is_complete else "timeout"

    async def resize_queue(self, name: str, slots: int) -> str:
        await self.client.queues.resize(name, slots)
        return ""

    async def _insert_effect(self, job_id: int, attempt: int) -> None:
        table = f'"{self._schema.name}".effects'
        async with self.client._get_open_pool().acquire() as connection:
            await insert_effect(connection, table, job_id, attempt)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run it until the end of the block. Jobs that still run may then end."""

        async def run(*, task_status: Any) -> None:
            try:
                self.report = await self.client.run(task_status=task_status)
            finally:
                self._stopped.set()

        async def forward(subscription: Any) -> None:
            async for event in subscription:
                self._lines.put_nowait(event_line(event))

        async with (
            self.client,
            self.client.subscribe(*EventKind) as subscription,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(forward, subscription)
            await tasks.start(run)
            try:
                yield
            finally:
                self._conform.release_all()
                self.client.stop_and_cancel()
                with anyio.CancelScope(shield=True):
                    await self._stopped.wait()


async def insert_effect(connection: Any, table: str, job_id: int, attempt: int) -> None:
    """Do the step `effect`."""
    await connection.execute(
        f"INSERT INTO {table} (job_id, attempt, language) VALUES ($1, $2, 'python')",
        job_id,
        attempt,
    )


def event_line(event: Event) -> Row:
    """Return an event in the form of Go."""
    line: Row = {"event": event.kind.value}
    if event.job is not None:
        line |= {
            "id": event.job.id,
            "kind": event.job.kind,
            "state": event.job.state.value,
            "attempt": event.job.attempt,
        }
    if event.queue is not None:
        line["queue"] = event.queue
    return line


class Fleet:
    """Creates workers on the test's schema."""

    def __init__(self, go: RiverGo, schema: Schema) -> None:
        self._go = go
        self._schema = schema

    @asynccontextmanager
    async def worker(self, language: str, **settings: Any) -> AsyncGenerator[Worker]:
        """Start a worker, and wait for its start. riverpy runs in the test's process."""
        if language == "go":
            async with self.process("go", **settings) as worker:
                yield worker
            return
        worker = PythonWorker(self._schema, Settings(**settings))
        async with worker.running():
            yield worker

    @asynccontextmanager
    async def process(self, language: str, **settings: Any) -> AsyncGenerator[ProcessWorker]:
        """Start a worker in a process of its own, and wait for its start."""
        given = Settings(**settings)
        start = self._start_python if language == "python" else self._start_go
        process = await start(given)
        try:
            started = await process.until("started")
            yield ProcessWorker(language, process, started["client_id"])
        finally:
            await process.close()

    async def _start_go(self, settings: Settings) -> GoProcess:
        return GoProcess(await self._go.start("work", *settings.for_go()))

    async def _start_python(self, settings: Settings) -> GoProcess:
        return GoProcess(
            await asyncio.create_subprocess_exec(
                RIVERPY,
                "worker",
                "tests.interop.python_worker:client",
                "--database-url",
                self._schema.url,
                cwd=ROOT,
                env={
                    **os.environ,
                    SETTINGS_VARIABLE: msgspec.json.encode((self._schema.name, settings)).decode(),
                },
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=2**26,
            )
        )
