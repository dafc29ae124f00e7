"""What followers of /events are told, and what not."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import structlog

from riverpy import Client, EventKind
from riverpy._tools.health import event_stream
from riverpy._tools.health.address import Address
from riverpy._tools.health.event_stream import stream_events
from riverpy._tools.health.http import HttpError, Request
from riverpy._tools.health.worker_health import STREAMS_MAX, WorkerHealth


async def told(lines: AsyncGenerator[bytes, None], count: int) -> list[dict[str, Any]]:
    """The next lines that say something."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = await anext(lines)
        if line.strip():
            found.append(json.loads(line))
    return found


async def test_slow_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower who is too slow has a bounded number of events, and is told how many were
    dropped (ME-04)."""
    monkeypatch.setattr(event_stream, "BUFFERED_EVENTS_MAX", 2)
    client = Client()
    lines = stream_events(client, {})
    assert await anext(lines) == b"\n"
    with structlog.testing.capture_logs():
        for n in range(5):
            client._subscriptions.publish_queue(EventKind.QUEUE_PAUSED, f"q{n}")
    dropped, *events = await told(lines, 3)
    assert dropped == {"event": "dropped", "dropped": 3}
    assert [event["queue"] for event in events] == ["q0", "q1"]
    client._subscriptions.close()
    assert [line async for line in lines] == []


async def test_followers_who_come_at_once() -> None:
    """Of many who ask before the first is answered no more than the limit follow; who leaves makes
    room for another, also where he has read nothing."""
    health = WorkerHealth(Address("127.0.0.1", 0))
    health.client = Client()
    asked = Request("GET", "/events", {}, "localhost")
    answers = [await health._events(asked) for _ in range(STREAMS_MAX)]
    for answer in answers:
        with pytest.raises(HttpError, match="readers already"):
            await health._events(asked)
        assert isinstance(answer.body, AsyncGenerator)
        await answer.body.aclose()
        await health._events(asked)


async def test_filters() -> None:
    """A follower is told of what matches one value of each filter; events of a queue have neither
    kind nor state."""
    client = Client()
    wanted = stream_events(client, {"queue": ["a", "b"], "event": ["queue_paused"]})
    of_jobs = stream_events(client, {"state": ["completed"]})
    for lines in (wanted, of_jobs):
        await anext(lines)
    for queue in ("a", "c", "b"):
        for kind in (EventKind.QUEUE_PAUSED, EventKind.QUEUE_RESUMED):
            client._subscriptions.publish_queue(kind, queue)
    client._subscriptions.close()
    assert [json.loads(line)["queue"] async for line in wanted] == ["a", "b"]
    assert [line async for line in of_jobs] == []


async def test_follower_of_what_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower who wants none of the many events hears that the worker is there all the same."""
    monkeypatch.setattr(event_stream, "KEEPALIVE_INTERVAL", 0.0)
    client = Client()
    lines = stream_events(client, {"state": ["completed"]})
    await anext(lines)
    for _ in range(3):
        client._subscriptions.publish_queue(EventKind.QUEUE_PAUSED, "a")
    client._subscriptions.close()
    assert [line async for line in lines] == [b"\n"] * 3


@pytest.mark.parametrize("params", [{"kinds": ["a"]}, {"event": ["job_lost"]}])
def test_wrong_parameters(params: dict[str, list[str]]) -> None:
    """A name that is not known is refused, with those that are."""
    with pytest.raises(ValueError, match=r"the parameters are event|kinds of events are"):
        stream_events(Client(), params)
