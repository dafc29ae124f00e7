"""Database URLs: what may be one, and how one is shown without its password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from riverpy.errors import ConfigError

# A password may hold what should have been percent-encoded: all up to the last @ is taken for one.
_URL_PASSWORD = re.compile(r"(?P<user>://[\w.%+~-]*):(?:\S+|[^/?#\n]{1,200})(?=@)")
_BARE_PASSWORD = re.compile(r"(?<![\w/:])(?P<user>[\w.%+~-]{1,200}):(?!//)\S+(?=@)")
_PASSWORD_PARAMETER = re.compile(r"(?i)(?<=[?&])((?:ssl)?pass(?:word)?)=[^&#\s]*")
_PASSWORD_KEYWORD = re.compile(r"(?i)\b((?:ssl)?password\s*=\s*)('[^']*'|\S+)")


def mask_url(text: str) -> str:
    """`text` with each password in it, of a URL or of a keyword list, replaced by three stars."""
    if "@" in text:
        text = _URL_PASSWORD.sub(r"\g<user>:***", text)
        text = _BARE_PASSWORD.sub(r"\g<user>:***", text)
    text = _PASSWORD_PARAMETER.sub(r"\1=***", text)
    return _PASSWORD_KEYWORD.sub(r"\1***", text)


def validate_url(url: str) -> None:
    """Check that this can be the URL of a database; else ConfigError, with no password."""
    if "\0" in url:
        raise ConfigError("a database URL holds no NUL")
    if not url.startswith(("postgres://", "postgresql://")):
        raise ConfigError(
            f"a database URL starts with postgres:// or postgresql://, got {mask_url(url)!r}"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port if "," not in parts.netloc else None
    except ValueError as error:
        raise ConfigError(
            f"the database URL {mask_url(url)!r} cannot be read: {_reason(error)}"
        ) from None


def _reason(error: ValueError) -> str:
    if "port" not in str(error).lower():
        return "it is no URL"
    return "its port is no number (in a password, write / ? # and @ as %2F %3F %23 and %40)"
