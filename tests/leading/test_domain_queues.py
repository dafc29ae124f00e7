"""DomainQueueReader: which queues a leader maintains, and how often it reads their owners."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from riverpy._clock import Timer
from riverpy._leading import domain_queues
from riverpy._leading.queue_scope import ALL_QUEUES, all_queues_except
from riverpy._postgres.connection import (
    ConnectionOutageTracker,
    DedicatedConnection,
    connect_for_maintenance,
)
from riverpy._postgres.domains import OwnedQueue, owner_table_exists

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema


class Connection:
    """A connection that sends nothing."""

    @asynccontextmanager
    async def acquire(self, _purpose: str, _timeout: float) -> AsyncGenerator[None]:
        yield


class StoppedTimer(Timer):
    """Time that a test advances."""

    skipped = 0

    def seconds_since_boot(self) -> float:
        return float(self.skipped)


def default_queues(
    *, has_table: bool, has_notifications: bool = True, timer: Timer | None = None
) -> domain_queues.DomainQueueReader:
    """Create the DomainQueueReader of a leader of `default`."""
    connection: Any = Connection()
    queues = domain_queues.DomainQueueReader(
        connection,
        None,
        "default",
        has_notifications=has_notifications,
        timer=timer or Timer(),
        dead_after=timedelta(minutes=1),
        contact_duration=lambda: 1e6,
    )
    queues._has_owner_table = has_table
    return queues


async def test_claim_during_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a queue is claimed while the owners are read, the result is used for one pass only,
    although a result without owners is normally used for minutes."""
    answers = [[], [OwnedQueue("one", "mail", b"", False)], []]

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        answer = answers.pop(0)
        if len(answers) == 2:
            queues.forget_queue_owners()
        return answer

    monkeypatch.setattr(domain_queues, "owner_list_queues", owner_read)
    queues = default_queues(has_table=True)
    assert await queues.read_queue_scope() == ALL_QUEUES
    assert await queues.read_queue_scope() == all_queues_except({"one"})
    queues.forget_queue_owners()
    assert await queues.read_queue_scope() == ALL_QUEUES
    assert await queues.read_queue_scope() == ALL_QUEUES
    assert answers == []


async def test_table_created_during_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the table of owners does not exist at the start of a term, the leader checks every five
    minutes whether it exists, and then reads it. This is the same for clients that only poll."""
    exists = [False, True]
    checks: list[int] = []

    async def owner_exists(*_args: object) -> bool:
        checks.append(timer.skipped)
        return exists.pop(0)

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        return [OwnedQueue("one", "mail", b"", False)]

    for listens in (True, False):
        timer, exists[:] = StoppedTimer(), [False, True]
        checks.clear()
        monkeypatch.setattr(domain_queues, "owner_table_exists", owner_exists)
        monkeypatch.setattr(domain_queues, "owner_list_queues", owner_read)
        queues = default_queues(has_table=False, has_notifications=listens, timer=timer)
        assert await queues.read_queue_scope() == ALL_QUEUES
        timer.skipped += 299
        assert await queues.read_queue_scope() == ALL_QUEUES
        timer.skipped += 1
        for _ in range(2):
            assert await queues.read_queue_scope() == all_queues_except({"one"})
            timer.skipped += 1
        assert checks == [0, 300]


async def test_role_without_the_grant(schema: Schema) -> None:
    """After a migration without its grants, the leader of `default` maintains all queues and logs
    once which grant is missing. As soon as a domain owns a queue, it maintains no queue."""
    role = f"riverpy_test_{secrets.token_hex(4)}"
    await schema.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema.name} TO {role}")

    async def connect() -> Any:
        url = f"{schema.url}&role={role}" if "?" in schema.url else f"{schema.url}?role={role}"
        return await connect_for_maintenance(url, "a leader", through_pooler=False)

    connection = DedicatedConnection("maintenance", connect, ConnectionOutageTracker())
    queues = domain_queues.DomainQueueReader(
        connection,
        schema.name,
        "default",
        has_notifications=False,
        timer=Timer(),
        dead_after=timedelta(minutes=1),
        contact_duration=lambda: 1e6,
    )
    await schema.execute("TRUNCATE riverpy_queue_owner")  # what another test has left of it
    try:
        with capture_logs() as log:
            for _ in range(2):
                queues.forget_queue_owners()
                assert await queues.read_queue_scope() == ALL_QUEUES
        (entry,) = log
        assert entry["log_level"] == "warning"
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON riverpy_queue_owner" in entry["advice"]
        await schema.execute(
            "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by) VALUES ('q', 'mail', 'a')"
        )
        queues.forget_queue_owners()
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await queues.read_queue_scope()
        await schema.execute(f"GRANT SELECT ON riverpy_queue_owner TO {role}")
        assert await queues.read_queue_scope() == all_queues_except({"q"})
    finally:
        await connection.close()
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_table_in_a_database(schema: Schema) -> None:
    """`owner_table_exists` finds the table in the schema of River's tables."""
    async with schema.connected() as connection:
        assert await owner_table_exists(connection, schema.name)
        await schema.execute("DROP TABLE riverpy_queue_owner")
        assert not await owner_table_exists(connection, schema.name)


async def test_orphans_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the server's clock orphans no queue whose domain's heartbeat changes. A queue is
    orphaned after ten minutes without a change, or after `dead_after` if the heartbeat is ten
    minutes old by the server's clock too."""
    rows = [OwnedQueue(queue, "mail", b"1", queue != "new") for queue in ("new", "old", "beating")]

    async def owner_read(*_args: object, **_options: object) -> list[OwnedQueue]:
        beat = str(timer.skipped).encode()
        return [
            row if row.queue != "beating" else row._replace(last_heartbeat=beat) for row in rows
        ]

    async def maintained() -> set[str]:
        return {row.queue for row in rows if row.queue in await queues.read_queue_scope()}

    monkeypatch.setattr(domain_queues, "owner_list_queues", owner_read)
    timer = StoppedTimer()
    queues = default_queues(has_table=True, timer=timer)
    assert await maintained() == set()
    timer.skipped += 59
    assert await maintained() == set()
    timer.skipped += 1
    assert await maintained() == {"old"}
    timer.skipped += 540
    assert await maintained() == {"new", "old"}
