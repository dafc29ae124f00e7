"""Context variables for the running job and its client, for code that does not get them as
parameters."""

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
"""The client that runs the calling code. `riverpy.current_client` returns it with the right
type."""


running_client_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar(
    "riverpy_running_client_loop", default=None
)
"""The event loop of the client that runs the calling code. The calling code may run in another
thread."""


running_blocking_client: ContextVar[object | None] = ContextVar(
    "riverpy_running_blocking_client", default=None
)
"""The client that `riverpy.sync.current_client` returns in a test that has a transaction of a
blocking driver, i.e. a driver that is not async. Default None: that function returns a client that
forwards its calls to the running client."""


@contextmanager
def set_running_client(client: object) -> Generator[None]:
    """Set `running_client` for the `with` block and for tasks that start in it. The client must run
    in the current event loop."""
    token = running_client.set(client)
    loop_token = running_client_loop.set(asyncio.get_running_loop())
    try:
        yield
    finally:
        # When the event loop ends, it may end this block in another context. Then `reset` raises
        # ValueError.
        with suppress(ValueError):
            running_client_loop.reset(loop_token)
            running_client.reset(token)


running_job: ContextVar[Job[Any] | None] = ContextVar("riverpy_running_job", default=None)


def current_job() -> Job[Any]:
    """Return the job that runs the calling code.

    Raises:
        ClientStateError: the calling code does not run in a job.
    """
    job = running_job.get()
    if job is None:
        raise ClientStateError("current_job() is for code that runs inside a job")
    return job
