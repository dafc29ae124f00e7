"""Page: one page of the dashboard, as its module describes it."""

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
"""The key of the value of `load` with the HTTP status of the page. Without it, it is 200."""


class PageView(NamedTuple):
    """What a page needs to load its values: the dashboard, the address and the rights of the
    user."""

    site: Site
    path_params: Mapping[str, Any]
    query: QueryParams
    access: Access
    root_path: str
    """The path at which the dashboard is mounted, without a slash at its end."""


class Page(NamedTuple):
    """A page. `load` reads what the template shows."""

    name: str
    path: str
    """The path below the dashboard's own, in the form of Starlette's routes."""
    template: str
    """The template. It extends `base.html`. Its block `live` is shown again when something changes,
    so it must not contain the token or the user: forms stand outside of it, and their buttons and
    checkboxes name them with the attribute `form`."""
    load: Callable[[PageView], Awaitable[Mapping[str, object]]]
    menu_title: str | None = None
    """The title in the menu. None: the page is not in the menu."""
    findings_age_max: float | None = None
    """Seconds after which the checks of doctor run again while the page is open. None: the page
    shows no findings."""


class PageFrame(NamedTuple):
    """The parts of a page that belong to one user: the CSRF token and the message."""

    token: str
    message: FlashMessage | None


def make_common_template_values(
    view: PageView, pages: tuple[Page, ...], current: Page | None
) -> dict[str, object]:
    """Return the values that all templates need, also those of a live block."""
    return {
        "root": view.root_path,
        "can_write": view.access.level == "write",
        "menu": [page for page in pages if page.menu_title is not None],
        "current_page": "" if current is None else current.name,
        "token_field": CSRF_TOKEN_FIELD,
    }
