"""Middleware: objects whose methods wrap inserts and attempts.

A middleware has a method `insert_many`, a method `work`, or both. Each is an `async def`. The
classes `…MiddlewareFunc` make a middleware from a function. `Config(middleware=…)` registers
middleware for all jobs.
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
    """Middleware that wraps each insert: `insert`, `insert_many`, `insert_many_fast` and inserts of
    periodic jobs."""

    def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> Awaitable[None]:
        """Call `do_inner` once to insert the jobs, or raise an error to refuse all of them.

        Args:
            params: the jobs to insert. riverpy has already checked them. This method may change
                them before it calls `do_inner`. Then riverpy checks the changed values too.
            do_inner: inserts the jobs. It returns their results in the same order, or an empty list
                for `insert_many_fast`. If `do_inner` raises an error, the caller of the insert
                receives it, even if this method catches it.
        """
        ...


@runtime_checkable
class WorkerMiddleware(Protocol):
    """Middleware that wraps each attempt, even if the kind is unknown or the args cannot be
    decoded."""

    def work(self, job: Job[Any], do_inner: WorkInner, /) -> Awaitable[None]:
        """Call `do_inner` once to run the job. Or raise an error, which counts as an error of the
        job's code.

        The job's timeout includes only the time inside `do_inner`.

        Args:
            job: the job. Its `args` are decoded inside `do_inner` only.
            do_inner: runs the job. If it raises an error, this error decides the outcome of the
                attempt. This method may catch the error, except for a cancel or stop. Another task
                may await `do_inner`; that task must end before this method returns.
        """
        ...


Middleware: TypeAlias = JobInsertMiddleware | WorkerMiddleware
Plugin: TypeAlias = Hook | Middleware
"""An object with methods of hooks, of middleware, or of both. riverpy calls all these methods."""


class JobInsertMiddlewareFunc:
    """Makes a JobInsertMiddleware from an `async def`."""

    def __init__(
        self,
        function: Callable[[Sequence[JobInsertParams], InsertInner], Awaitable[None]],
    ) -> None:
        self.__wrapped__ = self.insert_many = function


class WorkerMiddlewareFunc:
    """Makes a WorkerMiddleware from an `async def`."""

    def __init__(self, function: Callable[[Job[Any], WorkInner], Awaitable[None]]) -> None:
        self.__wrapped__ = self.work = function
