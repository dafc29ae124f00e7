"""One run of `riverpy demo`: insert jobs into an empty schema, work them, and check them in SQL."""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from riverpy._postgres.driver import DATABASE_ERRORS, close, connect
from riverpy._tools.demo import statements as sql
from riverpy._tools.demo.jobs import (
    CancelItself,
    CompressFile,
    CountFiles,
    DemoJobs,
    FailOnce,
    RunUntilCancelled,
    SnoozeOnce,
)
from riverpy._tools.demo.statements import ExpectedJob
from riverpy._tools.errors import ToolError
from riverpy.client import Client
from riverpy.config import Config, QueueConfig
from riverpy.events import EventKind
from riverpy.insert_opts import InsertManyParams
from riverpy.job import JobState
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence

    from anyio.abc import TaskGroup, TaskStatus

    from riverpy._postgres.driver import Connection
    from riverpy._tools.demo.files import Files
    from riverpy._tools.demo.statements import Summary
    from riverpy.events import Event
    from riverpy.job import JobArgs

SLOTS = 10
BATCH = 500
"""Jobs in one insert."""
COUNT_INTERVAL = 0.1
"""Seconds between two counts of the unfinished jobs."""
STALL_TIMEOUT = 30.0
"""Seconds without a running or finished job after which the run fails."""
SAMPLE = 32
"""Files whose digest is checked."""
SAMPLE_SIZE_MAX = 1024 * 1024
"""Bytes of such a file."""
STATEMENT_TIMEOUT = 60.0


class _ShownJob(msgspec.Struct, frozen=True):
    """A job that shows one feature, and how it should end."""

    args: JobArgs
    state: JobState = JobState.COMPLETED
    attempt: int = 1
    errors: int = 0
    snoozes: int = 0
    insert_twice: bool = False
    """Whether to insert it a second time, which must return the first job."""


class Check(msgspec.Struct, frozen=True):
    """The result of one check after the run."""

    text: str
    problems: Sequence[str]

    @property
    def is_ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


class DemoResult(msgspec.Struct, frozen=True):
    """The result of a run."""

    schema: str
    jobs: int
    duration: timedelta
    """From the first insert to the end of the last job."""
    summary: Sequence[Summary]
    unreadable: Sequence[str]
    """The errors of the files that could not be read."""
    inserted_twice: int
    checks: Sequence[Check]

    @property
    def is_ok(self) -> bool:
        """Whether every job ended as expected."""
        return all(check.is_ok for check in self.checks)

    @property
    def states(self) -> dict[str, int]:
        """The number of jobs in each state."""
        states: dict[str, int] = {}
        for line in self.summary:
            states[line.state] = states.get(line.state, 0) + line.jobs
        return states


