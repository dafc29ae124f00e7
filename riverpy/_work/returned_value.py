"""The value that the code of a job returns is the output of the job."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from riverpy.errors import ArgsError

if TYPE_CHECKING:
    from riverpy.job import Job


def record_returned_value(job: Job[object], value: object) -> None:
    """Record a returned value as the output of the job, unless the code has recorded one.

    Raises:
        ArgsError: the value has no JSON form, or is too large.
    """
    if value is None or job.has_recorded_output:
        if inspect.iscoroutine(value):
            value.close()
        return
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise ArgsError("the job returned a coroutine: return what it gives, with `await`")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise ArgsError("the job returned a generator: return a list")
    try:
        job.record_output(value)
    except ArgsError as error:
        raise ArgsError(
            f"the job returned a value that cannot be stored as its output: {error}. Return None, "
            "a JSON value, a Struct, a dataclass or a pydantic model",
            path=error.path,
        ) from None
