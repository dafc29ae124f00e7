"""DomainQueues: what a leader takes for its own between two looks at whose the queues are."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from riverpy._clock import SystemTimer
from riverpy._leading import domain_queues as territory
from riverpy._leading.queue_scope import AllQueues, AllQueuesExcept
from riverpy._postgres.connection import ConnectionOutage, DedicatedConnection, connect_maintenance
from riverpy._postgres.domains import OwnedQueue, owner_exists

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._clock import Timer
    from tests._database import Schema


class Connection:
    """One that leads nowhere."""

    @asynccontextmanager
    async def use(self, _purpose: str, _bound: float) -> AsyncGenerator[None]:
        yield


class StoppedTimer(SystemTimer):
    """Time passes as the test says."""

    skipped = 0

    def boottime(self) -> float:
        return float(self.skipped)


def of_default(
    *, is_divided: bool, listens: bool = True, timer: Timer | None = None
) -> territory.DomainQueues:
    """That of a leader of `default`, which hears of changes if it listens."""
    connection: Any = Connection()
    return territory.DomainQueues(
        connection,
        None,
        territory.of_default,
        is_divided=lambda: is_divided,
        listens=listens,
        timer=timer or SystemTimer(),
        dead_after=timedelta(minutes=1),
        contact=lambda: 1e6,
    )


async def test_claimed_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is claimed between the server's answer and its arrival: the announcement is
    heard before the answer, which is from before it. The answer serves for that pass alone, though
    one that no domain has a queue is good for minutes."""
    answers = [[], [OwnedQueue("one", "mail", b"", False)], []]

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        answer = answers.pop(0)
        if len(answers) == 2:
            seen.forget()
        return answer

    monkeypatch.setattr(territory, "owner_read", owner_read)
    seen = of_default(is_divided=True)
    assert await seen.scope() == AllQueuesExcept(frozenset())
    assert await seen.scope() == AllQueuesExcept(frozenset({"one"}))
    seen.forget()
    assert await seen.scope() == AllQueuesExcept(frozenset())
    assert await seen.scope() == AllQueuesExcept(frozenset())
    assert answers == []


async def test_table_that_is_made_while_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that began before there was the table of owners, and hears of nothing: it looks for
    the table each five minutes, and reads it once it is there. One that only polls looks as
    seldom while it is not."""
    there = [False, True]
    asked: list[int] = []

    async def owner_exists(*_args: object) -> bool:
        asked.append(timer.skipped)
        return there.pop(0)

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        return [OwnedQueue("one", "mail", b"", False)]

    for listens in (True, False):
        timer, there[:] = StoppedTimer(), [False, True]
        asked.clear()
        monkeypatch.setattr(territory, "owner_exists", owner_exists)
        monkeypatch.setattr(territory, "owner_read", owner_read)
        seen = of_default(is_divided=False, listens=listens, timer=timer)
        assert await seen.scope() == AllQueues()
        timer.skipped += 299
        assert await seen.scope() == AllQueues()
        timer.skipped += 1
        for _ in range(2):
            assert await seen.scope() == AllQueuesExcept(frozenset({"one"}))
            timer.skipped += 1
        assert asked == [0, 300]


async def test_role_without_the_grant(schema: Schema) -> None:
    """After a migration whose grants are not made yet the leader of `default` keeps all queues, as
    before it, and says once which grant is missing. From the first domain on, whose queues it
    cannot know, it keeps none."""
    role = f"riverpy_test_{secrets.token_hex(4)}"
    await schema.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema.name} TO {role}")

    async def connect() -> Any:
        url = f"{schema.url}&role={role}" if "?" in schema.url else f"{schema.url}?role={role}"
        return await connect_maintenance(url, "a leader", pooled=False)

    connection = DedicatedConnection("maintenance", connect, ConnectionOutage())
    seen = territory.DomainQueues(
        connection,
        schema.name,
        territory.of_default,
        is_divided=lambda: True,
        listens=False,
        timer=SystemTimer(),
        dead_after=timedelta(minutes=1),
        contact=lambda: 1e6,
    )
    await schema.execute("TRUNCATE riverpy_queue_owner")  # what another test has left of it
    try:
        with capture_logs() as log:
            for _ in range(2):
                seen.forget()
                assert await seen.scope() == AllQueuesExcept(frozenset())
        (entry,) = log
        assert entry["log_level"] == "warning"
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON riverpy_queue_owner" in entry["advice"]
        await schema.execute(
            "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by) VALUES ('q', 'mail', 'a')"
        )
        seen.forget()
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await seen.scope()
        await schema.execute(f"GRANT SELECT ON riverpy_queue_owner TO {role}")
        assert await seen.scope() == AllQueuesExcept(frozenset({"q"}))
    finally:
        await connection.close()
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_table_in_a_database(schema: Schema) -> None:
    """The table is looked for where River's tables are, and found where it is."""
    async with schema.connected() as connection:
        assert await owner_exists(connection, schema.name)
        await schema.execute("DROP TABLE riverpy_queue_owner")
        assert not await owner_exists(connection, schema.name)


async def test_orphans_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the server's clock makes no domain silent: one whose heartbeat changes is alive,
    however old that is by the server's clock. A domain is silent after ten minutes without a
    change, or after `dead_after` if the server's clock says ten minutes too."""
    rows = [OwnedQueue(queue, "mail", b"1", queue != "new") for queue in ("new", "old", "beating")]

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        beat = str(timer.skipped).encode()
        return [row if row.queue != "beating" else row._replace(last_seen=beat) for row in rows]

    async def kept() -> set[str]:
        return {row.queue for row in rows if row.queue in await seen.scope()}

    monkeypatch.setattr(territory, "owner_read", owner_read)
    timer = StoppedTimer()
    seen = of_default(is_divided=True, timer=timer)
    assert await kept() == set()
    timer.skipped += 59
    assert await kept() == set()
    timer.skipped += 1
    assert await kept() == {"old"}
    timer.skipped += 540
    assert await kept() == {"new", "old"}
