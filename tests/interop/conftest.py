"""Fixtures that give a test River in Go, or skip it where Go or its modules are not to be had."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.river_go import BUILD_TIMEOUT, RiverGo, build
from tests.work.rig import Rig

if TYPE_CHECKING:
    from tests._database import Schema

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test here builds, and the others wait for it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT + 60))


@pytest.fixture(scope="session")
def go_binary() -> Path:
    """The program of River in Go."""
    if binary := build():
        return binary
    pytest.skip("needs Go and its modules: install Go to test a fleet of both languages")


@pytest.fixture
def go(go_binary: Path, schema: Schema) -> RiverGo:
    """River in Go on the test's schema."""
    return RiverGo(go_binary, schema.url, schema.name)


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """River in Python on the test's schema."""
    return Rig(schema)
