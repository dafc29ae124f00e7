"""Codes of properties stand on docs/properties.md and in docstrings of tests, nowhere else."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "properties.md").read_text("utf-8")
_CODE = re.compile(r"\b(?:[A-Z]{2}-\d\d|P\d{1,2})\b")
_ROW = re.compile(r"^\| ([A-Z]{2}-\d\d|P\d{1,2}) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
CODES = set(_CODE.findall(PAGE))


@cache
def docstrings() -> list[tuple[str, str]]:
    """Return the path below tests/ and the docstring of each test."""
    return [
        (path.relative_to(TESTS).as_posix(), ast.get_docstring(node) or "")
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_page_names_the_tests() -> None:
    """The page names the files of the tests that carry a code, and no others."""
    rows = {code: set(re.findall(r"`([^`]+)`", files)) for code, files in _ROW.findall(PAGE)}
    found: dict[str, set[str]] = {}
    for name, docstring in docstrings():
        for code in _CODE.findall(docstring):
            found.setdefault(code, set()).add(name)
    assert rows == found


def test_page_names_files_that_exist() -> None:
    """Each file on the page exists."""
    for name in re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", PAGE):
        assert (TESTS / name).exists(), name


def test_docstrings_begin_with_a_sentence() -> None:
    """A docstring has its codes in parentheses, after a sentence."""
    wrong = [
        (name, docstring)
        for name, docstring in docstrings()
        if docstring.startswith("(") or _CODE.search(re.sub(r"\([^()]*\)", "", docstring))
    ]
    assert wrong == []


def test_no_code_elsewhere() -> None:
    """Code, SQL, scripts and the other pages describe a property in words."""
    files = [
        path
        for pattern in ("*.md", "docs/**/*.md", "riverpy/**/*.py", "sql/**/*.sql", "scripts/**/*")
        for path in ROOT.glob(pattern)
        if path.is_file() and path.suffix != ".pyc" and path.name != "properties.md"
    ]
    assert len(files) > 100
    found = {
        (path.relative_to(ROOT).as_posix(), code)
        for path in files
        for code in _CODE.findall(path.read_text("utf-8"))
        if code in CODES
    }
    assert found == set()
