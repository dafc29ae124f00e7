"""Hooks: objects whose methods riverpy calls at certain events, such as the insert of a job or the
start of an attempt.

A hook has one or more of the methods `insert_begin`, `work_begin`, `work_end`,
`periodic_jobs_start` and `metric_emit`. All are `async def`, except `metric_emit`. The classes
`Hook…Func` make a hook from a function. `Config(hooks=…)` registers hooks for all jobs. The class
variable `hooks` of an args class registers hooks for its kind.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy.insert_opts import JobInsertParams
    from riverpy.job import Job
    from riverpy.periodic import PeriodicJobsStart


class JobGetAvailableCount(msgspec.Struct, frozen=True, kw_only=True):
    """River's metric `job_get_available_count`: the number of jobs that one claim returned."""

    queue: str
    count: int


class JobGetAvailableDuration(msgspec.Struct, frozen=True, kw_only=True):
    """River's metric `job_get_available_duration`: how long one claim took, including the round
    trip to the server."""

    queue: str
    duration: timedelta


Metric: TypeAlias = JobGetAvailableCount | JobGetAvailableDuration


@runtime_checkable
class HookInsertBegin(Protocol):
    """A hook that is called for each job before the job is inserted. The hook runs inside the
    insert middleware."""

    def insert_begin(self, params: JobInsertParams, /) -> Awaitable[None]:
        """Change the values in `params`, or raise an error to refuse all jobs of this insert."""
        ...


@runtime_checkable
class HookWorkBegin(Protocol):
    """A hook that is called when an attempt begins, before the args are decoded. The hook runs
    inside the worker middleware."""

    def work_begin(self, job: Job[Any], /) -> Awaitable[None]:
        """Prepare the attempt, for example change `job.encoded_args`. If this method raises an
        error, the attempt fails and the job's code does not run."""
        ...


@runtime_checkable
class HookWorkEnd(Protocol):
    """A hook that is called after the job's code has ended. The hook runs inside the worker
    middleware, so it is called before the middleware ends."""

    def work_end(self, job: Job[Any], error: BaseException | None, /) -> Awaitable[bool | None]:
        """Receive the outcome of the attempt, and perhaps change it.

        Return True to suppress the error, as `__exit__` does: the job completes. Raise another
        error to replace it. Return any other value to keep it.

        Args:
            job: the job. Its args are decoded, except if the decoding failed.
            error: the error that the job's code, or an earlier hook, raised. It may be JobSnooze,
                JobCancel, TimeoutError (the job's timeout) or CancelledError (a cancel or stop,
                which a hook cannot suppress). None: there is no error.
        """
        ...


@runtime_checkable
class HookPeriodicJobsStart(Protocol):
    """A hook that is called each time the client with this hook becomes leader, before the leader
    inserts jobs for the periodic jobs."""

    def periodic_jobs_start(self, start: PeriodicJobsStart, /) -> Awaitable[None]:
        """Add or remove periodic jobs. If a hook raises an error, or if all hooks together take
        longer than 30 seconds, the leader does not start its services, and calls all
        `periodic_jobs_start` hooks again."""
        ...


@runtime_checkable
class HookMetricEmit(Protocol):
    """A hook that receives metrics of claims. A claim is the statement with which a client takes
    available jobs of a queue."""

    def metric_emit(self, metric: Metric, /) -> None:
        """Receive one measurement. This method is called between two claims of a queue, so it must
        not block. If it raises an error, the error is logged."""
        ...


Hook: TypeAlias = (
    HookInsertBegin | HookWorkBegin | HookWorkEnd | HookPeriodicJobsStart | HookMetricEmit
)


class HookInsertBeginFunc:
    """A HookInsertBegin that calls an `async def` function."""

    def __init__(self, function: Callable[[JobInsertParams], Awaitable[None]]) -> None:
        self.insert_begin = function


class HookWorkBeginFunc:
    """A HookWorkBegin that calls an `async def` function."""

    def __init__(self, function: Callable[[Job[Any]], Awaitable[None]]) -> None:
        self.work_begin = function


class HookWorkEndFunc:
    """A HookWorkEnd that calls an `async def` function."""

    def __init__(
        self, function: Callable[[Job[Any], BaseException | None], Awaitable[bool | None]]
    ) -> None:
        self.work_end = function


class HookPeriodicJobsStartFunc:
    """A HookPeriodicJobsStart that calls an `async def` function."""

    def __init__(self, function: Callable[[PeriodicJobsStart], Awaitable[None]]) -> None:
        self.periodic_jobs_start = function


class HookMetricEmitFunc:
    """A HookMetricEmit that calls a plain function."""

    def __init__(self, function: Callable[[Metric], None]) -> None:
        self.metric_emit = function
