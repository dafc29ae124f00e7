"""LitestarPathMiddleware: corrects the path of requests in a Litestar application."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class LitestarPathMiddleware:
    """An ASGI application that corrects the path of requests to another one. Litestar cuts the path
    of the mount off, adds a slash at the end, and does not say where the application is mounted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = unquote(scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace"))
        if "litestar_app" in scope and whole.strip("/"):
            inner = scope["path"].rstrip("/")
            root = whole.rstrip("/").removesuffix(inner)
            scope = {**scope, "root_path": root, "path": f"{root}{inner or '/'}"}
        await self._app(scope, receive, send)
