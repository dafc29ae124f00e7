"""Templates: renders pages with Jinja2, and formats the values that they show."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from riverpy._dashboard.paths import (
    make_bulk_run_path,
    make_periodic_job_path,
    make_queue_path,
    make_worker_path,
)
from riverpy._tools.text import format_seconds
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIVE_BLOCK = "live"
"""The name of the template block that is updated while a page is open."""
SHOWN_TEXT_LENGTH_MAX = 20_000
"""The maximum number of characters of one text on a page, such as the args of a job."""
STATES_IN_DISPLAY_ORDER = (
    JobState.AVAILABLE,
    JobState.RUNNING,
    JobState.SCHEDULED,
    JobState.RETRYABLE,
    JobState.PENDING,
    JobState.COMPLETED,
    JobState.CANCELLED,
    JobState.DISCARDED,
)
"""The states of jobs in the order in which the pages show them."""
_DIRECTORY = Path(__file__).parent
_HIDDEN_CHARACTERS = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff]"
)
"""Characters that are invisible or change the direction of text. A value with such characters could
look like another value."""
_JSON_TOKEN_PATTERN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}:,]|[^][{}:,"\s]+', re.DOTALL)
_OPENING, _CLOSING = ("[", "{"), ("]", "}")
_MEDIA_TYPE_BY_STATIC_FILE = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}


class TruncatedText(NamedTuple):
    """A text that is cut if it is too long for a page."""

    text: str
    is_cut: bool
    length: int
    """The number of characters of the text before it was cut."""


def escape_hidden_characters(text: str) -> str:
    """Replace invisible characters in a text by escapes."""
    return _HIDDEN_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def format_with_escapes(value: object) -> str:
    """Return a value as text. Invisible characters are replaced by escapes."""
    return escape_hidden_characters(str(value))


def truncate_text(text: str, length: int = SHOWN_TEXT_LENGTH_MAX) -> TruncatedText:
    """Return the first `length` characters of a text. Invisible characters are replaced by
    escapes."""
    return TruncatedText(escape_hidden_characters(text[:length]), len(text) > length, len(text))


def format_json(json_text: str) -> TruncatedText:
    """Return the start of a JSON text, formatted with one value per line. Numbers keep their exact
    digits. Only the start is formatted, because the args of a job may be several megabytes long."""
    parts: list[str] = []
    length = depth = 0
    last = ""
    for match in _JSON_TOKEN_PATTERN.finditer(json_text[:SHOWN_TEXT_LENGTH_MAX]):
        piece = match[0]
        is_closing = piece in _CLOSING
        depth -= is_closing
        if last in _OPENING:
            part = piece if is_closing else f"\n{'  ' * depth}{piece}"
        elif last == "," or is_closing:
            part = f"\n{'  ' * depth}{piece}"
        else:
            part = f" {piece}" if last == ":" else piece
        depth += piece in _OPENING
        parts.append(part)
        length += len(part)
        last = piece
        if length > SHOWN_TEXT_LENGTH_MAX:
            break
    is_cut = max(length, len(json_text)) > SHOWN_TEXT_LENGTH_MAX
    text = "".join(parts)[:SHOWN_TEXT_LENGTH_MAX]
    return TruncatedText(escape_hidden_characters(text), is_cut, len(json_text))


def format_capped_count(count: int | None, cap: int | None = None) -> str:
    """Format a count, such as `1,234`. If counting stopped at `cap`, return a text such as `10k+`.
    Return `?` for None."""
    if count is None:
        return "?"
    if cap is None or count < cap:
        return f"{count:,}"
    return f"{count // 1000}k+" if count >= 10_000 or count % 1000 == 0 else f"{count:,}+"


def format_duration(seconds: float | None) -> str:
    """Format a duration in seconds, such as `1h5m`. Return `–` for None."""
    if seconds is None:
        return "–"
    return f"{max(seconds, 0) * 1000:.0f}ms" if seconds < 1 else format_seconds(seconds)


def format_rate(rate: float) -> str:
    """Format a number of jobs per second, such as `<0.1`, `2.5` or `1,234`."""
    if not rate:
        return "0"
    return "<0.1" if rate < 0.1 else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def make_time_element(moment: datetime | None, now: datetime) -> Markup:
    """Return an HTML element with the age of a time, such as `5m ago`. The title of the element is
    the time in UTC."""
    if moment is None:
        return Markup("–")
    seconds = (now - moment).total_seconds()
    age = format_seconds(abs(round(seconds)))
    text = f"{age} ago" if seconds >= 0 else f"in {age}"
    full = format_utc_with_milliseconds(moment)
    return Markup('<time datetime="{}" title="{}" data-age="{}">{}</time>').format(
        moment.astimezone(UTC).isoformat(), full, round(seconds, 1), text
    )


def format_utc_with_milliseconds(moment: datetime) -> str:
    """Format a time in UTC, such as `2026-01-31 12:00:00.123 UTC`."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


def format_utc(moment: datetime | None) -> str:
    """Format a time in UTC without fractions of seconds. Return `–` for None."""
    return "–" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


class StaticFile(NamedTuple):
    """A file that browsers load for the pages, such as the style sheet."""

    content: bytes
    media_type: str
    version: str
    """A hash of the content. It is part of the file's URL, so browsers load a changed file
    again."""


@cache
def load_static_files() -> Mapping[str, StaticFile]:
    """Return the static files by name."""
    files: dict[str, StaticFile] = {}
    for name, media_type in _MEDIA_TYPE_BY_STATIC_FILE.items():
        content = (_DIRECTORY / "static" / name).read_bytes()
        files[name] = StaticFile(content, media_type, sha256(content).hexdigest()[:12])
    return files


class Templates:
    """Renders the templates of the dashboard."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(_DIRECTORY / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters: dict[str, Callable[..., object]] = {
            "age": make_time_element,
            "bulk_run_path": make_bulk_run_path,
            "count": format_capped_count,
            "cut": truncate_text,
            "duration": format_duration,
            "json": format_json,
            "periodic_job_path": make_periodic_job_path,
            "queue_path": make_queue_path,
            "rate": format_rate,
            "utc": format_utc,
            "visible": format_with_escapes,
            "worker_path": make_worker_path,
        }
        self._environment.filters.update(filters)  # pyright: ignore[reportCallIssue, reportArgumentType] (its type lists the default filters only)
        self._static_versions = {name: file.version for name, file in load_static_files().items()}

    def render(self, name: str, values: Mapping[str, object]) -> bytes:
        """Render a page and return it as UTF-8."""
        template = self._environment.get_template(name, globals={"states": STATES_IN_DISPLAY_ORDER})
        return _encode_utf8(template.render(values, static_versions=self._static_versions))

    def render_live_block(self, name: str, values: Mapping[str, object]) -> bytes:
        """Render only the block of a page that is updated while the page is open."""
        template = self._environment.get_template(name, globals={"states": STATES_IN_DISPLAY_ORDER})
        block = template.blocks[LIVE_BLOCK]
        return _encode_utf8("".join(block(template.new_context(dict(values)))))


def _encode_utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # lone surrogates become `?`
