"""The running job, for code that does not get it as a parameter."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from riverpy.errors import ClientStateError
from riverpy.job import Job  # noqa: TC001 (typing.get_type_hints reads it)

if TYPE_CHECKING:
    from collections.abc import Generator

running_client: ContextVar[object | None] = ContextVar("riverpy_running_client", default=None)
"""The client that runs the calling code. `riverpy.current_client` returns it with its type."""


running_client_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar(
    "riverpy_running_client_loop", default=None
)
"""The event loop of the client that runs the calling code, which may run in another thread."""


running_blocking_client: ContextVar[object | None] = ContextVar(
    "riverpy_running_blocking_client", default=None
)
"""The client that `riverpy.sync.current_client` returns in a test with a blocking transaction.
Default None: that function returns a client that calls the running client."""


@contextmanager
def set_running_client(client: object) -> Generator[None]:
    """Set the running client for the `with` block, and for tasks that start in it. The client runs
    in the running event loop."""
    token = running_client.set(client)
    loop_token = running_client_loop.set(asyncio.get_running_loop())
    try:
        yield
    finally:
        with suppress(ValueError):  # the block may end in another context, at the end of the loop
            running_client_loop.reset(loop_token)
            running_client.reset(token)


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
