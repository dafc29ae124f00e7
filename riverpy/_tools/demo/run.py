"""One run of `riverpy demo`: from an empty schema to jobs that were checked in SQL."""

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
from riverpy._tools.demo.statements import Intention
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
"""Files whose jobs are inserted in one statement."""
LOOK_EVERY = 0.1
"""Seconds between two looks at how many jobs are left."""
STALL_LIMIT = 30.0
"""Seconds in which no job runs and none ends, until the run counts as failed."""
SAMPLE = 32
SAMPLE_SIZE_MAX = 1024 * 1024
STATEMENT_TIMEOUT = 60.0


class _Special(msgspec.Struct, frozen=True):
    """A job that shows something beside compressing files, and how it is meant to end."""

    args: JobArgs
    state: JobState = JobState.COMPLETED
    attempt: int = 1
    errors: int = 0
    snoozes: int = 0
    is_twice: bool = False
    """Insert it a second time, to be told that it exists."""


class Check(msgspec.Struct, frozen=True):
    """Something that must hold after the run."""

    text: str
    problems: Sequence[str]

    @property
    def is_ok(self) -> bool:
        """Whether it holds."""
        return not self.problems


class DemoResult(msgspec.Struct, frozen=True):
    """What came out of a run."""

    schema: str
    jobs: int
    duration: timedelta
    """From before the first insert until the last job had ended."""
    summary: Sequence[Summary]
    unreadable: Sequence[str]
    """Files whose jobs gave up, and why."""
    inserted_twice: int
    checks: Sequence[Check]

    @property
    def is_ok(self) -> bool:
        """Whether every job ended as intended."""
        return all(check.is_ok for check in self.checks)

    @property
    def states(self) -> dict[str, int]:
        """How many jobs are in which state."""
        states: dict[str, int] = {}
        for line in self.summary:
            states[line.state] = states.get(line.state, 0) + line.jobs
        return states


