"""A client in a web application: its lifespan, and dependencies for FastAPI and Litestar.

`import riverpy.web` imports no framework. The dependencies import theirs when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.web._lifespan import lifespan

if TYPE_CHECKING:
    from riverpy.web._litestar import litestar_client
    from riverpy.web._starlette import client

__all__ = ["client", "lifespan", "litestar_client"]


def __getattr__(name: str) -> object:
    if name == "client":
        from riverpy.web._starlette import client

        return client
    if name == "litestar_client":
        from riverpy.web._litestar import litestar_client

        return litestar_client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
