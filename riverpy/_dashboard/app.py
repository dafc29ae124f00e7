"""The ASGI application of the dashboard: its pages, its forms that change something, and its error
pages.

To add a page, write a module with a `Page` and a template, and add the page to `PAGES`. To add a
form, write a `ChangeRoute`, and add it to `CHANGE_ROUTES`.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match, Mount, Route

from riverpy._dashboard.access import (
    CSRF_TOKEN_FIELD,
    authorize_request,
    check_change_request,
    get_or_make_csrf_token,
    set_csrf_token_cookie,
)
from riverpy._dashboard.api.application import make_api
from riverpy._dashboard.change import CONFIRMED_FIELD
from riverpy._dashboard.changes import (
    bulk_changes,
    job_changes,
    leader_changes,
    periodic_changes,
    queue_changes,
)
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.headers import SECURITY_HEADERS, SecurityHeadersMiddleware
from riverpy._dashboard.live import LiveRegionKey
from riverpy._dashboard.messages import delete_flash_message, read_flash_message, set_flash_message
from riverpy._dashboard.mount_paths import MountPathMiddleware, correct_mount_path
from riverpy._dashboard.page import (
    RESPONSE_STATUS_KEY,
    PageRequest,
    UserPageValues,
    make_common_template_values,
)
from riverpy._dashboard.pages import (
    bulk_run_page,
    doctor_page,
    home_page,
    job_list_page,
    job_neighbors_page,
    job_page,
    leader_page,
    periodic_job_page,
    periodic_list_page,
    queue_list_page,
    queue_page,
    worker_list_page,
    worker_page,
)
from riverpy._dashboard.rendering import load_static_files
from riverpy._dashboard.site import DashboardOptions, Site
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_REQUEST_FAILED
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error, is_read_only_error
from riverpy.errors import ClientStateError, RiverError

if TYPE_CHECKING:
    from riverpy._dashboard.change import ChangeRoute
    from riverpy._dashboard.page import Page
    from riverpy.client import Client

PAGES = (
    home_page.PAGE,
    job_list_page.PAGE,
    job_page.PAGE,
    job_neighbors_page.PAGE,
    queue_list_page.PAGE,
    queue_page.PAGE,
    worker_list_page.PAGE,
    worker_page.PAGE,
    periodic_list_page.PAGE,
    periodic_job_page.PAGE,
    leader_page.PAGE,
    doctor_page.PAGE,
    bulk_run_page.PAGE,
)
"""All pages, in the order of the menu."""
CHANGE_ROUTES = (
    job_changes.CHANGE_ROUTE,
    bulk_changes.START_ROUTE,
    bulk_changes.STOP_ROUTE,
    queue_changes.CHANGE_ROUTE,
    leader_changes.CHANGE_ROUTE,
    periodic_changes.CHANGE_ROUTE,
)
"""The routes of all forms that change something."""
FORM_FIELDS_MAX = 1_100
"""The maximum number of fields of a form. A form may contain the ids of many jobs."""
FORM_BYTES_MAX = 256 * 1024
_QUESTION_CACHE_CONTROL = "private, no-cache"
"""The header `Cache-Control` of the page that asks the user to confirm a change. The browser may
store the page and show it again when the user goes back, but sends each new request to the server.
Without a stored page, the browser would ask a user who goes back whether to send the form
again."""
_QUESTION_PAGE_FIELDS = (CSRF_TOKEN_FIELD, CONFIRMED_FIELD)
"""The form fields that the confirmation page sets itself. The page copies all other fields from the
form that requested the change."""


def make_app(client: Client, options: DashboardOptions) -> Starlette:
    """Return the ASGI application of the dashboard."""
    return _DashboardApp(Site(client, options)).make_starlette()


class _DashboardApp:
    """The request handlers of the dashboard: for pages, for forms that change something, and for
    errors."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._log = get_logger()
        self._page_routes = [
            (page, Route(page.path, partial(self._send_page, page), name=page.name))
            for page in PAGES
        ]

    def make_starlette(self) -> Starlette:
        routes = [route for _, route in self._page_routes]
        routes += [
            Route(change.path, partial(self._change_or_ask_to_confirm, change), methods=["POST"])
            for change in CHANGE_ROUTES
        ]
        routes += [
            Route("/live", self._send_live_updates),
            Route("/jobs/{job_id:int}/args", self._send_job_args),
            Route("/static/{name}", _send_static_file),
            Mount("/api", make_api(self._site)),
        ]
        handlers: dict[Any, Any] = {HTTPException: self._send_http_error}
        handlers |= dict.fromkeys((RiverError, *DATABASE_ERRORS), self._send_service_unavailable)
        handlers[Exception] = self._send_internal_error
        middleware = [Middleware(MountPathMiddleware), Middleware(SecurityHeadersMiddleware)]
        return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)

    async def _make_page_request(self, request: Request) -> PageRequest:
        options = self._site.options
        access = await authorize_request(request, options.authorize, read_only=options.read_only)
        root_path = request.scope.get("root_path", "").rstrip("/")
        return PageRequest(self._site, request.path_params, request.query_params, access, root_path)

    async def _send_page(self, page: Page, request: Request) -> Response:
        view = await self._make_page_request(request)
        message = read_flash_message(request)
        if message is not None:
            # The message reports a change. If another process made the change, the caches of this
            # process may still have the data from before.
            self._site.invalidate_caches(_get_age_of_timestamp(message.changed_at))
        times = {"rendered": time.time()} | ({"changed": message.changed_at} if message else {})
        values = await page.load(view)
        here = _get_path_and_query(request, view.root_path)
        live_path = f"{view.root_path}/live?{urlencode({'path': here, **times})}"
        response = self._render(
            request, view, page, page.template, {**values, "live_path": live_path}
        )
        response.status_code = cast("int", values.get(RESPONSE_STATUS_KEY, 200))
        if page.findings_age_max is not None:
            run_checks = self._site.doctor.run_checks_if_older
            response.background = BackgroundTask(run_checks, page.findings_age_max)
        return response

    def _render(
        self,
        request: Request,
        view: PageRequest,
        page: Page | None,
        template: str,
        values: Any,
    ) -> Response:
        token, message = get_or_make_csrf_token(request), read_flash_message(request)
        content = self._site.templates.render(
            template,
            {
                **make_common_template_values(view, PAGES, page),
                **values,
                "frame": UserPageValues(token, message),
                "user": view.access.user,
                "here": _get_path_and_query(request, view.root_path),
            },
        )
        response = HTMLResponse(content)
        set_csrf_token_cookie(request, response, token)
        delete_flash_message(request, response)
        return response

    async def _send_live_updates(self, request: Request) -> Response:
        """Open the stream of live updates for the page whose path is in the query parameter
        `path`."""
        view = await self._make_page_request(request)
        try:
            place = urlsplit(request.query_params.get("path", ""))
        except ValueError:
            raise HTTPException(404) from None
        scope = {"type": "http", "method": "GET", "path": place.path, "root_path": ""}
        matches = [(page, *route.matches(scope)) for page, route in self._page_routes]
        fitting = [(page, found) for page, match, found in matches if match is Match.FULL]
        if not fitting:
            raise HTTPException(404)
        page, found = fitting[0]
        followed = view._replace(
            path_params=found["path_params"],
            query=QueryParams(place.query),
            # The content is the same for all users with these rights, so leave out the user.
            access=view.access._replace(user=None),
        )
        key = LiveRegionKey(
            f"{place.path}?{followed.query}", followed.access.level, followed.root_path
        )
        if "changed" in request.query_params:
            self._site.invalidate_caches(_get_age_of_timestamp(request.query_params["changed"]))
        response = self._site.regions.open_stream(
            key,
            partial(self._render_live_block, page, followed),
            _get_age_of_timestamp(request.query_params.get("rendered")),
        )
        if page.findings_age_max is not None:
            run_checks = self._site.doctor.keep_findings_fresh
            response.run_while_open = partial(run_checks, page.findings_age_max)
        return response

    async def _render_live_block(self, page: Page, view: PageRequest) -> bytes:
        values = {**make_common_template_values(view, PAGES, page), **await page.load(view)}
        return self._site.templates.render_live_block(page.template, values)

    async def _change_or_ask_to_confirm(self, change: ChangeRoute, request: Request) -> Response:
        """Make the change that a form requests. If the user must confirm the change, and has not
        confirmed it yet, send the confirmation page."""
        view = await self._make_page_request(request)
        fields = await _read_form(request)
        check_change_request(request, view.access, fields.get(CSRF_TOKEN_FIELD, ""))
        requested = change.parse_form(view.path_params, fields)
        back = change.get_path_after_change(fields)
        question = requested.question
        if question is not None and fields.get(CONFIRMED_FIELD) != "yes":
            if callable(question):
                question = await question(self._site)
            own = [one for one in fields.multi_items() if one[0] not in _QUESTION_PAGE_FIELDS]
            values = {
                "question": question,
                "change_path": request.scope["path"].removeprefix(view.root_path),
                "fields": [*own, *question.fields],
                "back": back,
            }
            response = self._render(request, view, None, "question.html", values)
            response.headers["Cache-Control"] = _QUESTION_CACHE_CONTROL
            return response
        message = await requested.apply(self._site, view.access)
        self._site.invalidate_caches()
        response = RedirectResponse(f"{view.root_path}{requested.next_path or back}", 303)
        if message is not None:
            set_flash_message(request, response, message)
        return response

    async def _send_job_args(self, request: Request) -> Response:
        """Send the whole args of a job as plain text, so that browsers do not interpret them."""
        await self._make_page_request(request)
        job, _ = await job_page.read_job_and_time(self._site.client, request.path_params["job_id"])
        shown = self._site.get_visible_args(job)
        return PlainTextResponse(shown.note if shown.json_text is None else shown.json_text)

    async def _send_http_error(self, request: Request, error: HTTPException) -> Response:
        problem, advice = str(error.detail), "Go back, or open Home."
        if isinstance(error, PageError):
            problem, advice = error.problem, error.advice
        elif error.status_code == 404:
            problem = "There is no such page."
        elif error.status_code == 405:
            problem = f"{request.method} is not possible here, so nothing was changed."
            advice = "Open Home, and use the links and buttons of the pages."
        response = self._render_error_page(request, error.status_code, problem, advice)
        response.headers.update(error.headers or {})
        return response

    async def _send_service_unavailable(self, request: Request, error: Exception) -> Response:
        """Send an error page after a request failed because of the database or the client."""
        text = describe_error(error)
        self._log.warning(DASHBOARD_REQUEST_FAILED, path=request.url.path, error=text)
        advice = "Load the page again. If this stays so, run `riverpy doctor` on the server."
        if isinstance(error, ClientStateError):
            advice = (
                "The application has to open the client, for example by "
                "lifespan=riverpy.web.lifespan(client)."
            )
        is_change = request.method not in {"GET", "HEAD"}
        if is_change and is_read_only_error(error):
            advice = (
                "The dashboard is connected to a read-only server, such as a replica. Connect it "
                "to the primary server, or start it with read_only=True (`riverpy web "
                "--read-only`)."
            )
        failed = "The change failed" if is_change else "The database could not be read"
        return self._render_error_page(request, 503, f"{failed}: {text}", advice)

    async def _send_internal_error(self, request: Request, _error: Exception) -> Response:
        """Send an error page after an error in the dashboard or in `authorize`. The web server logs
        the error. Starlette calls this handler without the middleware. So the handler does what the
        middleware does for other responses: correct the mount path, add the security headers."""
        response = self._render_error_page(
            Request(correct_mount_path(request.scope)),
            500,
            "The dashboard failed.",
            "The log of the web server has the error. Load the page again, or open Home.",
        )
        response.headers.update(SECURITY_HEADERS)
        return response

    def _render_error_page(
        self, request: Request, status: int, problem: str, advice: str
    ) -> Response:
        root = request.scope.get("root_path", "").rstrip("/")
        values = {"root": root, "status": status, "problem": problem, "advice": advice}
        return HTMLResponse(self._site.templates.render("problem.html", values), status)


