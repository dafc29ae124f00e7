"""ChangeRoute: the forms of the dashboard that change something, with a question before it."""

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
"""The field of a form whose question the user has answered, with the value `yes`."""
BACK_PATH_FIELD = "back"
"""The field with the path to return to, below the dashboard's own."""


class ConfirmationQuestion(NamedTuple):
    """What a page asks before a change that is hard to undo."""

    text: str
    """The question, such as `Delete job 5?`."""
    effect: str
    """What the change does."""
    details: str = ""
    """What is changed, such as the ids of jobs."""
    keep_text: str = "Keep it as it is"
    """The text of the link that changes nothing."""
    is_dangerous: bool = False
    """Whether the change cannot be undone."""
    fields: tuple[tuple[str, str], ...] = ()
    """Fields that the form of the question adds to those of the first form."""


class RequestedChange(NamedTuple):
    """A change that a form asks for."""

    apply: Callable[[Site, Access], Awaitable[FlashMessage | None]]
    """Make the change, log it with its user, and return the message for the user. None: the next
    page itself says what was done."""
    question: ConfirmationQuestion | Callable[[Site], Awaitable[ConfirmationQuestion]] | None = None
    """What to ask before, or a function that reads what the question needs. None: the change is
    made at once."""
    next_path: str | None = None
    """The path of the page that shows the result. None: the page from which the user came."""


class ChangeRoute(NamedTuple):
    """The address and the parser of the forms that ask for one kind of change."""

    path: str
    """The path below the dashboard's own, in the form of Starlette's routes."""
    parse_form: Callable[[Mapping[str, Any], QueryParams], RequestedChange]
    """Return the change that a form asks for, from the parameters of the path and the fields. Raise
    PageError for a form that is not one of this dashboard."""
    default_back_path: str
    """The path to return to if the form names none."""

    def get_back_path(self, fields: QueryParams) -> str:
        """Return the path to return to. It never leads to another site."""
        path = fields.get(BACK_PATH_FIELD, "")
        return path if is_same_site_path(path) else self.default_back_path


def read_button(fields: QueryParams, actions: Collection[str], noun: str) -> tuple[str, str]:
    """Return the action of the button that was used, and the name of what it changes. The field of
    such a button has the action as its name, and the name as its value, with escapes as in an
    address.

    Args:
        fields: the fields of the form.
        actions: the actions of its buttons.
        noun: what is changed, such as `queue`.

    Raises:
        PageError: the form is not one of this dashboard.
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
        access: what the user may do, with the user's name.
        action: what was done, such as `pause queue`.
        target: the name of what was changed.
    """
    get_logger().info(DASHBOARD_MADE_A_CHANGE, action=action, target=target, user=access.user)
