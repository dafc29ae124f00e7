"""Fixtures of the tests of working."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests._database import Schema


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """Workers, clients and jobs on a schema of the test's own."""
    return Rig(schema)


@pytest.fixture
def log() -> Generator[list[dict[str, object]]]:
    """What riverpy logs meanwhile."""
    with structlog.testing.capture_logs() as entries:
        yield entries
