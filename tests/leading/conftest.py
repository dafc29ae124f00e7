"""Fixtures for tests of leaders and their maintenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.leading.term_context import held_term

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema
    from tests.leading.term_context import HeldTerm


@pytest.fixture
async def held(schema: Schema) -> AsyncGenerator[HeldTerm]:
    """A context with default settings, whose term is held."""
    async with held_term(schema) as held:
        yield held
