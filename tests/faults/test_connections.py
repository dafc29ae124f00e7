"""Connections that are lost or frozen under load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from riverpy._insert import shared_statement
from riverpy._log_events import (
    JOB_CLAIM_FAILED,
    JOB_COUNTS_NOT_STORED,
    LEADERSHIP_ENDED,
    LEASE_RENEWAL_FAILED,
    QUEUE_PAUSED,
    QUEUE_RESUMED,
)
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.leaders import leader_request_resign
from tests.kit.load import HELD, LOST, PUT_BACK, RESTORED, until
from tests.kit.server_faults import INSERTS_NAME, find_backends, frozen_backends, kill_backends

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
"""Kinds of connections, and the names of their backends."""


async def kill_all(stage: Stage, count: int, name: str, *, user: str | None = None) -> None:
    """Kill the connections of this name once there are this many. A connection that was killed
    before may still be open for a while."""

    async def is_complete() -> bool:
        return len(await find_backends(stage.url, name, user=user)) == count

    await until(is_complete)
    assert await kill_backends(stage.url, name, user=user) == count


@pytest.mark.parametrize("name", BACKENDS)
async def test_killed_backends(stage: Stage, name: str) -> None:
    """Connections of each kind are killed 20 times. Each is opened again, its loss and its recovery
    are one log line each, and no job is harmed. A job or a result that was alone in its statement
    at two of the kills may be delayed (NR-02, NR-11, PB-07)."""
    expected = {"results": {HELD}, "claims": {JOB_CLAIM_FAILED}}.get(name, set[str]())
    members = [stage.leader] if name == "maintenance" else stage.members
    rounds = KILLS // len(members)
    async with stage.load(expected=expected):
        for number in range(1, rounds + 1):
            for member in members:
                await kill_all(stage, 1, f"riverpy {BACKENDS[name]}", user=member.worker.name)
            for member in members:
                await until(lambda member=member, number=number: member.count(RESTORED) == number)
    for member in members:
        losses = [line for line in member.warnings if line["event"] not in expected]
        assert [line["event"] for line in losses] == [LOST] * rounds
        assert {line["connection"] for line in losses} == {name}


async def test_topics_after_losses(stage: Stage) -> None:
    """After a loss each topic is listened to again, and each notification acts once: a pause, a
    cancel, a request to resign. The load covers inserts, since no client polls here (NR-02,
    NR-11)."""
    for member in stage.members:
        member.forget()
    await kill_all(stage, len(stage.members), "riverpy listener")
    for member in stage.members:
        await until(lambda member=member: member.count(RESTORED) == 1)
        member.forget()
    async with stage.load() as load:
        (job_id,) = await load.start_held()
        await load.client.queue_pause("default")
        for member in stage.members:
            await until(lambda member=member: member.count(QUEUE_PAUSED) == 1)
        await load.client.queue_resume("default")
        await load.cancel(job_id)
        leader = stage.leader
        async with stage.fleet.server.connected() as connection:
            await leader_request_resign(connection, None)
        await until(lambda: leader.count(LEADERSHIP_ENDED) == 1)
    for member in stage.members:
        assert member.count(QUEUE_PAUSED) == member.count(QUEUE_RESUMED) == 1
        assert member.warnings == []


async def test_killed_insert_connection(stage: Stage) -> None:
    """The connection of a client for inserts is killed 20 times. At most one insert fails for each
    kill (PB-07)."""
    async with stage.load() as load:
        for _ in range(KILLS):
            await kill_backends(stage.url, INSERTS_NAME)
            await load.until_completed()
        assert len(load.failures) <= KILLS
        assert all(isinstance(error, DATABASE_ERRORS) for error in load.failures)
    assert [member.warnings for member in stage.members] == [[], []]


async def test_frozen_claims_and_results(stage: Stage) -> None:
    """One worker's claims and another's results freeze without an error. Each connection is
    replaced in time, with one log line, while the other worker continues. The frozen backends do
    nothing twice when they continue (NR-17, LD-14)."""
    claiming, storing = stage.members
    async with stage.load() as load:
        pids = [
            *await find_backends(stage.url, "riverpy claims", user=claiming.worker.name),
            *await find_backends(stage.url, "riverpy results", user=storing.worker.name),
        ]
        async with frozen_backends(stage.url, pids):
            await load.until_completed()
            for member in stage.members:
                await until(lambda member=member: member.count(RESTORED) == 1)
            await load.until_completed()
    for member, name in ((claiming, "claims"), (storing, "results")):
        assert [line["connection"] for line in member.log_lines if line["event"] == LOST] == [name]
        assert {line["event"] for line in member.warnings} <= {LOST, PUT_BACK}


async def test_frozen_rarely_used_connections(stage: Stage) -> None:
    """The listener and the reserved connection of each worker and the leader's maintenance
    connection freeze. Jobs continue, and each connection that does not answer in time is replaced,
    with one log line. Over the reserved connection, a lease may be renewed too late, and counts of
    jobs may wait for the next minute."""
    late = {LEASE_RENEWAL_FAILED, JOB_COUNTS_NOT_STORED}
    async with stage.load(expected=late) as load:
        pids = [
            pid
            for name in ("listener", "reserved", "maintenance")
            for pid in await find_backends(stage.url, f"riverpy {name}")
        ]
        async with frozen_backends(stage.url, pids):
            await load.until_completed()
            for member in stage.members:
                await until(lambda member=member: member.count(RESTORED) == member.count(LOST) > 0)
    for member in stage.members:
        assert {line["event"] for line in member.warnings} - late == {LOST}
        lost = [line["connection"] for line in member.warnings if line["event"] == LOST]
        assert "reserved" in lost  # the others have longer timeouts and may be thawed by then
        assert {*lost} <= {"reserved", "notifier", "maintenance"}
        assert len({*lost}) == len(lost)


async def test_frozen_insert_connection(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a client for inserts freezes: an insert fails at its timeout, and the next
    one uses a new connection."""
    monkeypatch.setattr(shared_statement, "POOL_STATEMENT_TIMEOUT", 2.0)
    async with stage.load() as load:
        async with frozen_backends(stage.url, await find_backends(stage.url, INSERTS_NAME)):
            await until(lambda: len(load.failures) > 0)
            await load.until_completed()
        assert all(isinstance(error, TimeoutError) for error in load.failures)
    assert [member.warnings for member in stage.members] == [[], []]