class DemoRun:
    """A run in a schema of its own. What an interrupted one leaves behind is dropped by the next.

    Args:
        url: the database.
        schema: where to work; it must exist and hold no job. None: a new one.
        files: whose jobs to insert.
        limit: jobs in all, at most; None for no limit.
        told: called for each event of a job.
    """

    def __init__(
        self,
        url: str,
        schema: str | None,
        files: Files,
        limit: int | None,
        told: Callable[[Event], None],
    ) -> None:
        self._url = url
        self._is_own_schema = schema is None
        self.schema = schema or f"riverpy_demo_{secrets.token_hex(4)}"
        self._specials = _specials(str(files.directory))
        if limit is not None:
            del self._specials[limit - 1 :]
        self._paths = files.paths[: None if limit is None else limit - len(self._specials)]
        self._told = told
        self._jobs = DemoJobs()
        self._client = Client(
            url,
            workers=self._jobs.workers,
            queues={"default": QueueConfig(max_workers=SLOTS)},
            config=Config(schema=self.schema, max_attempts=2),
        )
        self._began_at = time.time()
        self._intentions: list[Intention] = []
        self._unrecognised: list[str] = []

    @property
    def total(self) -> int:
        """How many jobs there will be."""
        return len(self._specials) + len(self._paths)

    @asynccontextmanager
    async def prepared(self) -> AsyncGenerator[Connection]:
        """The connection of the run, which holds its schema: migrated, and without jobs.

        Raises:
            ToolError: the schema has jobs.
            SchemaMissingError: the schema that was named does not exist.
            Exception: the database cannot be reached, or refuses.
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
            raise ToolError(f"another demo works in schema {self.schema!r}")
        if self._is_own_schema:
            for command in await sql.demo_ended(connection):
                with suppress(*DATABASE_ERRORS):  # somebody looks at it: a later run drops it
                    await connection.execute(command)
            await sql.demo_create_schema(connection, self.schema)
        await migrate_all(connection, schema=self.schema)
        if (jobs := (await sql.demo_count(connection, self.schema)).all) > 0:
            raise ToolError(
                f"schema {self.schema!r} has {jobs:,} jobs, which the demo would mix with its own: "
                "leave out --schema, then it makes one of its own"
            )

    async def work(self, connection: Connection) -> DemoResult:
        """Insert the jobs, work them, and check what became of them.

        Raises:
            ToolError: jobs are left that nothing works.
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
                self._told(event)

    # -- inserting

    async def _insert(self, tasks: TaskGroup) -> None:
        for special in self._specials:
            job_id = await self._insert_special(special)
            if isinstance(special.args, RunUntilCancelled):
                tasks.start_soon(self._cancel_once_running, job_id)
        for batch in _batched(self._paths, BATCH):
            results = await self._client.insert_many(
                [InsertManyParams(CompressFile(path)) for path in batch]
            )
            self._intentions += [
                Intention(result.job.id, JobState.COMPLETED, 1, 0, 0) for result in results
            ]

    async def _insert_special(self, special: _Special) -> int:
        job_id = (await self._client.insert(special.args)).job.id
        self._intentions.append(
            Intention(job_id, special.state, special.attempt, special.errors, special.snoozes)
        )
        if special.is_twice:
            again = await self._client.insert(special.args)
            if not again.unique_skipped_as_duplicate or again.job.id != job_id:
                self._unrecognised.append(f"job {job_id} was inserted again as {again.job.id}")
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
            elif time.monotonic() - moved_at > STALL_LIMIT:
                raise ToolError(
                    f"{count.left:,} jobs in schema {self.schema!r} are left and none was worked "
                    f"for {STALL_LIMIT:.0f} s"
                )
            await anyio.sleep(LOOK_EVERY)

    # -- checking

    async def _result(self, connection: Connection, duration: timedelta) -> DemoResult:
        unreadable = await sql.demo_unreadable(connection, self.schema)
        twice = sum(special.is_twice for special in self._specials)
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
        intentions = [
            intention._replace(state=JobState.CANCELLED, errors=1)
            if intention.id in unreadable
            else intention
            for intention in self._intentions
        ]
        found = await sql.demo_unintended(connection, self.schema, intentions)
        return Check(
            "every job is in the state it was meant to reach, after as many attempts",
            [
                f"job {job.id} ({job.kind}) is {job.found} after {job.attempt} attempts and "
                f"{job.errors} errors, meant to be {job.wanted}: {job.last_error}"
                for job in found
            ],
        )

    async def _check_duplicates(self, connection: Connection, twice: int) -> Check:
        found = await sql.demo_duplicates(connection, self.schema)
        return Check(
            f"no job exists twice, and {twice} duplicate inserts returned the job that exists",
            [f"{jobs} jobs {kind} {args}" for kind, args, jobs in found] + self._unrecognised,
        )

    async def _check_outputs(self, connection: Connection) -> Check:
        found = await sql.demo_without_output(connection, self.schema)
        return Check(
            "every file that was read has its digest",
            [f"job {job_id} has none" for job_id in found],
        )

    async def _check_digests(self, connection: Connection) -> Check:
        """The server hashes some files again. One that changed meanwhile proves nothing."""
        sample = await sql.demo_sample(
            connection, self.schema, limit=SAMPLE, size_max=SAMPLE_SIZE_MAX
        )
        contents = await anyio.to_thread.run_sync(_unchanged, sample, self._began_at)
        wrong = await sql.demo_wrong_digests(connection, self.schema, contents)
        return Check(
            f"the digests of {len(contents)} files are those that PostgreSQL computes",
            [f"job {job_id}: {path}" for job_id, path in wrong],
        )


def _specials(directory: str) -> list[_Special]:
    """From the most telling: a low limit cuts the last ones."""
    count = [
        _Special(CountFiles(directory, pattern), is_twice=True)
        for pattern in ("*", "*.py", "*.txt")
    ]
    fail = [_Special(FailOnce(number), attempt=2, errors=1) for number in (1, 2, 3)]
    return [
        fail[0],
        count[0],
        _Special(SnoozeOnce(), snoozes=1),
        _Special(CancelItself(), state=JobState.CANCELLED, errors=1),
        _Special(RunUntilCancelled(), state=JobState.CANCELLED, errors=1),
        *fail[1:],
        *count[1:],
    ]


def _batched(paths: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(paths)
    while batch := list(islice(rest, size)):
        yield batch


def _unchanged(sample: Iterable[tuple[int, str]], since: float) -> list[tuple[int, bytes]]:
    """The contents of the files that nobody changed since then, and that read the same twice."""
    contents: list[tuple[int, bytes]] = []
    for job_id, name in sample:
        path = Path(name)
        with suppress(OSError):
            content = path.read_bytes()
            if path.stat().st_mtime < since and path.read_bytes() == content:
                contents.append((job_id, content))
    return contents
