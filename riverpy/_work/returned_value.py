"""Records the return value of a job's function as the job's output."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from riverpy.errors import ArgsError, ReturnedValueError

if TYPE_CHECKING:
    from riverpy.job import Job


def record_returned_value(job: Job[object], value: object) -> None:
    """Record the return value of a job's function (`value`) as the job's output. Do nothing if the
    value is None, or if the function has recorded an output itself.

    Raises:
        ReturnedValueError: the value has no JSON form, or is too large.
    """
    if value is None or job.has_recorded_output:
        if inspect.iscoroutine(value):
            value.close()
        return
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        raise ReturnedValueError("the job returned a coroutine: return what it gives, with `await`")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise ReturnedValueError("the job returned a generator: return a list")
    if isinstance(value, type):
        raise ReturnedValueError(
            f"the job returned the class {value.__qualname__}: return an instance of it"
        )
    try:
        job.record_output(value)
    except ArgsError as error:
        raise ReturnedValueError(
            "the job returned a value that cannot be stored as its output: "
            f"{str(error).removeprefix('$: ')}. If no code reads the output, return None",
            path=error.path,
        ) from None
