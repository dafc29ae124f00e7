"""The reader of the tests of `riverpy top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._tools.top.status import StatusReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema


@pytest.fixture
async def reader(schema: Schema) -> AsyncGenerator[StatusReader]:
    """Return a reader of the test's schema."""
    reader = StatusReader(schema.url, schema.name)
    yield reader
    await reader.close()
