"""Tools for web applications: `lifespan` opens a client, `client` and `litestar_client` pass it to
requests, `events` and `event_stream` send events to browsers, and `dashboard` shows jobs.

`import riverpy.web` imports no framework. A framework is imported when a program first accesses a
name that needs it, such as `riverpy.web.dashboard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.web._event_stream import event_stream
from riverpy.web._lifespan import lifespan

if TYPE_CHECKING:
    from riverpy._dashboard.access import Access
    from riverpy.web._dashboard import dashboard
    from riverpy.web._event_endpoint import events
    from riverpy.web._litestar import litestar_client
    from riverpy.web._starlette import client

__all__ = [
    "Access",
    "client",
    "dashboard",
    "event_stream",
    "events",
    "lifespan",
    "litestar_client",
]


def __getattr__(name: str) -> object:
    if name == "client":
        from riverpy.web._starlette import client

        return client
    if name == "Access":
        from riverpy.web._dashboard import Access

        return Access
    if name == "dashboard":
        from riverpy.web._dashboard import dashboard

        return dashboard
    if name == "events":
        from riverpy.web._event_endpoint import events

        return events
    if name == "litestar_client":
        from riverpy.web._litestar import litestar_client

        return litestar_client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
