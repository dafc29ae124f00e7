"""Assertions on inserted jobs: `require_inserted` and its relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from riverpy._without_loop import run_without_loop
from riverpy.testing.expected_job import expect_job
from riverpy.testing.job_source import is_blocking_source, read_jobs
from riverpy.testing.matching import find_one

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from datetime import datetime

    from riverpy.job import JobRow, JobState
    from riverpy.testing.expected_job import ExpectedJob
    from riverpy.testing.job_source import AsyncSource, BlockingSource
    from riverpy.testing.made_job import MadeJob

ArgsT = TypeVar("ArgsT")
T = TypeVar("T")


def _read_and_find(
    source: AsyncSource | BlockingSource, schema: str | None, find: Callable[[list[JobRow]], T]
) -> T | Coroutine[object, None, T]:
    """Read the jobs and pass them to `find`: at once with a blocking source, or else when the
    returned coroutine is awaited."""

    async def read() -> T:
        return find(await read_jobs(source, schema, None))

    return run_without_loop(read()) if is_blocking_source(source) else read()


@overload
def require_inserted(
    expected: ArgsT | type[ArgsT] | ExpectedJob[ArgsT],
    *,
    tx: BlockingSource,
    schema: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scheduled_at: datetime | None = None,
    state: JobState | str | None = None,
    tags: Sequence[str] | None = None,
    args: Mapping[str, object] | None = None,
    **fields: object,
) -> MadeJob[ArgsT]: ...
@overload
def require_inserted(
    expected: ArgsT | type[ArgsT] | ExpectedJob[ArgsT],
    *,
    tx: AsyncSource,
    schema: str | None = None,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    scheduled_at: datetime | None = None,
    state: JobState | str | None = None,
    tags: Sequence[str] | None = None,
    args: Mapping[str, object] | None = None,
    **fields: object,
) -> Coroutine[object, None, MadeJob[ArgsT]]: ...
def require_inserted(
    expected: Any, *, tx: Any, schema: str | None = None, **expectations: Any
) -> MadeJob[Any] | Coroutine[object, None, MadeJob[Any]]:
    """Check that exactly one inserted job is as expected, and return it.

        job = await require_inserted(Welcome, user_id=1, queue="mail", tx=connection)

    With a connection, session or client for async code, the call is awaited. With a blocking one it
    has done its work when it returns. Jobs in all states are compared, and only those that `tx`
    sees.

    Args:
        expected: an args class, args, or what `expect_job` returned.
        tx: a connection or session as for an insert, an asyncpg pool, or an open client.
        schema: the schema of River's tables. Default None: the search path's, or the client's.
        expectations: see `expect_job`.

    Raises:
        AssertionError: no job is as expected, or several are. The text shows the nearest jobs.
        TypeError, ValueError: as `expect_job`; or riverpy does not know the type of `tx`.
    """
    wanted = expect_job(expected, **expectations)
    return _read_and_find(tx, schema, lambda jobs: find_one(jobs, wanted))
