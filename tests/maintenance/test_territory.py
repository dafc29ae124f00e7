"""Territory: what a leader takes for its own between two looks at whose the queues are."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from riverpy._clock import SystemTimer
from riverpy._db.ownership import Owner
from riverpy._maintenance import territory
from riverpy._maintenance.scope import All, Except

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pytest


class Connection:
    """One that leads nowhere."""

    @asynccontextmanager
    async def use(self, _purpose: str, _bound: float) -> AsyncGenerator[None]:
        yield


def of_default(*, is_divided: bool) -> territory.Territory:
    """That of a leader of `default`, which hears of changes."""
    connection: Any = Connection()
    return territory.Territory(
        connection,
        None,
        territory.of_default,
        is_divided=lambda: is_divided,
        listens=True,
        timer=SystemTimer(),
    )


async def test_claimed_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is claimed between the server's answer and its arrival: the announcement is
    heard before the answer, which is from before it. The answer serves for that pass alone, though
    one that no domain has a queue is good for minutes."""
    answers = [[], [Owner("one", "mail", False)], []]

    async def owner_read(*_args: object, **_options: object) -> list[Owner]:
        answer = answers.pop(0)
        if len(answers) == 2:
            seen.forget()
        return answer

    monkeypatch.setattr(territory, "owner_read", owner_read)
    seen = of_default(is_divided=True)
    assert await seen.scope() == Except(frozenset())
    assert await seen.scope() == Except(frozenset({"one"}))
    seen.forget()
    assert await seen.scope() == Except(frozenset())
    assert await seen.scope() == Except(frozenset())
    assert answers == []


async def test_undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there can be no domain nothing is asked."""
    monkeypatch.setattr(territory, "owner_read", None)
    seen = of_default(is_divided=False)
    assert await seen.scope() == All()
