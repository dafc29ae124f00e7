"""The JSON API of the dashboard. It has the paths and fields of River UI's API.

To add an endpoint, write an `Endpoint` in `jobs.py`, `queues.py` or `status.py`, and add it to
`ENDPOINTS` of that module.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from riverpy._dashboard.access import authorize_request, check_api_change_request
from riverpy._dashboard.api import jobs, queues, status
from riverpy._dashboard.api.endpoint import ApiCall, ErrorAnswer
from riverpy._dashboard.api.openapi import make_openapi_document
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_REQUEST_FAILED
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    PostgresError,
    describe_error,
    is_data_error,
)
from riverpy.errors import ArgsError, ConfigError, JobDamagedError, NotFoundError, RiverError

if TYPE_CHECKING:
    from starlette.requests import Request

    from riverpy._dashboard.api.endpoint import Endpoint
    from riverpy._dashboard.site import Site

ENDPOINTS: tuple[Endpoint[Any], ...] = (
    *jobs.ENDPOINTS,
    *queues.ENDPOINTS,
    *status.ENDPOINTS,
)
"""All endpoints. If two of them match a path, the first one is used."""
BODY_BYTES_MAX = 256 * 1024
_OPENAPI_PATH = "/openapi.json"
_API_DESCRIPTION = (
    "The addresses and fields are those of River UI 0.22. Errors have the same form everywhere. "
    "A change needs the header `Content-Type: application/json`, except in a request that a "
    "browser sends from the same site."
)


def make_api(site: Site) -> Starlette:
    """Return the ASGI application of the JSON API. The dashboard mounts it at `/api`."""
    return _Api(site).make_starlette()


class _Api:
    """The JSON API of one dashboard: its endpoints and error handlers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._log = get_logger()

    def make_starlette(self) -> Starlette:
        routes = [
            Route(one.path, partial(self._call_endpoint, one), methods=[one.method])
            for one in ENDPOINTS
        ]
        routes.append(Route(_OPENAPI_PATH, self._send_openapi_document))
        handlers: dict[Any, Any] = {HTTPException: self._send_http_error}
        handlers |= dict.fromkeys((RiverError, *DATABASE_ERRORS), self._send_service_unavailable)
        handlers[Exception] = self._send_internal_error
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _authorize_call(self, request: Request) -> ApiCall:
        options = self._site.options
        access = await authorize_request(request, options.authorize, read_only=options.read_only)
        return ApiCall(self._site, access)

    async def _call_endpoint(self, endpoint: Endpoint[Any], request: Request) -> Response:
        call = await self._authorize_call(request)
        if endpoint.method == "GET":
            found = _decode_url_query(endpoint, request)
        else:
            check_api_change_request(request, call.access)
            found = await _decode_json_body(endpoint, request)
        try:
            answer = await endpoint.respond(call, found)
        except (ConfigError, ArgsError) as error:
            raise HTTPException(400, str(error)) from None
        except NotFoundError as error:
            raise HTTPException(404, str(error)) from None
        except JobDamagedError as error:
            raise HTTPException(500, str(error)) from None
        except PostgresError as error:
            if is_data_error(error):  # such as a name with a NUL character
                raise _make_input_error(describe_error(error)) from None
            raise
        if endpoint.method != "GET":
            self._site.invalidate_caches()
        return _make_response(answer)

    async def _send_openapi_document(self, request: Request) -> Response:
        await self._authorize_call(request)
        server_url = request.scope.get("root_path", "").rstrip("/") or "/api"
        return _make_response(make_openapi_document(ENDPOINTS, server_url, _API_DESCRIPTION))

    async def _send_http_error(self, request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            message = "There is no such address in the API."
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.method} is not possible for this address: use {allowed}."
        response = _make_response(ErrorAnswer(message), error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def _send_service_unavailable(self, request: Request, error: Exception) -> Response:
        """Send an error response after a request failed because of the database or the client."""
        text = describe_error(error)
        self._log.warning(DASHBOARD_REQUEST_FAILED, path=request.url.path, error=text)
        return _make_response(ErrorAnswer(f"The request failed: {text}"), 503)

    async def _send_internal_error(self, _request: Request, _error: Exception) -> Response:
        message = "The dashboard failed. The log of the web server has the error."
        return _make_response(ErrorAnswer(message), 500)


def _make_response(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _decode_url_query(endpoint: Endpoint[Any], request: Request) -> Any:
    """Convert the query and path parameters of a request to the endpoint's input. Used for requests
    without a body."""
    values: dict[str, object] = {}
    for member in msgspec.structs.fields(endpoint.input):
        texts = [text for text in request.query_params.getlist(member.name) if text]
        if texts:
            values[member.name] = texts if _is_list_type(member.type) else texts[0]
    try:
        return msgspec.convert(values | request.path_params, endpoint.input, strict=False)
    except msgspec.ValidationError as error:
        raise _make_input_error(error) from None


def _is_list_type(member_type: Any) -> bool:
    info = msgspec.inspect.type_info(member_type)
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    return isinstance(info, msgspec.inspect.ListType)


async def _decode_json_body(endpoint: Endpoint[Any], request: Request) -> Any:
    """Convert the JSON body and the path parameters of a request to the endpoint's input. An empty
    body counts as an empty JSON object."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413, f"A body can have {BODY_BYTES_MAX:,} bytes at most.")
    try:
        members = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
        return msgspec.convert(members | request.path_params, endpoint.input)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _make_input_error(error) from None


def _make_input_error(error: object) -> HTTPException:
    return HTTPException(400, f"The request cannot be read: {error}.")
