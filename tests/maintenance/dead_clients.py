"""Clients that write no heartbeat any more, and services that have observed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from riverpy._maintenance.client_cleaner import ClientCleaner
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._postgres.clients import client_list_heartbeats
from tests.leading.term_context import QuickTimer

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

BEAT = "UPDATE riverpy_client SET heartbeat_at = clock_timestamp() WHERE client_id = $1"
ObserverT = TypeVar("ObserverT", JobRescuer, ClientCleaner)


def in_contact() -> float:
    """The process has been in contact with the server for a long time."""
    return 1e6


async def register(schema: Schema, client_id: str, *, dead_after: str = "1s") -> None:
    """Insert a client, which writes no heartbeat after this one."""
    await schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after) VALUES ($1, '{}', '{}', true, false, '1', $2::text::interval)",
        client_id,
        dead_after,
    )


async def observed(held: HeldTerm, service: ObserverT, seconds: float) -> ObserverT:
    """Let the service read the heartbeats, so many seconds ago by its own clock."""
    observer = service._heartbeat_observer
    assert observer is not None
    async with held.schema.connected() as connection:
        observer.observe(*await client_list_heartbeats(connection, held.schema.name))
    assert isinstance(held.timer, QuickTimer)
    held.timer.skipped += seconds
    return service