class DemoRun:
    """A run in its own schema. The next run drops the schema of an interrupted one.

    Args:
        url: the database.
        schema: an existing schema without jobs. None: a new schema.
        files: the files to compress.
        limit: the maximum number of jobs. None: no limit.
        on_event: called for each event of a job.
    """

    def __init__(
        self,
        url: str,
        schema: str | None,
        files: Files,
        limit: int | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self._url = url
        self._is_own_schema = schema is None
        self.schema = schema or f"riverpy_demo_{secrets.token_hex(4)}"
        self._shown_jobs = _shown_jobs(str(files.directory))
        if limit is not None:
            del self._shown_jobs[limit - 1 :]
        self._paths = files.paths[: None if limit is None else limit - len(self._shown_jobs)]
        self._on_event = on_event
        self._jobs = DemoJobs()
        self._client = Client(
            url,
            workers=self._jobs.workers,
            queues={"default": QueueConfig(max_workers=SLOTS)},
            config=Config(schema=self.schema, max_attempts=2),
        )
        self._began_at = time.time()
        self._expected: list[ExpectedJob] = []
        self._wrong_duplicates: list[str] = []

    @property
    def total(self) -> int:
        """The number of jobs of the run."""
        return len(self._shown_jobs) + len(self._paths)

    @asynccontextmanager
    async def prepared(self) -> AsyncGenerator[Connection]:
        """Create and migrate the schema, and yield the connection that locks it.

        Raises:
            ToolError: the schema has jobs, or another demo uses it.
            SchemaMissingError: the given schema does not exist.
            Exception: the database failed.
        """
        connection = await connect(
            self._url, application_name="riverpy demo", settings={"lock_timeout": "2s"}
        )
        try:
            with anyio.fail_after(STATEMENT_TIMEOUT):
                await self._prepare(connection)
            yield connection
        finally:
            await close(connection)

    async def _prepare(self, connection: Connection) -> None:
        if not await sql.demo_lock(connection, self.schema):
            raise ToolError(f"another demo uses schema {self.schema!r}")
        if self._is_own_schema:
            for command in await sql.demo_ended(connection):
                with suppress(*DATABASE_ERRORS):  # in use: a later run drops it
                    await connection.execute(command)
            await sql.demo_create_schema(connection, self.schema)
        await migrate_all(connection, schema=self.schema)
        if (jobs := (await sql.demo_count(connection, self.schema)).all) > 0:
            raise ToolError(
                f"schema {self.schema!r} has {jobs:,} jobs. The demo needs a schema without jobs: "
                "leave out --schema, then it creates one"
            )

    async def work(self, connection: Connection) -> DemoResult:
        """Insert the jobs, work them, and check them.

        Raises:
            ToolError: jobs are left and no job runs.
            Exception: the database failed.
        """
        began = time.monotonic()
        async with self._client, self._client.working():
            async with anyio.create_task_group() as tasks:
                try:
                    await tasks.start(self._follow)
                    await self._insert(tasks)
                    await self._until_all_ended(connection)
                finally:
                    self._jobs.stop()
                    tasks.cancel_scope.cancel()
            duration = timedelta(seconds=time.monotonic() - began)
        with anyio.fail_after(STATEMENT_TIMEOUT):
            return await self._result(connection, duration)

    async def _follow(self, *, task_status: TaskStatus[None]) -> None:
        async with self._client.subscribe(*EventKind) as events:
            task_status.started()
            async for event in events:
                self._on_event(event)

    # -- insert

    async def _insert(self, tasks: TaskGroup) -> None:
        for shown in self._shown_jobs:
            job_id = await self._insert_shown(shown)
            if isinstance(shown.args, RunUntilCancelled):
                tasks.start_soon(self._cancel_once_running, job_id)
        for batch in _batched(self._paths, BATCH):
            results = await self._client.insert_many(
                [InsertManyParams(CompressFile(path)) for path in batch]
            )
            self._expected += [
                ExpectedJob(result.job.id, JobState.COMPLETED, 1, 0, 0) for result in results
            ]

    async def _insert_shown(self, shown: _ShownJob) -> int:
        job_id = (await self._client.insert(shown.args)).job.id
        self._expected.append(
            ExpectedJob(job_id, shown.state, shown.attempt, shown.errors, shown.snoozes)
        )
        if shown.insert_twice:
            again = await self._client.insert(shown.args)
            if not again.unique_skipped_as_duplicate or again.job.id != job_id:
                self._wrong_duplicates.append(f"job {job_id} was inserted again as {again.job.id}")
        return job_id

    async def _cancel_once_running(self, job_id: int) -> None:
        await self._jobs.endless_runs.wait()
        await self._client.job_cancel(job_id)

    async def _until_all_ended(self, connection: Connection) -> None:
        moved_at, left_before = time.monotonic(), -1
        while True:
            with anyio.fail_after(STATEMENT_TIMEOUT):
                count = await sql.demo_count(connection, self.schema)
            if not count.left:
                return
            if count.running or count.left != left_before:
                moved_at, left_before = time.monotonic(), count.left
            elif time.monotonic() - moved_at > STALL_TIMEOUT:
                raise ToolError(
                    f"{count.left:,} jobs in schema {self.schema!r} are left and no job was worked "
                    f"for {STALL_TIMEOUT:.0f} s"
                )
            await anyio.sleep(COUNT_INTERVAL)

    # -- check

    async def _result(self, connection: Connection, duration: timedelta) -> DemoResult:
        unreadable = await sql.demo_unreadable(connection, self.schema)
        twice = sum(shown.insert_twice for shown in self._shown_jobs)
        return DemoResult(
            schema=self.schema,
            jobs=(await sql.demo_count(connection, self.schema)).all,
            duration=duration,
            summary=await sql.demo_summary(connection, self.schema),
            unreadable=list(unreadable.values()),
            inserted_twice=twice,
            checks=[
                await self._check_states(connection, unreadable.keys()),
                await self._check_duplicates(connection, twice),
                await self._check_outputs(connection),
                await self._check_digests(connection),
            ],
        )

    async def _check_states(self, connection: Connection, unreadable: Collection[int]) -> Check:
        expected = [
            job._replace(state=JobState.CANCELLED, errors=1) if job.id in unreadable else job
            for job in self._expected
        ]
        found = await sql.demo_unintended(connection, self.schema, expected)
        return Check(
            "every job is in the expected state after the expected attempts",
            [
                f"job {job.id} ({job.kind}) is {job.found} after {job.attempt} attempts and "
                f"{job.errors} errors, expected {job.wanted}: {job.last_error}"
                for job in found
            ],
        )

    async def _check_duplicates(self, connection: Connection, twice: int) -> Check:
        found = await sql.demo_duplicates(connection, self.schema)
        return Check(
            f"no job exists twice, and {twice} duplicate inserts returned the existing job",
            [f"{jobs} jobs {kind} {args}" for kind, args, jobs in found] + self._wrong_duplicates,
        )

    async def _check_outputs(self, connection: Connection) -> Check:
        found = await sql.demo_without_output(connection, self.schema)
        return Check(
            "every job of a file that was read has a digest",
            [f"job {job_id} has none" for job_id in found],
        )

    async def _check_digests(self, connection: Connection) -> Check:
        """Compare with digests that the server computes. Files that changed during the run are left
        out."""
        sample = await sql.demo_sample(
            connection, self.schema, limit=SAMPLE, size_max=SAMPLE_SIZE_MAX
        )
        contents = await anyio.to_thread.run_sync(_unchanged, sample, self._began_at)
        wrong = await sql.demo_wrong_digests(connection, self.schema, contents)
        return Check(
            f"the digests of {len(contents)} files are those that PostgreSQL computes",
            [f"job {job_id}: {path}" for job_id, path in wrong],
        )


def _shown_jobs(directory: str) -> list[_ShownJob]:
    """Return the jobs, the most important first, because a limit drops the last ones."""
    count = [
        _ShownJob(CountFiles(directory, pattern), insert_twice=True)
        for pattern in ("*", "*.py", "*.txt")
    ]
    fail = [_ShownJob(FailOnce(number), attempt=2, errors=1) for number in (1, 2, 3)]
    return [
        fail[0],
        count[0],
        _ShownJob(SnoozeOnce(), snoozes=1),
        _ShownJob(CancelItself(), state=JobState.CANCELLED, errors=1),
        _ShownJob(RunUntilCancelled(), state=JobState.CANCELLED, errors=1),
        *fail[1:],
        *count[1:],
    ]


def _batched(paths: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(paths)
    while batch := list(islice(rest, size)):
        yield batch


def _unchanged(sample: Iterable[tuple[int, str]], since: float) -> list[tuple[int, bytes]]:
    """Return the contents of the files that did not change since then."""
    contents: list[tuple[int, bytes]] = []
    for job_id, name in sample:
        path = Path(name)
        with suppress(OSError):
            content = path.read_bytes()
            if path.stat().st_mtime < since and path.read_bytes() == content:
                contents.append((job_id, content))
    return contents
