"""The mandate: what a term may write, and what it may not after its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.maintenance.office import HeldOffice


async def test_holder_writes(held: HeldOffice, schema: Schema) -> None:
    """What the holder writes is committed."""
    office = held.office
    async with office.mandate.transaction(office.connection, "a test") as connection:
        await connection.execute(
            f"INSERT INTO {schema.name}.river_queue (name, updated_at) VALUES ('q', now())"
        )
    assert await schema.fetchval("SELECT count(*) FROM river_queue") == 1
    assert held.fenced_out == []


async def test_deposed_writes_nothing(held: HeldOffice, schema: Schema) -> None:
    """A transaction of a term that another has followed is refused before its first write, and the
    elector is told."""
    office = held.office
    await held.depose()
    with pytest.raises(FencedOutError):
        async with office.mandate.transaction(office.connection, "a test"):
            pytest.fail("the transaction began")
    assert held.fenced_out == [held.term]


async def test_doubt_sends_nothing(held: HeldOffice) -> None:
    """Without trust in its term a process does not even ask."""
    office = held.office
    held.distrust()
    with pytest.raises(FencedOutError):
        async with office.mandate.transaction(office.connection, "a test"):
            pytest.fail("the transaction began")
    assert held.fenced_out == []
