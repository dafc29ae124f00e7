"""`riverpy.sync.current_client`: returns a client to the blocking job that calls it."""

from __future__ import annotations

from riverpy.client import Client as AsyncClient
from riverpy.context import running_blocking_client, running_client, running_client_loop
from riverpy.errors import ClientStateError
from riverpy.sync._job_client import BlockingJobClient
from riverpy.sync.client import Client


def current_client() -> Client:
    """Return a client for the blocking job that calls this function. The job runs in a thread of a
    worker. Async jobs call `riverpy.current_client()` instead.

    Calls of the client without `tx` run in the worker's event loop, on the connections of the
    worker's client, so they need no blocking driver. Calls with your blocking session as `tx` run
    in the job's thread. `run_once` always needs `tx`, because it passes `tx` to its function.

    Raises:
        ClientStateError: the calling code runs in an event loop, or is not a job of a client. A
            job with `executor="process"` has no client: create a `riverpy.sync.Client` in it.
    """
    blocking_client = running_blocking_client.get()
    if isinstance(blocking_client, Client):
        return blocking_client
    client, loop = running_client.get(), running_client_loop.get()
    if not isinstance(client, AsyncClient) or loop is None:
        raise ClientStateError(
            "riverpy.sync.current_client() is for a blocking job in a thread of a worker: in a job "
            "with executor='process', and elsewhere, make a riverpy.sync.Client"
        )
    return BlockingJobClient(client, loop)
