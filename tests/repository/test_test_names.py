"""The tests of each module are found by its name or in the table of tests/README.md."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "riverpy"
PAGE = (TESTS / "README.md").read_text("utf-8")
_NAME = re.compile(r"`([^`]+)`")
ROWS = [
    (_NAME.findall(modules), _NAME.findall(tests))
    for modules, tests in re.findall(r"^\| (`.+) \| (.+) \|$", PAGE, re.MULTILINE)
]
UNTESTED = _NAME.findall(PAGE[PAGE.index("have no tests of their own") :])


def has_its_own_tests(module: str) -> bool:
    """Return whether a test file or a folder of tests has the path of the module."""
    *folders, name = (part.lstrip("_") for part in module.removesuffix(".py").split("/"))
    folder = TESTS.joinpath(*folders)
    return (folder / f"test_{name}.py").exists() or any((folder / name).glob("test_*.py"))


OTHERS = [
    name
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.startswith("__")
    if not has_its_own_tests(name := path.relative_to(PACKAGE).as_posix())
]
"""The modules that the page has to name."""


@pytest.mark.parametrize("module", OTHERS)
def test_page_names_the_module(module: str) -> None:
    """A module without a test file of its name is on the page."""
    patterns = [pattern for modules, _ in ROWS for pattern in modules]
    assert any(fnmatch(module, pattern) for pattern in [*patterns, *UNTESTED])


def test_page_is_not_outdated() -> None:
    """Each module on the page exists and has no test file of its name, and each test exists."""
    for modules, tests in ROWS:
        for pattern in modules:
            assert any(fnmatch(module, pattern) for module in OTHERS), pattern
        assert tests
        for name in tests:
            assert (TESTS / name).exists(), name
    assert [name for name in UNTESTED if name not in OTHERS] == []
