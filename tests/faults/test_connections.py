"""Connections that die or freeze under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy.drivers.asyncpg import DATABASE_ERRORS
from tests.kit.load import LOST, RESTORED, until
from tests.kit.server_faults import POOL_NAME, kill_backends

if TYPE_CHECKING:
    from tests.kit.load import Stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

KILLS = 20
BACKENDS = {
    "notifier": "listener",
    "reserved": "reserved",
    "claims": "claims",
    "results": "results",
    "maintenance": "maintenance",
}
"""Connections, and what their backends are called."""


@pytest.mark.parametrize("name", BACKENDS)
async def test_killed_backends(stage: Stage, name: str) -> None:
    """NR-02, NR-11, PB-07: connections of each kind are killed 20 times. Each is made anew, told of
    in one line when it is lost and in one when it is back, and no job comes to harm."""
    places = [stage.leader] if name == "maintenance" else stage.places
    rounds = KILLS // len(places)
    async with stage.load():
        for number in range(1, rounds + 1):
            for place in places:
                user = place.worker.name
                assert await kill_backends(stage.url, f"riverpy {BACKENDS[name]}", user=user) == 1
            for place in places:
                await until(lambda place=place, number=number: place.count(RESTORED) == number)
    for place in places:
        assert [line["event"] for line in place.warnings] == [LOST] * rounds
        assert {line["connection"] for line in place.warnings} == {name}


async def test_killed_pool(stage: Stage) -> None:
    """PB-07: the connections of a web side's pool are killed 20 times: an insert fails at most
    once for each."""
    async with stage.load() as load:
        for _ in range(KILLS):
            await kill_backends(stage.url, POOL_NAME)
            await load.flows()
        assert len(load.failures) <= KILLS
        assert all(isinstance(error, DATABASE_ERRORS) for error in load.failures)
    assert [place.warnings for place in stage.places] == [[], []]
