"""Access control of the dashboard: calls the application's function `authorize`, and checks each
request that changes something."""

from __future__ import annotations

import hmac
import secrets
from inspect import isawaitable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args
from urllib.parse import urlsplit

from riverpy._dashboard.errors import PageError
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response

AccessLevel: TypeAlias = Literal["read", "write"]
CSRF_TOKEN_COOKIE = "riverpy_token"  # noqa: S105 (the name of a cookie)
CSRF_TOKEN_FIELD = "token"  # noqa: S105 (the name of a field)
CSRF_TOKEN_LENGTH_MAX = 100
_FORWARDING_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that proxies add. Behind a proxy, every request has the proxy's address, so the user's
address is not known."""
_NO_AUTHORIZE_ADVICE = (
    "Give the dashboard a function that decides who may use it: "
    "riverpy.web.dashboard(client, authorize=…). Without it, only a browser on the machine of the "
    "server may use it, at an address such as http://127.0.0.1:8080/."
)


class Access(NamedTuple):
    """The rights of a user of the dashboard."""

    level: AccessLevel
    """`read`: the user sees all pages. `write`: the user may also make changes, for example
    cancel jobs."""
    user: str | None = None
    """The name of the user. It appears in the log of changes."""


AuthorizeResult: TypeAlias = AccessLevel | Access | None
AuthorizeFunction: TypeAlias = "Callable[[Request], AuthorizeResult | Awaitable[AuthorizeResult]]"


async def authorize_request(
    request: Request, authorize: AuthorizeFunction | None, *, read_only: bool
) -> Access:
    """Return the rights of the user who sent a request.

    Raises:
        PageError: the user has no rights.
        ConfigError: `authorize` returned a value that is not allowed.
    """
    if authorize is None:
        _require_local_request(request)
        found: AuthorizeResult = "write"
    else:
        result = authorize(request)
        found = await result if isawaitable(result) else result
    if found is None:
        raise PageError(
            403,
            "You may not use this dashboard.",
            "Sign in to the application with another account, or ask its operator for access.",
        )
    access = found if isinstance(found, Access) else Access(found)
    if access.level not in get_args(AccessLevel):
        raise ConfigError(
            f"authorize returned {access.level!r}: return 'read', 'write', riverpy.web.Access or "
            "None"
        )
    return access._replace(level="read") if read_only else access


def _require_local_request(request: Request) -> None:
    """Raise PageError if the request does not come from a loopback address such as 127.0.0.1, if a
    proxy forwarded the request, or if its `Host` header is not localhost or a loopback address.

    The check of the `Host` header protects against DNS rebinding: the operator of another site lets
    the site's host name point to 127.0.0.1. Then the scripts of that site could send requests to
    the dashboard.
    """
    peer = request.client.host if request.client is not None else ""
    if not _is_loopback(peer):
        raise PageError(
            403, "This dashboard answers only on its own machine.", _NO_AUTHORIZE_ADVICE
        )
    forwarded = [name for name in _FORWARDING_HEADERS if name in request.headers]
    if forwarded:
        raise PageError(
            403,
            f"This request came through a proxy (header {forwarded[0]}).",
            _NO_AUTHORIZE_ADVICE,
        )
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    if host != "localhost" and not _is_loopback(host):
        raise PageError(
            403,
            "The address of this page does not name this machine: it is not localhost.",
            _NO_AUTHORIZE_ADVICE,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def get_or_make_csrf_token(request: Request) -> str:
    """Return the CSRF token of the browser, or a new one. Each form sends the token back."""
    return _read_csrf_token_cookie(request) or secrets.token_urlsafe(32)


def set_csrf_token_cookie(request: Request, response: Response, token: str) -> None:
    """Store the CSRF token in a cookie of the browser, if it is not stored yet."""
    if _read_csrf_token_cookie(request) != token:
        response.set_cookie(
            CSRF_TOKEN_COOKIE,
            token,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            # Not `strict`: a browser that follows a link from another site would get a new token,
            # and the forms in its other tabs would become invalid. With `lax`, the browser does not
            # send the cookie with forms of other sites either.
            samesite="lax",
        )


def _read_csrf_token_cookie(request: Request) -> str | None:
    token = request.cookies.get(CSRF_TOKEN_COOKIE, "")
    return token if 20 <= len(token) <= CSRF_TOKEN_LENGTH_MAX and token.isascii() else None


def check_change_request(request: Request, access: Access, sent_token: str) -> None:
    """Check a request that changes something. The user must have the right `write`, a page of this
    dashboard must have sent the request, and its CSRF token must be valid.

    Raises:
        PageError: the request is refused. Nothing was changed.
    """
    _require_write_access(access)
    if not _is_same_origin(request.headers):
        raise _make_cross_origin_error()
    token = _read_csrf_token_cookie(request)
    if token is None or not hmac.compare_digest(token.encode(), sent_token.encode()):
        raise PageError(
            403,
            "The page was too old, so nothing was changed.",
            "Go back, load the page again, and repeat the change. The browser must accept cookies.",
        )


def check_api_change_request(request: Request, access: Access) -> None:
    """Check a request of the JSON API that changes something. The user must have the right `write`,
    and no page of another site may have sent the request. There is no CSRF token, because programs
    send such requests too.

    Browsers send the header `Sec-Fetch-Site` or `Origin`. A request with one of these headers must
    come from a page of this dashboard. A request without them must have the content type JSON.
    Forms of other sites cannot send JSON. A browser lets scripts of other sites send JSON only if
    the dashboard permits this, and the dashboard does not.

    Raises:
        PageError: the request is refused. Nothing was changed.
    """
    _require_write_access(access)
    headers = request.headers
    if "sec-fetch-site" in headers or "origin" in headers:
        if not _is_same_origin(headers):
            raise _make_cross_origin_error()
        return
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise PageError(
            415,
            "A change needs the header `Content-Type: application/json`, so nothing was changed.",
            "Send the header, also with an empty body.",
        )


def _require_write_access(access: Access) -> None:
    if access.level != "write":
        raise PageError(
            403,
            "You may only read here, so nothing was changed.",
            "Ask the operator of the application for the right to change jobs.",
        )


def _make_cross_origin_error() -> PageError:
    return PageError(
        403,
        "Another site sent this request, so nothing was changed.",
        "Open the dashboard itself, and use its buttons. A proxy before the dashboard has to pass "
        "the header Host on.",
    )


def _is_same_origin(headers: Headers) -> bool:
    """Return whether a page of this dashboard sent the request.

    Browsers that do not send `Sec-Fetch-Site`, for example without TLS, send `Origin`. A proxy may
    replace `Host` and keep the browser's value in `X-Forwarded-Host`. Pages of other sites cannot
    send this header without the permission of the dashboard.
    """
    fetch_site = headers.get("sec-fetch-site")
    if fetch_site is not None:
        return fetch_site == "same-origin"
    origin = headers.get("origin", "")
    scheme, _, sent_from = origin.partition("://")
    forwarded = headers.get("x-forwarded-host", "").partition(",")[0].strip()
    hosts = {headers.get("host", ""), forwarded} - {""}
    return sent_from in {_remove_default_port(host, scheme) for host in hosts}


def _remove_default_port(host: str, scheme: str) -> str:
    """Return a `Host` header without the default port of the scheme, as browsers write it in
    `Origin`."""
    return host.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))
