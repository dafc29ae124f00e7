"""Each regular expression for text from outside takes time linear in its length.

A quadratic one exceeds the timeout of a test: 100,000 characters are 5,000,000,000 steps.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from riverpy._dsn import mask_passwords, validate_url
from riverpy._duration import parse_duration
from riverpy._insert.unique_key import compute_unique_key
from riverpy._json import compact_like_go
from riverpy._maintenance.reindexer import RebuildPostponement
from riverpy._names import (
    validate_kind,
    validate_lease_name,
    validate_queue_name,
    validate_schema_name,
    validate_tag,
)
from riverpy._tools.health.http import Address, HttpError, parse_request
from riverpy._tools.text import mask_and_shorten_query
from riverpy._work.attempt import SNOOZE_COUNT_METADATA_KEY
from riverpy._work.outcomes import next_snooze_count
from riverpy.errors import RiverError
from riverpy.insert_opts import UniqueOpts
from riverpy.schedules import cron

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 100_000
FRAGMENTS = (
    *(
        "a",
        "1",
        "a:",
        ":",
        "a.",
        ".",
        "/",
        "://",
        "://a:",
        "x://u:p ",
        "@",
        "a@",
        "-",
        "_",
        "#",
        "{[",
    ),
    *("postgres", "postgres/", "postgres//a:", "postgres://", "postgres://a?", "postgres://a?b='"),
    *("password", "password=", "password= ", "password='", "?password", "&pwd=", "?pwd=a&", "="),
    *(
        "'",
        '"',
        "''",
        "\\",
        "\\'",
        '\\"',
        " ",
        "\t",
        "\n",
        "$a",
        "$a$",
        "/*",
        "*/",
        "--",
        "e'",
        "E'\\",
    ),
    *(
        "[",
        "]",
        "{",
        '"a',
        "\\u00",
        "host:",
        "\nhost: ",
        "[Errno ",
        "1w",
        "1h",
        ".1h",
        "1.",
        "0e",
        "riverpy: 1",
    ),
)
TAILS = ("", "@=", '"', "?'")


def _parse_head(text: str) -> None:
    parse_request(f"GET /x HTTP/1.1\r\n{text}\r\n\r\n".encode())


def _every(text: str) -> None:
    cron(f"@every {text}")


def _snoozes(text: str) -> None:
    next_snooze_count(json.dumps({SNOOZE_COUNT_METADATA_KEY: text}))


@pytest.mark.parametrize(
    "read",
    [
        mask_passwords,
        mask_and_shorten_query,
        _parse_head,
        validate_url,
        parse_duration,
        _every,
        _snoozes,
        Address.parse,
        compact_like_go,
        RebuildPostponement.parse_comment,
        validate_kind,
        validate_lease_name,
        validate_queue_name,
        validate_schema_name,
        validate_tag,
    ],
)
@pytest.mark.timeout(120)
def test_time_is_linear(read: Callable[[str], object]) -> None:
    """Text that is made to be slow to search is read or refused in time."""
    for fragment in FRAGMENTS:
        for tail in TAILS:
            with suppress(ValueError, RiverError, HttpError):
                read(fragment * (LENGTH // len(fragment)) + tail)


@pytest.mark.timeout(120)
def test_unique_keys_are_linear() -> None:
    """A unique key of args whose names are made to be slow to search is calculated in time."""
    due_at = datetime(2026, 1, 1, tzinfo=UTC)
    for fragment in ("\\", "*", "a*", "a?", "#", "[#", "a*\\"):
        name = fragment * (LENGTH // len(fragment))
        args = json.dumps({name: 1, "a" * LENGTH: 2}, separators=(",", ":"))
        compute_unique_key(
            UniqueOpts(by_args=True),
            kind="slow",
            args_class=dict,
            args_json=args,
            queue="default",
            due_at=due_at,
        )
