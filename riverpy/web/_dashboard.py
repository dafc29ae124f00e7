"""`riverpy.web.dashboard`: the dashboard for web applications with Starlette, FastAPI or
Litestar."""

from __future__ import annotations

from inspect import isclass
from typing import TYPE_CHECKING, Any

try:
    from riverpy._dashboard.access import Access
    from riverpy._dashboard.app import make_app
    from riverpy._dashboard.site import DashboardOptions
except ImportError as error:
    if (error.name or "").partition(".")[0] not in {"jinja2", "markupsafe", "starlette"}:
        raise
    raise ImportError(
        "riverpy.web.dashboard needs Starlette and Jinja2: pip install 'riverpy-queue[web]'"
    ) from error

from riverpy.client import Client
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

    from riverpy._dashboard.access import AuthorizeFunction

__all__ = ["Access", "dashboard"]


def dashboard(
    client: Client,
    *,
    authorize: AuthorizeFunction | None = None,
    read_only: bool = False,
    hide_args: bool = False,
    mask: Callable[[str, Any], object] | None = None,
) -> Starlette:
    """Return the dashboard, an ASGI application with pages about jobs, queues and workers. Mount it
    with `app.mount("/jobs", riverpy.web.dashboard(client, authorize=authorize))`.

    The client must be open: `riverpy.web.lifespan` can open it. The dashboard does not work jobs.
    To read the data of a page, a request takes one connection from the client's pool.

    Args:
        client: the client whose database is shown.
        authorize: a function, async or not, that receives the request and returns the rights of its
            user: `"read"`, `"write"`, `riverpy.web.Access("write", user="ann")`, or None for no
            access. It may raise Starlette's HTTPException, for example to redirect the user to a
            login page. Default None: only a browser on the same machine as the server has access,
            at an address such as http://localhost:8000.
        read_only: whether all users can only read. Default False.
        hide_args: whether the args of jobs are hidden. Default False.
        mask: a function that receives the kind and the decoded args of a job, and returns the value
            that the page shows instead of the args. If it raises an error, the args are hidden.
            Default None: all args are shown.

    Raises:
        ConfigError: `client` is not a client, or `authorize` or `mask` is not a function.
    """
    if not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the client is a riverpy.Client, got {type(client).__name__}")
    for name, value in (("authorize", authorize), ("mask", mask)):
        if value is not None and (not callable(value) or isclass(value)):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigError(f"{name} must be a function, got {value!r}")
    return make_app(client, DashboardOptions(authorize, read_only, hide_args, mask))
