"""One run of `riverpy demo`: insert jobs into an empty schema, work them, and check them in SQL."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from riverpy._postgres.driver import DATABASE_ERRORS, close_connection, connect
from riverpy._postgres.sql_files import get_query
from riverpy._tools.demo.jobs import (
    CompressFileArgs,
    CountFilesArgs,
    DemoJobFunctions,
    make_args_per_feature,
)
from riverpy._tools.errors import ToolError
from riverpy.client import Client
from riverpy.config import Config, QueueConfig
from riverpy.events import EventKind
from riverpy.insert_opts import InsertManyParams
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus
    from asyncpg import Record  # noqa: TC004 (only the driver imports asyncpg)

    from riverpy._postgres.driver import Connection
    from riverpy._tools.demo.files import FileScan
    from riverpy.events import Event
    from riverpy.job import JobArgs

MAX_WORKERS = 10
INSERT_BATCH_SIZE = 500
"""The number of jobs in one insert."""
PROGRESS_CHECK_INTERVAL = 0.1
"""Seconds between two counts of the unfinished jobs."""
STALL_TIMEOUT = 30.0
"""The run fails if, for this many seconds, no job is running and the number of unfinished jobs does
not change."""
STATEMENT_TIMEOUT = 60.0


class DemoResult(msgspec.Struct, frozen=True):
    """The result of a run: its duration, its jobs and its problems."""

    schema: str
    duration: timedelta
    """The time from the first insert to the end of the last job."""
    summary_rows: Sequence[Record]
    """The rows of the SQL statement `demo_summary`: one for each kind and state."""
    read_errors: Sequence[str]
    """The errors of the jobs that could not read their files."""
    problems_by_check: dict[str, list[str]]
    """The problems that each check found. The key is the text that describes the check."""

    @property
    def is_ok(self) -> bool:
        """Whether no check found a problem."""
        return not any(self.problems_by_check.values())

    @property
    def job_count(self) -> int:
        return sum(self.job_count_by_state.values())

    @property
    def job_count_by_state(self) -> dict[str, int]:
        states: dict[str, int] = {}
        for line in self.summary_rows:
            states[line["state"]] = states.get(line["state"], 0) + line["jobs"]
        return states


class DemoRun:
    """A run of the demo. If `schema` is None, the run creates a schema. The next run that creates
    a schema drops this one.

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
        files: FileScan,
        limit: int | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self._url = url
        self._should_create_schema = schema is None
        self.schema = schema or f"riverpy_demo_{secrets.token_hex(4)}"
        others = make_args_per_feature(str(files.directory))[: None if limit is None else limit - 1]
        self._job_args: list[JobArgs] = [*others, *map(CompressFileArgs, files.paths)][:limit]
        self._on_event = on_event
        self._job_functions = DemoJobFunctions(lambda job_id: self._client.job_cancel(job_id))
        self._client = Client(
            url,
            workers=self._job_functions.workers,
            queues={"default": QueueConfig(max_workers=MAX_WORKERS)},
            config=Config(schema=self.schema, max_attempts=2),
        )
        self._started_at = time.time()
        self._job_ids: list[int] = []

    @property
    def job_count(self) -> int:
        return len(self._job_args)

    async def run(self, on_schema_ready: Callable[[], None]) -> DemoResult:
        """Create the schema, insert the jobs, work them, and check them.

        Args:
            on_schema_ready: called when the schema is ready.
        """
        connection = await connect(
            self._url, application_name="riverpy demo", session_settings={"lock_timeout": "2s"}
        )
        try:
            await self._prepare_schema(connection)
            on_schema_ready()
            return DemoResult(
                schema=self.schema,
                duration=await self._insert_and_work_jobs(connection),
                summary_rows=await self._fetch_rows(connection, "demo_summary"),
                read_errors=[
                    row[0] for row in await self._fetch_rows(connection, "demo_unreadable")
                ],
                problems_by_check=await self._find_problems_by_check(connection),
            )
        finally:
            await close_connection(connection)

    async def _prepare_schema(self, connection: Connection) -> None:
        ((is_locked,),) = await self._fetch_rows(connection, "demo_lock", name=self.schema)
        if not is_locked:
            raise ToolError(f"another demo uses schema {self.schema!r}")
        if self._should_create_schema:
            for (command,) in await self._fetch_rows(connection, "demo_drop_ended"):
                with suppress(*DATABASE_ERRORS):  # if the schema is in use, the next run drops it
                    await connection.execute(command)
            ((command,),) = await self._fetch_rows(connection, "demo_create", name=self.schema)
            await connection.execute(command)
        await migrate_all(connection, schema=self.schema)
        ((jobs, _, _),) = await self._fetch_rows(connection, "demo_count")
        if jobs:
            raise ToolError(
                f"schema {self.schema!r} has {jobs:,} jobs. The demo needs a schema without jobs: "
                "leave out --schema, then it creates one"
            )

    async def _fetch_rows(
        self, connection: Connection, sql_name: str, **values: object
    ) -> list[Record]:
        with anyio.fail_after(STATEMENT_TIMEOUT):
            return await get_query("demo", sql_name, self.schema).fetch(connection, **values)

    async def _insert_and_work_jobs(self, connection: Connection) -> timedelta:
        """Insert the jobs and work them. Return the duration."""
        began = time.monotonic()
        async with self._client, self._client.working():
            async with anyio.create_task_group() as tasks:
                try:
                    await tasks.start(self._follow_events)
                    await self._insert_jobs()
                    await self._wait_until_all_jobs_ended(connection)
                finally:
                    self._job_functions.stop_blocking_jobs()
                    tasks.cancel_scope.cancel()
            return timedelta(seconds=time.monotonic() - began)

    async def _follow_events(self, *, task_status: TaskStatus[None]) -> None:
        """Pass each event of the client to the callback."""
        async with self._client.subscribe(*EventKind) as events:
            task_status.started()
            async for event in events:
                self._on_event(event)

    async def _insert_jobs(self) -> None:
        for start in range(0, len(self._job_args), INSERT_BATCH_SIZE):
            batch = self._job_args[start : start + INSERT_BATCH_SIZE]
            results = await self._client.insert_many(list(map(InsertManyParams, batch)))
            self._job_ids += [result.job.id for result in results]
        for args in self._job_args:
            if isinstance(args, CountFilesArgs):
                await self._client.insert(args)  # the job is unique, so this inserts no second job

    async def _wait_until_all_jobs_ended(self, connection: Connection) -> None:
        moved_at, left_before = time.monotonic(), -1
        while True:
            ((_, left, running),) = await self._fetch_rows(connection, "demo_count")
            if not left:
                return
            if running or left != left_before:
                moved_at, left_before = time.monotonic(), left
            elif time.monotonic() - moved_at > STALL_TIMEOUT:
                raise ToolError(
                    f"{left:,} jobs in schema {self.schema!r} are left and no job was worked "
                    f"for {STALL_TIMEOUT:.0f} s"
                )
            await anyio.sleep(PROGRESS_CHECK_INTERVAL)

    async def _find_problems_by_check(self, connection: Connection) -> dict[str, list[str]]:
        """Check the rows of the jobs, and compare the digests of some files with digests that the
        server computes. Return the problems of each check. The key is the text that describes the
        check."""
        sample = await self._fetch_rows(connection, "demo_sample")
        contents = await anyio.to_thread.run_sync(_read_unchanged_files, sample, self._started_at)
        checks: dict[str, list[str]] = {
            "every job is in the expected state after the expected attempts": [],
            "no job exists twice, although some were inserted twice": [],
            "every job of a file that was read has a digest": [],
            f"the digests of {len(contents)} files are those that PostgreSQL computes": [],
        }
        found = list(checks.values())
        for number, problem in await self._fetch_rows(
            connection,
            "demo_problems",
            ids=self._job_ids,
            sample_ids=list(contents),
            contents=list(contents.values()),
        ):
            found[int(number)].append(problem)
        return checks


def _read_unchanged_files(sampled_jobs: Sequence[Record], since: float) -> dict[int, bytes]:
    """Return the contents of those sampled files that have not changed since the time `since`. The
    key is the id of the job."""
    contents: dict[int, bytes] = {}
    for job_id, name in sampled_jobs:
        path = Path(name)
        with suppress(OSError):
            content = path.read_bytes()
            if path.stat().st_mtime < since:
                contents[job_id] = content
    return contents
