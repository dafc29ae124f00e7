"""Functions with which a test checks the jobs that were inserted: `require_inserted` and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from riverpy._without_loop import run_without_loop
from riverpy.testing.expected_job import check_expected_is_list, expect_job
from riverpy.testing.job_source import is_blocking_source, read_jobs
from riverpy.testing.matching import (
    find_job_sequence,
    find_matching_jobs,
    find_single_job,
    require_no_job,
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
"""If the database has no job of the expected kinds, the text of the AssertionError shows jobs of
other kinds, at most this number."""


def _make_expected_job(expected: Any, expectations: Mapping[str, Any]) -> ExpectedJob[Any]:
    if isinstance(expected, str):  # with a string, the type of the returned job would be wrong
        raise TypeError(f'for a kind without an args class, write expect_job("{expected}")')
    return expect_job(expected, **expectations)


def _read_jobs_and_find(
    name: str,
    source: AsyncSource | BlockingSource,
    schema: str | None,
    expected: Sequence[ExpectedJob[Any]],
    find: Callable[[list[JobRow]], T],
    *,
    must_exist: bool = True,
) -> T | Coroutine[object, None, T]:
    """Read the jobs of the expected kinds, call `find` with them, and return its result. With an
    async source, return a coroutine that does this.

    If there are no jobs of the expected kinds and `must_exist` is True, `find` receives the newest
    jobs of other kinds instead, and shows them in the text of its AssertionError. Python shows
    `name`, the name of the assertion, if the test does not await the coroutine.
    """
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
    """Check that exactly one inserted job matches `expected`, and return it.

        job = await require_inserted(Welcome, user_id=1, queue="mail", tx=connection)

    All jobs that `tx` can read are compared, in any state. With a blocking session or client as
    `tx`, the call needs no `await`.

    Args:
        expected: an args class, args, or an `ExpectedJob` that `expect_job` returned.
        tx: a connection or session as for an insert, an asyncpg pool, or an open client.
        schema: the schema of River's tables. Default None: the schema of the client or, without a
            client, the first schema in the search path that has River's tables.
        expectations: the other keyword arguments are those of `expect_job`: options such as
            `queue`, and fields of the args.

    Raises:
        AssertionError: no job matches, or several jobs do. The text shows the most similar jobs.
        TypeError, ValueError: as `expect_job`; or riverpy does not know the type of `tx`.
        TransactionError: `tx` is closed or aborted.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_jobs_and_find(
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
    """Check that no inserted job matches `expected`. A job that differs in at least one of the
    given fields or options does not match.

    Args:
        expected, tx, schema, expectations: as for `require_inserted`.

    Raises:
        AssertionError: a job matches. The text shows it.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_jobs_and_find(
        "require_not_inserted",
        tx,
        schema,
        [wanted],
        lambda jobs: require_no_job(jobs, wanted),
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
    """Check that exactly the expected jobs were inserted, in the order of the list, and return
    them. Jobs of kinds that are not in the list are ignored.

        await require_many_inserted([Welcome, expect_job(Invoice, order_id=7)], tx=connection)

    Args:
        expected: a list of args classes, args, or results of `expect_job`.
        tx, schema: as for `require_inserted`.

    Raises:
        AssertionError: a job of these kinds is missing, is not expected, or is in the wrong
            position.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    check_expected_is_list(expected)
    wanted = [_make_expected_job(one, {}) for one in expected]
    return _read_jobs_and_find(
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
    """Return the inserted jobs that match `expected`, in the order of their ids.

    Args:
        expected, tx, schema, expectations: as for `require_inserted`.

    Raises:
        AssertionError: the args of a matching job cannot be decoded.
        TypeError, ValueError, TransactionError: as `require_inserted`.
    """
    wanted = _make_expected_job(expected, expectations)
    return _read_jobs_and_find(
        "inserted",
        tx,
        schema,
        [wanted],
        lambda jobs: find_matching_jobs(jobs, wanted),
        must_exist=False,
    )
