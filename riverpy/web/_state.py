"""The place where requests find the client: the key `riverpy` of the application's state."""

from __future__ import annotations

from riverpy.client import Client
from riverpy.errors import ClientStateError

CLIENT_STATE_KEY = "riverpy"
"""The key of the client in the state of requests, as in `request.state.riverpy`."""


def get_client(state: object) -> Client:
    """Return the client in the state of a request. Raise ClientStateError if there is none."""
    client = getattr(state, CLIENT_STATE_KEY, None)
    if not isinstance(client, Client):
        raise ClientStateError(
            "the web application has no client: give it lifespan=riverpy.web.lifespan(client). "
            "In a test, a request has the client only while the application's lifespan runs, for "
            "example in `with TestClient(app):`"
        )
    return client
