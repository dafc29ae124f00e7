"""The dashboard for applications of Starlette, FastAPI and Litestar."""

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

    The client must be open, for example by `riverpy.web.lifespan`. The dashboard starts no workers.
    Its reads use the client's pool, one connection for each request that reads.

    Args:
        client: the client whose database is shown.
        authorize: a function, `async` or not, that gets the request and returns what its user may
            do: `"read"`, `"write"`, `riverpy.web.Access("write", user="ann")`, or None for nothing.
            It may raise Starlette's HTTPException, for example to send the user to a login page.
            Default None: only a browser on the machine of the server may use the dashboard, at an
            address such as http://localhost:8000.
        read_only: whether all users may only read. Default False.
        hide_args: whether the args of jobs are hidden. Default False.
        mask: a function that gets the kind and the decoded args of a job, and returns what the page
            shows in their place. If it raises, the args are hidden. Default None: all args are
            shown.

    Raises:
        ConfigError: `client` is not a client, or a value is not a function.
    """
    if not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the client is a riverpy.Client, got {type(client).__name__}")
    for name, value in (("authorize", authorize), ("mask", mask)):
        if value is not None and (not callable(value) or isclass(value)):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigError(f"{name} must be a function, got {value!r}")
    return make_app(client, DashboardOptions(authorize, read_only, hide_args, mask))
