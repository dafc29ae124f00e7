"""Flash messages: the result of a change, which the next page shows once."""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import TYPE_CHECKING, Literal

import msgspec

from riverpy._dashboard.paths import is_same_site_path

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MESSAGE_COOKIE = "riverpy_message"
MESSAGE_LENGTH_MAX = 1_000
"""The maximum number of characters of a message. A browser stores at most 4 kB in a cookie."""
_MESSAGE_AGE_MAX = 60
"""The time in seconds after which a browser deletes a message that no page has shown."""


class FlashMessage(msgspec.Struct, frozen=True):
    """A message to the user, which the next page shows once."""

    text: str
    state: Literal["ok", "look", "act"] = "ok"
    """How the page marks the message. The values are those of `Health`. `ok`: the whole change was
    made. `look`: a part of the change was not made, or the user should read the message. `act`:
    nothing was changed."""
    link: str = ""
    """The path of a page with more information, relative to the dashboard's mount path. Empty:
    there is no link."""
    link_text: str = ""
    changed_at: float = msgspec.field(default_factory=time.time)
    """The time of the change as a Unix timestamp."""


def set_flash_message(request: Request, response: Response, message: FlashMessage) -> None:
    """Store a message in a cookie, so that the next page shows it."""
    text = message.text
    if len(text) > MESSAGE_LENGTH_MAX:
        text = text[: MESSAGE_LENGTH_MAX - 1] + "…"
    encoded = msgspec.json.encode(msgspec.structs.replace(message, text=text))
    response.set_cookie(
        MESSAGE_COOKIE,
        urlsafe_b64encode(encoded).decode().rstrip("="),
        max_age=_MESSAGE_AGE_MAX,
        path=request.scope.get("root_path") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def read_flash_message(request: Request) -> FlashMessage | None:
    """Return the message that this page must show. None: there is none."""
    value = request.cookies.get(MESSAGE_COOKIE)
    if not value:
        return None
    try:
        encoded = urlsafe_b64decode(value + "=" * (-len(value) % 4))
        message = msgspec.json.decode(encoded, type=FlashMessage)
    except (ValueError, msgspec.MsgspecError):
        return None
    return message if is_same_site_path(message.link or "/") else None


def delete_flash_message(request: Request, response: Response) -> None:
    """Delete the cookie with the message, so that no later page shows it again."""
    if MESSAGE_COOKIE in request.cookies:
        response.delete_cookie(MESSAGE_COOKIE, path=request.scope.get("root_path") or "/")
