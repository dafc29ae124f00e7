"""`riverpy.web.client`: passes the client to routes of FastAPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    # FastAPI reads the annotation when the program starts, so this import is needed then.
    from starlette.requests import HTTPConnection  # noqa: TC002
except ImportError as error:
    raise ImportError("riverpy.web.client needs FastAPI: pip install fastapi") from error

from riverpy.web._state import get_client

if TYPE_CHECKING:
    from riverpy.client import Client


async def client(connection: HTTPConnection) -> Client:
    """Return the client that `riverpy.web.lifespan` has opened.

    Use this function as a dependency of HTTP and WebSocket routes of FastAPI:
    `Annotated[riverpy.Client, Depends(riverpy.web.client)]`.

    Raises:
        ClientStateError: the application does not use `riverpy.web.lifespan`.
    """
    return get_client(connection.state)
