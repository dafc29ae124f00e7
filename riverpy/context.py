"""The running job, for code that does not get it as a parameter."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from riverpy.job import Job

running_job: ContextVar[Job[Any] | None] = ContextVar("riverpy_running_job", default=None)


def current_job() -> Job[Any]:
    """Return the job in which the calling code runs.

    Raises:
        ClientStateError: the calling code does not run in a job.
    """
    job = running_job.get()
    if job is None:
        raise ClientStateError("current_job() is for code that runs inside a job")
    return job
