"""current_client: returns the client that runs the calling code. A job can use this client, for
example to insert other jobs."""

from __future__ import annotations

from riverpy.client import Client
from riverpy.context import running_client
from riverpy.errors import ClientStateError


def current_client() -> Client:
    """Return the client that runs the calling code. This code is a job, a singleton, or a hook of a
    running client.

    A blocking job in a thread receives the client too, but the client's methods must be called in
    the client's event loop. In a blocking job, use `riverpy.sync.current_client()`.

    Raises:
        ClientStateError: no client runs the calling code. A blocking job that runs in another
            process has no client.
    """
    client = running_client.get()
    if not isinstance(client, Client):
        raise ClientStateError(
            "current_client() is for code that a running client calls in its own process, such as "
            "a job: in a job with executor='process', open a client of its own, or let an async "
            "job make the calls"
        )
    return client
