"""Assertions on inserted jobs: `require_inserted` and similar functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from riverpy._without_loop import run_without_loop
from riverpy.testing.expected_job import check_expected_is_list, expect_job
from riverpy.testing.job_source import is_blocking_source, read_jobs
from riverpy.testing.matching import (
    expect_no_job,
    find_job_sequence,
    find_matching_jobs,
    find_single_job,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from datetime import datetime

    from riverpy.job import JobArgs, JobRow, JobState, RawArgs
    from riverpy.testing.expected_job import ExpectedJob
    from riverpy.testing.job_source import AsyncSource, BlockingSource
    from riverpy.testing.made_job import MadeJob

ArgsT = TypeVar("ArgsT", bound="JobArgs | RawArgs")
T = TypeVar("T")


_SHOWN_OTHER_JOBS_MAX = 20
"""The maximum number of jobs of other kinds that the text of an AssertionError shows."""


def _make_expected_job(expected: Any, expectations: Mapping[str, Any]) -> ExpectedJob[Any]:
    if isinstance(expected, str):  # with a string, the type of the returned job would be wrong
        raise TypeError(f'for a kind without an args class, write expect_job("{expected}")')
    return expect_job(expected, **expectations)


def _read_and_find(
    name: str,
    source: AsyncSource | BlockingSource,
    schema: str | None,
    expected: Sequence[ExpectedJob[Any]],
    find: Callable[[list[JobRow]], T],
    *,
    must_exist: bool = True,
) -> T | Coroutine[object, None, T]:
    """Read the jobs of the expected kinds, pass them to `find`, and return its result. With an
    async source, return a coroutine that does this. If there are no such jobs and `must_exist` is
    True, `find` gets the newest jobs of other kinds for its error text. `name` is the name of the
    called function."""
    kinds = [kind for one in expected for kind in one.kinds]

    async def read() -> T:
        jobs = await read_jobs(source, schema, kinds) if kinds else []
        if not jobs and must_exist:
            jobs = await read_jobs(source, schema, None, limit=_SHOWN_OTHER_JOBS_MAX)
        return find(jobs)

    if is_blocking_source(source):
        return run_without_loop(read())
    call = read()
    call.__qualname__ = name  # Python's warning about a missing `await` shows this name
    return call


@overload
def require_inserted(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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

    With a connection, session or client for async code, the call is awaited. A blocking session or
    client needs no `await`. All jobs that `tx` sees are compared, in any state.

    Args:
        expected: an args class, args, or what `expect_job` returned.
        tx: a connection or session as for an insert, an asyncpg pool, or an open client.
        schema: the schema of River's tables. Default None: the search path's, or the client's.
        expectations: the options and fields of `expect_job`.

    Raises:
        AssertionError: no job is as expected, or several are. The text shows the nearest jobs.
        TypeError, ValueError: as `expect_job`; or riverpy does not know the type of `tx`.
        TransactionError: `tx` is closed or aborted.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_and_find(
        "require_inserted", tx, schema, [wanted], lambda jobs: find_single_job(jobs, wanted)
    )


@overload
def require_not_inserted(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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
) -> None: ...
@overload
def require_not_inserted(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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
) -> Coroutine[object, None, None]: ...
def require_not_inserted(
    expected: Any, *, tx: Any, schema: str | None = None, **expectations: Any
) -> Coroutine[object, None, None] | None:
    """Check that no inserted job is as expected. A job that differs in one of the named fields or
    options is allowed.

    Args:
        expected, tx, schema, expectations: as for `require_inserted`.

    Raises:
        AssertionError: a job is as expected. The text shows it.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_and_find(
        "require_not_inserted",
        tx,
        schema,
        [wanted],
        lambda jobs: expect_no_job(jobs, wanted),
        must_exist=False,
    )


@overload
def require_many_inserted(
    expected: Sequence[object], *, tx: BlockingSource, schema: str | None = None
) -> list[MadeJob[Any]]: ...
@overload
def require_many_inserted(
    expected: Sequence[object], *, tx: AsyncSource, schema: str | None = None
) -> Coroutine[object, None, list[MadeJob[Any]]]: ...
def require_many_inserted(
    expected: Sequence[object], *, tx: Any, schema: str | None = None
) -> list[MadeJob[Any]] | Coroutine[object, None, list[MadeJob[Any]]]:
    """Check that the inserted jobs of these kinds are exactly the expected ones, in the order of
    their ids, and return them. Jobs of other kinds do not matter.

        await require_many_inserted([Welcome, expect_job(Invoice, order_id=7)], tx=connection)

    Args:
        expected: args classes, args, or what `expect_job` returned.
        tx, schema: as for `require_inserted`.

    Raises:
        AssertionError: there are other jobs of these kinds, fewer, or in another order.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    check_expected_is_list(expected)
    wanted = [_make_expected_job(one, {}) for one in expected]
    return _read_and_find(
        "require_many_inserted", tx, schema, wanted, lambda jobs: find_job_sequence(jobs, wanted)
    )


@overload
def inserted(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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
) -> list[MadeJob[ArgsT]]: ...
@overload
def inserted(
    expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
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
) -> Coroutine[object, None, list[MadeJob[ArgsT]]]: ...
def inserted(
    expected: Any, *, tx: Any, schema: str | None = None, **expectations: Any
) -> list[MadeJob[Any]] | Coroutine[object, None, list[MadeJob[Any]]]:
    """Return the inserted jobs that are as expected, in the order of their ids.

    Args:
        expected, tx, schema, expectations: as for `require_inserted`.

    Raises:
        AssertionError: the args of one of them cannot be decoded.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_and_find(
        "inserted",
        tx,
        schema,
        [wanted],
        lambda jobs: find_matching_jobs(jobs, wanted),
        must_exist=False,
    )
