"""Page: the path, the template and the function that loads the values of one page of the
dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._dashboard.access import CSRF_TOKEN_FIELD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.messages import FlashMessage
    from riverpy._dashboard.site import Site


RESPONSE_STATUS_KEY = "response_status"
"""The key under which `Page.load` may return the HTTP status of the page. The default is 200."""


class PageRequest(NamedTuple):
    """What a page needs to answer a request: the dashboard, the parameters of the request, and the
    rights of the user."""

    site: Site
    path_params: Mapping[str, Any]
    query: QueryParams
    access: Access
    root_path: str
    """The path at which the dashboard is mounted, without a slash at the end."""


class Page(NamedTuple):
    """A page of the dashboard. The function `load` reads the values for the template."""

    name: str
    path: str
    """The path relative to the dashboard's mount path, as a Starlette route."""
    template: str
    """The name of the template, which extends `base.html`.

    The dashboard sends the block `live` of the template again when the content of the block
    changes. All users with the same rights receive the same block, so it must not contain the CSRF
    token or the name of the user. Forms contain the token, so they are outside of the block.
    Buttons and checkboxes in the block refer to a form by the attribute `form`.
    """
    load: Callable[[PageRequest], Awaitable[Mapping[str, object]]]
    menu_title: str | None = None
    """The title in the menu. None: the page is not in the menu."""
    findings_age_max: float | None = None
    """The maximum age of the findings of `riverpy doctor` in seconds. While the page is open, the
    checks of `riverpy doctor` run again after this time. None: the page shows no findings."""


class UserPageValues(NamedTuple):
    """The parts of a page that belong to one user: the CSRF token and the flash message."""

    token: str
    message: FlashMessage | None


def make_common_template_values(
    view: PageRequest, pages: tuple[Page, ...], current: Page | None
) -> dict[str, object]:
    """Return the values that all templates need, for a whole page or only for its block `live`."""
    return {
        "root": view.root_path,
        "can_write": view.access.level == "write",
        "menu": [page for page in pages if page.menu_title is not None],
        "current_page": "" if current is None else current.name,
        "token_field": CSRF_TOKEN_FIELD,
    }
