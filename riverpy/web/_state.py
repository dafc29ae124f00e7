"""Reads the client from the state of a request, where `riverpy.web.lifespan` stores it."""

from __future__ import annotations

from riverpy.client import Client
from riverpy.errors import ClientStateError

CLIENT_STATE_KEY = "riverpy"
"""The key of the client in the state of requests, as in `request.state.riverpy`."""


def get_client(state: object) -> Client:
    """Return the client from the state of a request or application.

    Raises:
        ClientStateError: there is no client, because `riverpy.web.lifespan` does not run.
    """
    client = getattr(state, CLIENT_STATE_KEY, None)
    if not isinstance(client, Client):
        raise ClientStateError(
            "the web application has no client: give it lifespan=riverpy.web.lifespan(client). "
            "In a test, a request has the client only while the application's lifespan runs, for "
            "example in `with TestClient(app):`"
        )
    return client
