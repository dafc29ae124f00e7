"""Middleware: what is called around the inserting of jobs and around each attempt at one.

A middleware is any object with one or both of the methods below, each an `async def`; `…Func`
makes one of a function. `Config(middleware=…)` registers them for all jobs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from riverpy.hooks import Hook

if TYPE_CHECKING:
    from riverpy.insert_opts import InsertResult, JobInsertParams
    from riverpy.job import Job

InsertInner: TypeAlias = "Callable[[], Awaitable[Sequence[InsertResult]]]"
WorkInner: TypeAlias = Callable[[], Awaitable[None]]


@runtime_checkable
class JobInsertMiddleware(Protocol):
    """Called around each batch of inserts: of `insert`, `insert_many`, `insert_many_fast` and the
    periodic jobs."""

    def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> Awaitable[None]:
        """Must call `do_inner` once, or raise, which refuses the batch.

        Args:
            params: the jobs, checked, with their unique keys. May be changed before `do_inner`.
            do_inner: inserts them. Returns what became of them, in their order; nothing for
                `insert_many_fast`. What it raises, the insert raises, even if it is caught here.
        """
        ...


@runtime_checkable
class WorkerMiddleware(Protocol):
    """Called around each attempt at a job, also at one whose kind is unknown or whose args cannot
    be decoded."""

    def work(self, job: Job[Any], do_inner: WorkInner, /) -> Awaitable[None]:
        """Must call `do_inner` once, or raise, which ends the attempt as if the job had raised it.

        The job's timeout does not count what is done here before and after `do_inner`.

        Args:
            job: its `args` are decoded only inside of `do_inner`.
            do_inner: runs the job. What it raises is how the attempt ends unless it is caught
                here; a cancel or stop stands even then. It may be awaited in another task, which
                has to end before this returns.
        """
        ...


Middleware: TypeAlias = JobInsertMiddleware | WorkerMiddleware
Plugin: TypeAlias = Hook | Middleware
"""Used as every hook and every middleware whose methods it has."""


class JobInsertMiddlewareFunc:
    """An `async def` as a JobInsertMiddleware."""

    def __init__(
        self,
        function: Callable[[Sequence[JobInsertParams], InsertInner], Awaitable[None]],
    ) -> None:
        self.__wrapped__ = self.insert_many = function


class WorkerMiddlewareFunc:
    """An `async def` as a WorkerMiddleware."""

    def __init__(self, function: Callable[[Job[Any], WorkInner], Awaitable[None]]) -> None:
        self.__wrapped__ = self.work = function
