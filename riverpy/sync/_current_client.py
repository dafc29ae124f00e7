"""The client for blocking jobs that insert jobs or call other methods of the client."""

from __future__ import annotations

from riverpy.client import Client as AsyncClient
from riverpy.context import running_blocking_client, running_client, running_client_loop
from riverpy.errors import ClientStateError
from riverpy.sync._job_client import BlockingJobClient
from riverpy.sync.client import Client


def current_client() -> Client:
    """Return a client for the blocking job that calls this function in a thread of a worker.

    Without `tx`, its calls run on the connections of the worker's client, through its event loop,
    and need no other driver. With your blocking session as `tx`, they run in the job's thread.
    `run_once` needs `tx`, because its function gets it. `riverpy.current_client()` is the same for
    async jobs.

    Raises:
        ClientStateError: the calling code runs in an event loop, or no client runs it. A blocking
            job in a process of its own has no client: make a `riverpy.sync.Client`.
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
