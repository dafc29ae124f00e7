"""`riverpy.web.litestar_client`: passes the client to handlers of Litestar."""

from __future__ import annotations

try:
    # Litestar reads the annotation when the program starts, so this import is needed then.
    from litestar.datastructures import State  # noqa: TC002
except ImportError as error:
    raise ImportError("riverpy.web.litestar_client needs Litestar: pip install litestar") from error

from riverpy.client import Client  # noqa: TC001 (Litestar reads this annotation too)
from riverpy.web._state import get_client


async def litestar_client(state: State) -> Client:
    """Return the client that `riverpy.web.lifespan` has opened.

    Use this function as a dependency of HTTP and WebSocket handlers of Litestar:
    `dependencies={"client": riverpy.web.litestar_client}`.

    Raises:
        ClientStateError: the application does not use `riverpy.web.lifespan`.
    """
    return get_client(state)
