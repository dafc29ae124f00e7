"""The lead passes from one language to the other and back, whatever ends a term."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from riverpy._db.leaders import leader_request_resign
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.cli.worker_process import running_worker
from tests.interop.river_go import RiverGo

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from tests.cli.worker_process import WorkerProcess
    from tests.interop.river_go import GoProcess

HISTORY = Path(__file__).with_name("leader_history.sql").read_text("utf-8")
PATIENCE = 60.0
"""Seconds after which a term that does not come fails the test. One of Go's that was killed lasts
for 15 s."""
JOBS = """
from datetime import timedelta
from typing import ClassVar
import msgspec, riverpy

workers = riverpy.Workers()


class Nothing(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "nothing"


@workers.job
async def nothing(job: riverpy.Job[Nothing]) -> None:
    pass


client = riverpy.Client(
    workers=workers,
    queues={"python": riverpy.QueueConfig(max_workers=2)},
    config=riverpy.Config(
        elect_interval=timedelta(milliseconds=500),
        leader_ttl=timedelta(seconds=4),
    ),
)
"""


class Fleet:
    """Workers of both languages, and what the database has recorded of their leading."""

    def __init__(
        self,
        stack: AsyncExitStack,
        connection: asyncpg.Connection[Any],
        binary: Path,
        url: str,
        directory: Path,
    ) -> None:
        self._stack, self._connection, self._directory = stack, connection, directory
        self._url = url
        separator = "&" if "?" in url else "?"
        self._go = RiverGo(binary, f"{url}{separator}application_name=go", "")

    async def go(self, name: str) -> GoProcess:
        """A further worker in Go."""
        flags = ("--queues", "go:2", "--client-id", name, "--no-stagger")
        return await self._stack.enter_async_context(self._go.worker(*flags))

    async def python(self, name: str) -> WorkerProcess:
        """A further worker in Python; it has tried to lead."""
        directory = self._directory / name
        directory.mkdir()
        worker = await self._stack.enter_async_context(
            running_worker(
                directory, "jobs:client", "--database-url", self._url, "--name", name, code=JOBS
            )
        )
        await worker.until_logged("worker started")
        return worker

    async def request_resign(self) -> None:
        """Ask whoever leads, by Go."""
        await self._go.run("resign")

    async def request_resign_by_python(self) -> None:
        """The same by Python, which takes less time."""
        await leader_request_resign(self._connection, None)

    async def until_led_by(self, language: str, *, ask: Callable[[], Any] | None = None) -> None:
        """Wait until one of the language leads and its maintenance has done its work; ask again
        and again for it while another leads, if that may win anew."""
        with anyio.fail_after(PATIENCE, reason=f"nobody of {language} leads and does its work"):
            while await self._acts_of_leader(language) < {"scheduled", "cleaned"}:
                if ask is not None and await self._language_of_leader() not in {language, None}:
                    await ask()
                await asyncio.sleep(0.02)

    async def _language_of_leader(self) -> str | None:
        leader_id = await self._connection.fetchval("SELECT leader_id FROM river_leader")
        return leader_id and language_of(leader_id)

    async def _acts_of_leader(self, language: str) -> set[str]:
        """What maintenance did in the present term, if it is one of the language's."""
        rows = await self._connection.fetch(
            "SELECT act, leader_id FROM maintenance_history NATURAL JOIN"
            " (SELECT leader_id, elected_at FROM river_leader) AS leader"
        )
        return {row["act"] for row in rows if language_of(row["leader_id"]) == language}

    async def terms(self) -> list[str]:
        """Check that no two terms overlap; returns who held them."""
        return holders(await self._connection.fetch("SELECT * FROM leader_history ORDER BY number"))

    async def maintainers(self) -> set[tuple[str, str, str]]:
        """Which language's connections did what in terms of which language."""
        rows = await self._connection.fetch("SELECT * FROM maintenance_history")
        return {
            (language_of(row["application"]), row["act"], language_of(row["leader_id"]))
            for row in rows
        }


def language_of(name: str) -> str:
    """The language of a client, or of a connection."""
    return "go" if name.startswith("go") else "python"


def holders(rows: list[asyncpg.Record]) -> list[str]:
    """Who held the row, term after term.

    A term begins when the row is free: its holder has given it up, or it has expired by the
    server's clock. It is renewed only while it is held.
    """
    found: list[str] = []
    held: asyncpg.Record | None = None
    for row in rows:
        is_same = held is not None and held["elected_at"] == row["elected_at"]
        has_expired = held is not None and held["expires_at"] < row["at"]
        match row["act"]:
            case "delete":
                assert is_same, row
                is_own = language_of(row["application"]) == language_of(row["leader_id"])
                assert has_expired or is_own, row
                held = None
                continue
            case "update" if is_same:
                assert held is not None
                assert held["leader_id"] == row["leader_id"], row
                assert not has_expired, row
            case _:
                assert held is None or has_expired, row
                found.append(row["leader_id"].partition(":")[0])
        held = row
    return found


def in_turn(expected: list[str], found: list[str]) -> bool:
    """Whether these came one after the other, whatever came between."""
    rest = iter(found)
    return all(name in rest for name in expected)


async def test_handovers(go_binary: Path, fresh_database_url: str, tmp_path: Path) -> None:
    """The lead passes from Go to Python and back by a request to resign, by SIGTERM and by SIGKILL.
    Under each leader due jobs become available and old ones are deleted, by its own language's
    connections too; and no term ever begins before the one before has ended or expired."""
    url = fresh_database_url
    await migrate_all(url)
    async with connected(url) as connection, AsyncExitStack() as stack:
        await connection.execute(HISTORY)
        fleet = Fleet(stack, connection, go_binary, url, tmp_path)

        go_1 = await fleet.go("go-1")
        await fleet.until_led_by("go")
        python_1 = await fleet.python("python-1")
        # A leader in Go that is asked to resign bids again at once, and mostly wins.
        await fleet.until_led_by("python", ask=fleet.request_resign_by_python)
        await fleet.until_led_by("go", ask=fleet.request_resign)

        go_1.terminate()
        await fleet.until_led_by("python")
        assert await go_1.wait() == 0
        go_2 = await fleet.go("go-2")
        python_1.send(signal.SIGTERM)
        await fleet.until_led_by("go")
        assert await python_1.exit_code() == 0

        python_2 = await fleet.python("python-2")
        go_2.kill()
        await fleet.until_led_by("python")
        await fleet.go("go-3")
        python_2.send(signal.SIGKILL)
        await fleet.until_led_by("go")

        expected = ["go-1", "python-1", "go-1", "python-1", "go-2", "python-2", "go-3"]
        assert in_turn(expected, await fleet.terms())
        acts = await fleet.maintainers()
        for language in ("go", "python"):
            assert acts >= {(language, act, language) for act in ("scheduled", "cleaned")}
