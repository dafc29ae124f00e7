"""Middleware: methods that wrap inserts and attempts.

A middleware is an object with one or both of the methods below, each an `async def`. The classes
`…Func` make a middleware from a function. `Config(middleware=…)` registers middleware for all jobs.
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
    """Middleware around each insert: `insert`, `insert_many`, `insert_many_fast` and inserts of
    periodic jobs."""

    def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> Awaitable[None]:
        """Call `do_inner` once, or raise an error to refuse the batch.

        Args:
            params: the checked jobs. They may be changed before `do_inner` is called.
            do_inner: inserts the jobs. Returns their results in order, or an empty list for
                `insert_many_fast`. The insert raises what `do_inner` raises, even if this method
                catches it.
        """
        ...


@runtime_checkable
class WorkerMiddleware(Protocol):
    """Middleware around each attempt, even if the kind is unknown or the args cannot be decoded."""

    def work(self, job: Job[Any], do_inner: WorkInner, /) -> Awaitable[None]:
        """Call `do_inner` once, or raise an error, which counts as an error of the job.

        The job's timeout does not include the time spent here, outside `do_inner`.

        Args:
            job: the job. Its `args` are decoded inside `do_inner` only.
            do_inner: runs the job. An exception that it raises decides the outcome, unless this
                method catches it. A cancel or stop cannot be caught. Another task may await
                `do_inner`; that task must end before this method returns.
        """
        ...


Middleware: TypeAlias = JobInsertMiddleware | WorkerMiddleware
Plugin: TypeAlias = Hook | Middleware
"""An object with methods of several hooks or middleware. Each of its methods is called."""


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
