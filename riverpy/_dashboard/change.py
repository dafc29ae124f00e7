"""ChangeRoute: the path and the parser of a form of the dashboard that changes something. The
change may need a confirmation by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from riverpy._dashboard.errors import PageError
from riverpy._dashboard.paths import is_same_site_path
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_MADE_A_CHANGE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.messages import FlashMessage
    from riverpy._dashboard.site import Site

CONFIRMED_FIELD = "confirmed"
"""The form field that the confirmation page adds. Its value `yes` means that the user has confirmed
the change."""
BACK_PATH_FIELD = "back"
"""The form field with the path of the page to show after the change, relative to the dashboard's
mount path."""


class ConfirmationQuestion(NamedTuple):
    """The question on the page that asks the user to confirm a change."""

    text: str
    """The question, such as `Delete job 5?`."""
    effect: str
    """What the change does."""
    details: str = ""
    """The objects to change, such as the ids of jobs."""
    keep_text: str = "Keep it as it is"
    """The text of the link with which the user declines the change."""
    is_dangerous: bool = False
    """Whether the page marks the button of the change as dangerous, because the change cannot be
    undone."""
    fields: tuple[tuple[str, str], ...] = ()
    """Additional form fields of the confirmation page, as names and values. The page also has the
    fields of the form that requested the change."""


class RequestedChange(NamedTuple):
    """The change that a form requests."""

    apply: Callable[[Site, Access], Awaitable[FlashMessage | None]]
    """The function that makes the change, logs it with the name of the user, and returns the
    message for the user. If it returns None, the next page shows the result without a message."""
    question: ConfirmationQuestion | Callable[[Site], Awaitable[ConfirmationQuestion]] | None = None
    """The question that the user must confirm, or a function that reads the data for the question
    and returns the question. None: the change needs no confirmation."""
    next_path: str | None = None
    """The path of the page that shows the result. None: return to the page from which the user
    came."""


class ChangeRoute(NamedTuple):
    """The path and the parser of all forms that request one kind of change."""

    path: str
    """The path relative to the dashboard's mount path, as a Starlette route."""
    parse_form: Callable[[Mapping[str, Any], QueryParams], RequestedChange]
    """The function that parses a form and returns the requested change. Its arguments are the
    parameters of the path and the fields of the form. It raises PageError if the form does not come
    from this dashboard."""
    default_back_path: str
    """The path of the page to show after the change if the form does not name one."""

    def get_path_after_change(self, fields: QueryParams) -> str:
        """Return the path of the page to show after the change, never of a page on another
        site."""
        path = fields.get(BACK_PATH_FIELD, "")
        return path if is_same_site_path(path) else self.default_back_path


def parse_pressed_button(
    fields: QueryParams, actions: Collection[str], noun: str
) -> tuple[str, str]:
    """Return the action of the button that the user pressed, and the name of the action's target.
    The form contains one field for this button. The field's name is the action, and the field's
    value is the name of the target, percent-encoded.

    Args:
        fields: the fields of the form.
        actions: the actions of the form's buttons.
        noun: the kind of target, such as `queue`, for the error text.

    Raises:
        PageError: the form does not come from this dashboard.
    """
    used = [action for action in actions if action in fields]
    if len(used) != 1:
        raise PageError(400, "The form names no change.", "Go back, and use one of the buttons.")
    name = unquote(fields[used[0]])
    if not name or "\0" in name:
        raise PageError(400, f"The form names no {noun}.", "Go back, and use one of the buttons.")
    return used[0], name


def log_change(access: Access, action: str, target: str) -> None:
    """Log a change of something other than jobs, such as the pause of a queue.

    Args:
        access: the rights and the name of the user.
        action: the change, such as `pause queue`.
        target: the name of the changed object, such as a queue.
    """
    get_logger().info(DASHBOARD_MADE_A_CHANGE, action=action, target=target, user=access.user)
