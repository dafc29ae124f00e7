"""Fixtures of the tests of maintenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from tests.maintenance.office import held_office

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from tests._database import Schema
    from tests.maintenance.office import HeldOffice


@pytest.fixture
async def held(schema: Schema) -> AsyncGenerator[HeldOffice]:
    """An office with default settings, whose term is held."""
    async with held_office(schema) as held:
        yield held


@pytest.fixture
def log() -> Generator[list[dict[str, object]]]:
    """What riverpy logs meanwhile."""
    with structlog.testing.capture_logs() as entries:
        yield entries
