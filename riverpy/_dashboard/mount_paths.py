"""MountPathMiddleware: corrects the path of requests if the dashboard is mounted in another
application."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class MountPathMiddleware:
    """Wraps an ASGI application and corrects the path of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(correct_mount_path(scope), receive, send)


def correct_mount_path(scope: Scope) -> Scope:
    """Return the ASGI scope with a `path` that begins with `root_path`, as ASGI requires.

    Two cases need this correction:

    - Litestar removes the mount path from `path`, adds a slash at the end, and does not set
      `root_path`.
    - Behind a proxy that removes a prefix from `path`, hypercorn and `FastAPI(root_path=…)` add the
      prefix only to `root_path`. Starlette then finds no page.
    """
    root, path = scope.get("root_path", ""), scope.get("path", "")
    if "litestar_app" in scope:
        whole = unquote(scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace"))
        if not whole.strip("/"):
            return scope
        inner = path.rstrip("/")
        root = whole.rstrip("/").removesuffix(inner)
        return {**scope, "root_path": root, "path": f"{root}{inner or '/'}"}
    prefix = scope.get("app_root_path", "").rstrip("/")
    if prefix and not _is_below(path, root) and _is_below(f"{prefix}{path}", root):
        return {**scope, "path": f"{prefix}{path}"}
    return scope


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
