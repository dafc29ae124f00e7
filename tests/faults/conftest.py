"""Fixture of the tests of one file: a stage of two workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.kit.fleet import running_fleet
from tests.kit.load import LoadSettings, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pytest

SETTINGS = LoadSettings(slots=50)
"""Settings of the workers, unless the file defines its own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: pytest.FixtureRequest) -> AsyncGenerator[Stage]:
    """Run two workers on a server of their own."""
    async with running_fleet() as fleet:
        stage = Stage(fleet)
        await stage.start(getattr(request.module, "SETTINGS", SETTINGS))
        yield stage
