"""One run of `riverpy demo`: insert jobs into an empty schema, work them, and check them in SQL."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from riverpy._postgres.driver import DATABASE_ERRORS, close, connect
from riverpy._postgres.sql_files import query
from riverpy._tools.demo.jobs import CompressFile, CountFiles, DemoJobs, other_jobs
from riverpy._tools.errors import ToolError
from riverpy.client import Client
from riverpy.config import Config, QueueConfig
from riverpy.events import EventKind
from riverpy.insert_opts import InsertManyParams
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskStatus
    from asyncpg import Record

    from riverpy._postgres.driver import Connection
    from riverpy._tools.demo.files import Files
    from riverpy.events import Event
    from riverpy.job import JobArgs

SLOTS = 10
BATCH_SIZE = 500
"""The number of jobs in one insert."""
COUNT_INTERVAL = 0.1
"""Seconds between two counts of the unfinished jobs."""
STALL_TIMEOUT = 30.0
"""If no job runs or ends for this many seconds, the run fails."""
STATEMENT_TIMEOUT = 60.0


class DemoResult(msgspec.Struct, frozen=True):
    """The result of a run: its duration, its jobs and its problems."""

    schema: str
    duration: timedelta
    """The time from the first insert to the end of the last job."""
    summary: Sequence[Record]
    """The rows of the SQL statement `demo_summary`: one for each kind and state."""
    unreadable: Sequence[str]
    """The errors of the files that could not be read."""
    checks: dict[str, list[str]]
    """The problems that each check has found. The key is the text of the check."""

    @property
    def is_ok(self) -> bool:
        """Whether every job ended as expected."""
        return not any(self.checks.values())

    @property
    def jobs(self) -> int:
        """The number of jobs."""
        return sum(self.states.values())

    @property
    def states(self) -> dict[str, int]:
        """The number of jobs in each state."""
        states: dict[str, int] = {}
        for line in self.summary:
            states[line["state"]] = states.get(line["state"], 0) + line["jobs"]
        return states


class DemoRun:
    """A run of the demo in a schema of its own. The next run drops the schema, if this run created
    it.

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
        others = other_jobs(str(files.directory))[: None if limit is None else limit - 1]
        self._args: list[JobArgs] = [*others, *map(CompressFile, files.paths)][:limit]
        self._on_event = on_event
        self._jobs = DemoJobs(lambda job_id: self._client.job_cancel(job_id))
        self._client = Client(
            url,
            workers=self._jobs.workers,
            queues={"default": QueueConfig(max_workers=SLOTS)},
            config=Config(schema=self.schema, max_attempts=2),
        )
        self._began_at = time.time()
        self._ids: list[int] = []

    @property
    def total(self) -> int:
        """The number of jobs of the run."""
        return len(self._args)

    async def run(self, on_start: Callable[[], None]) -> DemoResult:
        """Create the schema, insert the jobs, work them, and check them.

        Args:
            on_start: called when the schema is ready.
        """
        connection = await connect(
            self._url, application_name="riverpy demo", settings={"lock_timeout": "2s"}
        )
        try:
            await self._prepare(connection)
            on_start()
            return DemoResult(
                schema=self.schema,
                duration=await self._work_jobs(connection),
                summary=await self._fetch(connection, "demo_summary"),
                unreadable=[row[0] for row in await self._fetch(connection, "demo_unreadable")],
                checks=await self._check_results(connection),
            )
        finally:
            await close(connection)

    async def _prepare(self, connection: Connection) -> None:
        ((is_locked,),) = await self._fetch(connection, "demo_lock", name=self.schema)
        if not is_locked:
            raise ToolError(f"another demo uses schema {self.schema!r}")
        if self._is_own_schema:
            for (command,) in await self._fetch(connection, "demo_drop_ended"):
                with suppress(*DATABASE_ERRORS):  # the schema is in use: the next run drops it
                    await connection.execute(command)
            ((command,),) = await self._fetch(connection, "demo_create", name=self.schema)
            await connection.execute(command)
        await migrate_all(connection, schema=self.schema)
        ((jobs, _, _),) = await self._fetch(connection, "demo_count")
        if jobs:
            raise ToolError(
                f"schema {self.schema!r} has {jobs:,} jobs. The demo needs a schema without jobs: "
                "leave out --schema, then it creates one"
            )

    async def _fetch(self, connection: Connection, block: str, **values: object) -> list[Record]:
        with anyio.fail_after(STATEMENT_TIMEOUT):
            return await query("demo", block, self.schema).fetch(connection, **values)

    async def _work_jobs(self, connection: Connection) -> timedelta:
        """Insert the jobs and work them. Return the duration."""
        began = time.monotonic()
        async with self._client, self._client.working():
            async with anyio.create_task_group() as tasks:
                try:
                    await tasks.start(self._follow_events)
                    await self._insert_jobs()
                    await self._wait_until_all_ended(connection)
                finally:
                    self._jobs.stop()
                    tasks.cancel_scope.cancel()
            return timedelta(seconds=time.monotonic() - began)

    async def _follow_events(self, *, task_status: TaskStatus[None]) -> None:
        async with self._client.subscribe(*EventKind) as events:
            task_status.started()
            async for event in events:
                self._on_event(event)

    async def _insert_jobs(self) -> None:
        for start in range(0, len(self._args), BATCH_SIZE):
            batch = self._args[start : start + BATCH_SIZE]
            results = await self._client.insert_many(list(map(InsertManyParams, batch)))
            self._ids += [result.job.id for result in results]
        for args in self._args:
            if isinstance(args, CountFiles):
                await self._client.insert(args)  # the job is unique, so this inserts no second job

    async def _wait_until_all_ended(self, connection: Connection) -> None:
        moved_at, left_before = time.monotonic(), -1
        while True:
            ((_, left, running),) = await self._fetch(connection, "demo_count")
            if not left:
                return
            if running or left != left_before:
                moved_at, left_before = time.monotonic(), left
            elif time.monotonic() - moved_at > STALL_TIMEOUT:
                raise ToolError(
                    f"{left:,} jobs in schema {self.schema!r} are left and no job was worked "
                    f"for {STALL_TIMEOUT:.0f} s"
                )
            await anyio.sleep(COUNT_INTERVAL)

    async def _check_results(self, connection: Connection) -> dict[str, list[str]]:
        """Check the rows of the jobs, and compare the digests of some files with digests that the
        server computes."""
        sample = await self._fetch(connection, "demo_sample")
        contents = await anyio.to_thread.run_sync(_read_unchanged_files, sample, self._began_at)
        checks: dict[str, list[str]] = {
            "every job is in the expected state after the expected attempts": [],
            "no job exists twice, although some were inserted twice": [],
            "every job of a file that was read has a digest": [],
            f"the digests of {len(contents)} files are those that PostgreSQL computes": [],
        }
        found = list(checks.values())
        for number, problem in await self._fetch(
            connection,
            "demo_problems",
            ids=self._ids,
            sample_ids=list(contents),
            contents=list(contents.values()),
        ):
            found[int(number)].append(problem)
        return checks


def _read_unchanged_files(sample: Sequence[Record], since: float) -> dict[int, bytes]:
    """Return the contents, by job id, of the files that have not changed since the time `since`."""
    contents: dict[int, bytes] = {}
    for job_id, name in sample:
        path = Path(name)
        with suppress(OSError):
            content = path.read_bytes()
            if path.stat().st_mtime < since:
                contents[job_id] = content
    return contents
