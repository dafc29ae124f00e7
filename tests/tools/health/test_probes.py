"""The results of /livez and /readyz for a worker's stats."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import msgspec
import pytest

from riverpy import ClientStats, Histogram, QueueStats
from riverpy._lifecycle import SERVICE_PROGRESS_DELAY_MAX, ServiceGroup, StopScope
from riverpy._tools.health.probes import check_liveness, check_queue_lags, check_readiness

NONE = Histogram((), (0,), 0.0)
QUEUE = QueueStats(
    slots=2,
    running=0,
    paused=False,
    poll_interval=1.0,
    claim_age=0.5,
    claims=NONE,
    batches=NONE,
    claim_failures=0,
    waits=NONE,
)
WORKING = ClientStats(
    client_id="c", state="working", uptime=1.0, listener="proven", queues={"q": QUEUE}
)


def with_queue(**changes: Any) -> ClientStats:
    """Return the stats of a worker with these values of its queue."""
    return msgspec.structs.replace(WORKING, queues={"q": msgspec.structs.replace(QUEUE, **changes)})


def test_ready() -> None:
    """A worker that claims is ready and alive (OP-02)."""
    assert check_readiness(WORKING).ok
    assert check_liveness(WORKING).ok


@pytest.mark.parametrize(
    "changes",
    [
        {"paused": True, "claim_age": 3600.0},
        {"running": 2, "claim_age": 3600.0},
        {"claim_age": 3.5},
        {"poll_interval": 60.0, "claim_age": 170.0},
    ],
)
def test_ready_without_a_claim(changes: dict[str, Any]) -> None:
    """A queue that is paused, has no free slot or is polled rarely needs no recent claim
    (OP-02)."""
    assert check_readiness(with_queue(**changes)).ok


@pytest.mark.parametrize(
    ("stats", "check"),
    [
        (None, "state"),
        (ClientStats(client_id="c", state="starting", uptime=1.0), "state"),
        (msgspec.structs.replace(WORKING, state="stopping"), "state"),
        (msgspec.structs.replace(WORKING, state="stopped"), "state"),
        (with_queue(claim_age=4.5), "queue q"),
        (with_queue(claim_age=None), "queue q"),
    ],
)
def test_not_ready(stats: ClientStats | None, check: str) -> None:
    """A worker that does not claim is not ready and says why, but it is alive (OP-02)."""
    result = check_readiness(stats)
    assert [name for name, one in result.checks.items() if not one.ok] == [check]
    assert result.summary.startswith(f"{check}: ")
    assert check_liveness(stats).ok


@pytest.mark.parametrize("listener", ["off", "unproven"])
def test_polling_is_ready(listener: str) -> None:
    """A worker that finds its jobs by polling is ready, by configuration or because no
    notification arrives. The reason says which."""
    result = check_readiness(msgspec.structs.replace(WORKING, listener=listener))
    assert result.ok
    assert "polling" in result.checks["listener"].reason


@pytest.mark.parametrize(
    ("lags", "reason"),
    [
        ({"q": timedelta(minutes=2)}, "q 2m"),
        ({"q": timedelta(minutes=1)}, None),
        ({}, None),
        (None, "is not known"),
    ],
)
def test_lag(lags: dict[str, timedelta] | None, reason: str | None) -> None:
    """A worker is not ready while a job waits for longer than `max_lag`, or if that is not
    known. Paused queues do not count."""
    result = check_readiness(WORKING, check_queue_lags(timedelta(minutes=1), lags, WORKING))
    assert result.ok == (reason is None)
    assert reason is None or reason in result.summary
    paused = with_queue(paused=True, claim_age=3600.0)
    assert check_queue_lags(timedelta(minutes=1), lags, paused).ok == (lags is not None)


def test_stuck_service() -> None:
    """A worker with a stuck service is not alive (OP-02)."""
    result = check_liveness(msgspec.structs.replace(WORKING, stuck=("reconciler",)))
    assert not result.ok
    assert "reconciler" in result.summary


class Looping:
    """A service that says when it turns."""

    name = "looping"

    def __init__(self, within: float | None) -> None:
        self.within = within

    async def run(self, scope: StopScope, *, task_status: Any) -> None:
        if self.within is not None:
            scope.set_progress_deadline(within=self.within)
        task_status.started()
        await anyio.sleep_forever()


async def test_services_that_do_not_turn() -> None:
    """A group knows which of its services have not come back in the time they gave; a time in which
    nothing could run does not count, and one that has ended is not missed (OP-02)."""
    async with ServiceGroup() as group:
        await group.start(Looping(None))
        await group.start(Looping(3600.0))
        assert group.stuck_service_names() == []
        await group.start(Looping(-SERVICE_PROGRESS_DELAY_MAX - 5))
        assert group.stuck_service_names() == ["looping"]
        group.extend_progress_deadlines(10)
        assert group.stuck_service_names() == []
        await group.start(Looping(-SERVICE_PROGRESS_DELAY_MAX - 1))
    assert group.stuck_service_names() == []
