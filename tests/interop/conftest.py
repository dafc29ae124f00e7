"""Fixtures for River in Go. They skip a test where Go or its modules are not available."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests._scheduling import FIRST_WORKER
from tests.interop.callers import both_callers
from tests.interop.river_go import BUILD_TIMEOUT, RiverGo, build
from tests.interop.working import Fleet
from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.interop.callers import Caller

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Build the Go program during the tests that come before those here."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT + 60))
    if ours and os.environ.get("PYTEST_XDIST_WORKER", FIRST_WORKER) == FIRST_WORKER:
        threading.Thread(target=_try_to_build, daemon=True).start()


def _try_to_build() -> None:
    with suppress(Exception):  # each test that needs the program raises it again
        program()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs Go where Go is missing. This happens here because pytest joins skips
    with the same place in one line, and a skip in a fixture has its place in each test."""
    if isinstance(item, pytest.Function) and "go_binary" in item.fixturenames and not program():
        pytest.skip("needs Go and its modules: install Go to test a fleet of both languages")


@cache
def program() -> Path | None:
    """Return the Go program, if it can be built."""
    return build()


@pytest.fixture(scope="session")
def go_binary() -> Path:
    """The Go program."""
    binary = program()
    assert binary is not None
    return binary


@pytest.fixture
def go(go_binary: Path, schema: Schema) -> RiverGo:
    """River in Go on the test's schema."""
    return RiverGo(go_binary, schema.url, schema.name)


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """riverpy on the test's schema."""
    return Rig(schema)


@pytest.fixture
async def mark_silently(schema: Schema) -> AsyncGenerator[None]:
    """Give jobs with the metadata `SILENT_CANCEL` a cancel mark as they are claimed."""
    await schema.execute((HERE / "silent_cancel.sql").read_text("utf-8"))
    yield
    await schema.execute("DROP FUNCTION mark_silently CASCADE")


@pytest.fixture
async def callers(go: RiverGo, schema: Schema) -> AsyncGenerator[dict[str, Caller]]:
    """A client of each language that inserts and controls, by the name of the language."""
    async with both_callers(go, schema) as callers:
        yield callers


@pytest.fixture
def fleet(go: RiverGo, schema: Schema) -> Fleet:
    """A factory for workers of either language on the test's schema."""
    return Fleet(go, schema)
