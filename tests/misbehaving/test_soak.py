"""Memory, descriptors and tasks over many jobs and reconnects: a short `scripts/soak`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from scripts.soak import growth, soak_jobs, soak_queues, soak_reconnects, working

if TYPE_CHECKING:
    from tests._database import Schema

UNSTEADY = {"memory_mib"}
"""Measurements that mean nothing in a process that has run other tests before."""


@pytest.fixture(autouse=True)
def no_log() -> None:
    """Log nothing, since thousands of jobs fail on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


@pytest.mark.timeout(240)
async def test_memory_over_many_jobs(schema: Schema) -> None:
    """Jobs that fail, time out, are cancelled by themselves and by others, snooze, record outputs
    and run in threads leave no objects, memory, tasks, threads or descriptors (ME-01).
    `scripts/soak` runs a million of them."""
    async with working(schema.url, schema.name) as soak_client:
        samples = [one async for one in soak_jobs(soak_client, 8_000, batch=2_000)]
    assert growth(samples[1], samples[-1]).keys() <= UNSTEADY
    assert soak_client.ends.keys() == {"completed", "cancelled", "discarded"}
    assert sum(soak_client.ends.values()) > 8_000


@pytest.mark.timeout(240)
async def test_memory_over_many_reconnects(schema: Schema) -> None:
    """Connections that the server terminates leave nothing behind while jobs run on new ones
    (ME-05). `scripts/soak` loses a thousand of them."""
    async with working(schema.url, schema.name) as soak_client:
        samples = [one async for one in soak_reconnects(soak_client, 60, jobs=20)]
    assert growth(samples[len(samples) // 2], samples[-1]).keys() <= UNSTEADY
    assert soak_client.reconnects >= 60


async def test_memory_over_many_queues(schema: Schema) -> None:
    """Queues that are added to a running client and removed leave no objects, tasks, descriptors or
    connections. `scripts/soak` does this in 500 rounds with 50 queues."""
    async with working(schema.url, schema.name) as soak_client:
        samples = [one async for one in soak_queues(soak_client, 16, queues=10)]
        assert list(soak_client.client.stats().queues) == ["default"]
    assert growth(samples[6], samples[-1]).keys() <= UNSTEADY
    assert samples[6].tasks >= samples[-1].tasks
