"""`riverpy web`: run the dashboard in its own process."""

from __future__ import annotations

import os
import re
from base64 import b64decode
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING

import click
from msgspec import UNSET

from riverpy._tools.health.http import Address
from riverpy.cli import _settings
from riverpy.cli._dashboard_server import (
    DASHBOARD_POOL_SIZE,
    DASHBOARD_PORT_DEFAULT,
    DashboardServer,
    require_web_packages,
)
from riverpy.cli._options import DATABASE_HINT, database_options
from riverpy.cli._output import print_note
from riverpy.cli._run import EXIT_USAGE_ERROR, CommandError, run_async
from riverpy.cli._target import load_client_target, open_client
from riverpy.cli._types import NONEMPTY_TEXT_TYPE, IntegerType
from riverpy.client import Client
from riverpy.config import Config

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from starlette.applications import Starlette
    from starlette.requests import Request

    from riverpy._dashboard.access import Access
    from riverpy.cli._options import DatabaseSettings
    from riverpy.cli._target import ClientTarget

PASSWORD_LENGTH_MIN = 8
_HEALTH_CHECKS_PATH = "/api/health-checks/"
_PATH_PREFIX_PATTERN = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")

_EPILOG = f"""\b
Exit codes:
  0  stopped by Ctrl-C or SIGTERM
  1  a failure: no database, or the port is in use
  2  wrong usage or a wrong setting

Without MODULE:ATTR the command needs only the URL of the database. It starts no workers. With
MODULE:ATTR it uses that client, with its password function and its settings.

On an address such as 127.0.0.1, everybody on this machine can use the dashboard, unless
{_settings.WEB_PASSWORD_VARIABLE} is set. Then browsers ask for a user and this password. Every user
name is accepted, and is logged with each change. Any other address needs --allow-network and the
password, and should be behind a proxy with TLS, which hides the password on its way.
"""


def _parse_path_prefix(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    prefix = text.rstrip("/")
    if prefix and not _PATH_PREFIX_PATTERN.fullmatch(prefix):
        raise click.BadParameter(
            "write a path such as /ops/jobs, of letters, digits and the signs - _ . ~"
        )
    return prefix


@click.command(epilog=_EPILOG)
@click.argument("target", metavar="[MODULE:ATTR]", required=False)
@click.option(
    "--host",
    type=NONEMPTY_TEXT_TYPE,
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on.",
)
@click.option(
    "--port",
    type=IntegerType(0, 65535),
    default=DASHBOARD_PORT_DEFAULT,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option(
    "--allow-network", is_flag=True, help="Allow a --host that other machines can connect to."
)
@click.option(
    "--path-prefix",
    default="",
    callback=_parse_path_prefix,
    metavar="/PATH",
    help="Serve the dashboard below this path, for a proxy that passes only this path on.",
)
@click.option("--read-only", is_flag=True, help="Allow no changes.")
@click.option("--hide-args", is_flag=True, help="Hide the args of jobs.")
@database_options
def web(
    *,
    target: str | None,
    host: str,
    port: int,
    allow_network: bool,
    path_prefix: str,
    read_only: bool,
    hide_args: bool,
    database: DatabaseSettings,
) -> None:
    """Serve the dashboard: pages about jobs, queues and workers.

    \b
    riverpy web
    riverpy web jobs:client --port 9000 --read-only
    """
    password = os.environ.get(_settings.WEB_PASSWORD_VARIABLE) or None
    _check_address_and_password(Address(host, port), password, allow_network=allow_network)
    require_web_packages("riverpy web")
    loaded = None if target is None else load_client_target(target)
    if loaded is None:
        database.require_url()

    def make_app(client: Client) -> Starlette:
        from riverpy.web import dashboard

        authorize = None if password is None else _PasswordCheck(password, path_prefix).authorize
        app = dashboard(client, authorize=authorize, read_only=read_only, hide_args=hide_args)
        return _mount_below_path_prefix(app, path_prefix) if path_prefix else app

    server = DashboardServer(Address(host, port), make_app)

    def print_address(address: Address) -> None:
        print_note(f"riverpy web: http://{address}{path_prefix}/ (Ctrl-C stops it)")

    run_async(server.serve, partial(_open_client, target=loaded, database=database), print_address)


def _mount_below_path_prefix(app: Starlette, path_prefix: str) -> Starlette:
    """Return an application that serves `app` below the path `path_prefix`. For other paths, it
    returns the status 404 with a text that names `path_prefix`."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, RedirectResponse
    from starlette.routing import Mount, Route

    async def redirect(_request: Request) -> RedirectResponse:
        return RedirectResponse(f"{path_prefix}/")

    async def explain(_request: Request) -> PlainTextResponse:
        """Answer with status 404 and a text that says where the dashboard is."""
        text = f"The dashboard is at {path_prefix}/. A proxy must not remove this prefix.\n"
        return PlainTextResponse(text, 404)

    routes = [Route(path_prefix, redirect), Mount(path_prefix, app)]
    return Starlette(routes=[*routes, Route("/{path:path}", explain)])


def _check_address_and_password(
    address: Address, password: str | None, *, allow_network: bool
) -> None:
    if password is not None and len(password) < PASSWORD_LENGTH_MIN:
        raise CommandError(
            f"{_settings.WEB_PASSWORD_VARIABLE} must have {PASSWORD_LENGTH_MIN} characters or more",
            exit_code=EXIT_USAGE_ERROR,
        )
    if address.is_loopback:
        return
    if not allow_network:
        raise click.UsageError(
            f"other machines can connect to --host {address.host}, and could see and change all "
            f"jobs: add --allow-network, and set {_settings.WEB_PASSWORD_VARIABLE}"
        )
    if password is None:
        raise click.UsageError(
            f"--allow-network needs a password: set {_settings.WEB_PASSWORD_VARIABLE}"
        )


class _PasswordCheck:
    """Checks the password of each HTTP request (basic authentication)."""

    def __init__(self, password: str, path_prefix: str) -> None:
        self._password = password.encode()
        self._health_checks_path = f"{path_prefix}{_HEALTH_CHECKS_PATH}"

    def authorize(self, request: Request) -> Access:
        """Return the access rights of a request. If the password is missing or wrong, raise an
        HTTPException with status 401, so that the browser asks for the password. Health checks need
        no password, because load balancers do not send one."""
        from starlette.exceptions import HTTPException

        from riverpy.web import Access

        path = request.scope["path"]
        if request.method in {"GET", "HEAD"} and path.startswith(self._health_checks_path):
            return Access("read")
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            user, _, given = b64decode(encoded, validate=True).partition(b":")
        except ValueError:
            user, given = b"", b""
        if scheme.lower() != "basic" or not compare_digest(given, self._password):
            header = {"WWW-Authenticate": 'Basic realm="riverpy", charset="UTF-8"'}
            raise HTTPException(401, "This dashboard needs a user and its password.", header)
        return Access("write", user.decode("utf-8", "replace") or None)


async def _open_client(
    stack: AsyncExitStack, *, target: ClientTarget | None, database: DatabaseSettings
) -> Client:
    if target is None:
        config = Config(schema=database.schema, pool_size=DASHBOARD_POOL_SIZE)
        client = Client(database.require_url(), config=config)
    else:
        client = await stack.enter_async_context(open_client(target))
    if client.is_open:
        return client
    if target is not None:
        client.configure(database=database.url or UNSET, schema=database.schema or UNSET)
    if client.database_url is None and target is not None:
        raise CommandError(
            f"{target.import_path} has no database: {DATABASE_HINT}",
            exit_code=EXIT_USAGE_ERROR,
        )
    return await stack.enter_async_context(client)
