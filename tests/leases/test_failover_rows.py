"""The rows of `scripts/failover leases` that can use a shared server, once each: the holder is
stopped, killed, frozen, blocked or disconnected."""

from __future__ import annotations

import pytest

from riverpy.migrate import migrate_all
from scripts.failover_leases import ROWS, SHORT, Result, run_row
from tests.kit.fleet import Server

NAMES = ("graceful", "killed", "frozen", "blocked", "requests_lost", "answers_lost")


class Database(Server):
    """A database of the server that tests share."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> None:
        async with self.connected() as connection:
            await migrate_all(connection)

    async def remove(self) -> None:
        """The fixture drops it."""


@pytest.mark.parametrize("name", NAMES)
async def test_row(name: str, fresh_database_url: str) -> None:
    """Another process acquires the lease under a higher epoch, also if the holder's event loop is
    blocked. No process treats an old term as held after the next has begun, and no fenced write of
    a term follows one of a later term (LM-14)."""

    class Row(ROWS[name]):
        """With processes of this test's on a shared server."""

        @staticmethod
        def make_server(_directory: object) -> Server:
            return Database(fresh_database_url)

    result = await run_row(Row, SHORT, 1)
    assert not result.is_bad, result
    assert len(result.gaps) == 1
    assert result.refused >= (not Row.ends_its_process)


@pytest.mark.parametrize(
    "change",
    [{"stale": 1}, {"gaps": [0.5, -0.001]}, {"is_rising": False}, {"error": "nobody took over"}],
    ids=lambda change: next(iter(change)),
)
def test_rows_can_be_bad(change: dict[str, object]) -> None:
    """Each violation is found."""
    good = {"row": "killed", "what": "SIGKILL", "ttl": 1.5, "gaps": [0.5]}
    assert not Result(**good).is_bad
    assert Result(**{**good, **change}).is_bad