async def _read_form(request: Request) -> QueryParams:
    """Return the fields of the form in a request.

    Raises:
        PageError: the form is too large, has too many fields, or is not in UTF-8.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            raise PageError(413, "The form is too large.", "Go back, and choose fewer jobs.")
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FORM_FIELDS_MAX)
    except ValueError:
        raise PageError(
            400, "The form cannot be read.", "Go back, and choose fewer jobs."
        ) from None
    return QueryParams(fields)


def _get_path_and_query(request: Request, root_path: str) -> str:
    """Return the path and query of a request, without the path at which the dashboard is
    mounted."""
    path = request.scope["path"].removeprefix(root_path) or "/"
    return f"{path}?{request.url.query}" if request.url.query else path


def _get_age_of_timestamp(moment: float | str | None) -> float:
    """Return the age in seconds of a Unix timestamp that a browser has sent back. The age is never
    negative, even if a process with a clock ahead of this one made the timestamp. A missing or
    invalid timestamp counts as 0, i.e. the start of 1970."""
    try:
        age = time.time() - float(moment or 0)
    except ValueError:
        age = time.time()
    return max(age, 0.0) if math.isfinite(age) else time.time()


async def _send_static_file(request: Request) -> Response:
    file = load_static_files().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(file.content, media_type=file.media_type, headers=headers)
