"""Rows as a fleet leaves them, and looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._tools.top.look import Looker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema


@pytest.fixture
async def looker(schema: Schema) -> AsyncGenerator[Looker]:
    """Looks at the test's schema."""
    looker = Looker(schema.url, schema.name)
    yield looker
    await looker.close()
