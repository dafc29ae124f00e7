"""The forms in which pages show values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from riverpy._dashboard import rendering
from riverpy._dashboard.rendering import SHOWN_TEXT_LENGTH_MAX, format_json


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", '""', "1", "null", "[[],[[]],{}]"),
        '{"a": 12345678901234567890123, "b": [0.10, {"c": "q,}\\"{[\\\\"}], "d": {}, "e": true}',
        json.dumps([{"n": n, "text": "é:" * 9} for n in range(100)]),
    ],
)
def test_json(text: str) -> None:
    """JSON is shown with one value a line. Numbers stay as they are."""
    assert format_json(text).text == msgspec.json.format(text, indent=2)
    assert not format_json(text).is_cut


@pytest.mark.parametrize(
    "text", ["[" * 5_000_000, '{"x": "' + "y" * 5_000_000 + '"}', "[1, 2, " * 9_000]
)
def test_large_json(text: str) -> None:
    """Only the start of a large text is formatted, also if its values are nested deeply."""
    shown = format_json(text)
    assert shown.is_cut
    assert len(shown.text) == SHOWN_TEXT_LENGTH_MAX
    assert shown.length == len(text)


def test_table_roles() -> None:
    """Tables that are shown as lists on a narrow screen name the roles of their parts: browsers
    drop the roles of parts that are not shown as a table."""
    stacked = re.compile(r'<table class="[^"]*stacked.*?</table>', re.DOTALL)
    for file in (Path(rendering.__file__).parent / "templates").glob("*.html"):
        for table in stacked.findall(file.read_text()):
            parts = re.findall(r"<(?:table|thead|tbody|tr|th|td)(?=[ >])[^>]*>", table)
            assert [part for part in parts if "role=" not in part] == [], file.name
