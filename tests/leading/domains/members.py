"""Clients of leader domains, and what tests wait for."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from riverpy import QueueConfig
from riverpy._lifecycle import unwrap_single_error
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from riverpy import Client
    from riverpy.events import LeadershipChange
    from riverpy.periodic import PeriodicJob
    from tests.work.rig import Rig

LONG = {"elect_interval": timedelta(minutes=1), "leader_ttl": timedelta(minutes=5)}
"""In no test does a lease of these expire, or a follower make a second attempt."""
QUICK = {"elect_interval": timedelta(seconds=0.5), "leader_ttl": timedelta(seconds=30)}
"""Renews and tries soon. Survives a machine that stalls for seconds."""


class Member:
    """A running client and its leadership changes."""

    def __init__(self, client: Client, changes: Any) -> None:
        self.client, self.changes = client, changes

    async def until_leader(self, is_leader: bool = True) -> LeadershipChange:
        """Wait until the client becomes leader, or stops being leader."""
        with anyio.fail_after(PATIENCE, reason="the transition did not come"):
            while (change := await anext(self.changes)).is_leader is not is_leader:
                pass
        return change


@asynccontextmanager
async def member(
    rig: Rig,
    client_id: str,
    domain: str | None,
    *queues: str,
    periodic_jobs: Sequence[PeriodicJob] = (),
    **settings: Any,
) -> AsyncGenerator[Member]:
    """Run a client of a domain that works these queues. It polls rarely."""
    settings = {**QUICK, "id": client_id, "leader_domain": domain} | settings
    names = queues or (domain or "default",)
    client = rig.client(queues={name: QueueConfig(max_workers=2) for name in names}, **settings)
    for job in periodic_jobs:
        client.periodic_jobs.add(job)
    try:
        async with client.leadership() as changes, rig.running(client):
            yield Member(client, changes)
    except BaseExceptionGroup as group:
        raise unwrap_single_error(group) from None


async def owners(rig: Rig) -> dict[str, str]:
    """Return the owner of each queue."""
    rows = await rig.schema.fetch("SELECT queue, domain FROM riverpy_queue_owner ORDER BY queue")
    return {row["queue"]: row["domain"] for row in rows}


async def holders(rig: Rig) -> dict[str, str]:
    """Return the holder of each lease."""
    rows = await rig.schema.fetch(
        "SELECT name, holder FROM riverpy_lease WHERE expires_at >= now() ORDER BY name"
    )
    return {row["name"]: row["holder"] for row in rows}
