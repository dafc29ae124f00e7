"""The events that readers of /events receive."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from click.testing import CliRunner

from riverpy import Client, Event, EventKind, LeaseChange, LeaseEventKind, LeaseUse
from riverpy._tools.health import event_stream
from riverpy._tools.health.event_stream import stream_events
from riverpy._tools.health.http import Address, HttpError, Request
from riverpy._tools.health.worker_health import EVENT_STREAMS_MAX, HealthRequestHandler
from riverpy.cli.events import events


async def next_lines(lines: AsyncGenerator[bytes, None], count: int) -> list[dict[str, Any]]:
    """Return the next lines that are not empty."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        line = await anext(lines)
        if line.strip():
            found.append(json.loads(line))
    return found


async def test_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader has a limited buffer of events and receives the number of dropped ones
    (ME-04)."""
    monkeypatch.setattr(event_stream, "BUFFERED_EVENTS_MAX", 2)
    client = Client()
    lines = stream_events(client, {})
    assert await anext(lines) == b"\n"
    with structlog.testing.capture_logs():
        for n in range(5):
            client._subscription_manager.publish_queue_event(EventKind.QUEUE_PAUSED, f"q{n}")
    dropped, *events = await next_lines(lines, 3)
    assert (dropped["event"], dropped["dropped"]) == ("dropped", 3)
    assert [event["queue"] for event in events] == ["q0", "q1"]
    client._subscription_manager.close()
    assert [line async for line in lines] == []


async def test_limit_of_readers() -> None:
    """At most the limit of readers is accepted, also when their requests arrive together. A
    reader that leaves makes room, also before it has read a line."""
    health = HealthRequestHandler(Address("127.0.0.1", 0))
    health.client = Client()
    asked = Request("GET", "/events", {}, "localhost")
    answers = [await health._answer_events(asked) for _ in range(EVENT_STREAMS_MAX)]
    for answer in answers:
        with pytest.raises(HttpError, match="readers already"):
            await health._answer_events(asked)
        assert isinstance(answer.body, AsyncGenerator)
        await answer.body.aclose()
        await health._answer_events(asked)


async def test_filters() -> None:
    """A reader receives the events that match one value of each filter. Events of a queue have
    neither kind nor state."""
    client = Client()
    wanted = stream_events(client, {"queue": ["a", "b"], "event": ["queue_paused"]})
    of_jobs = stream_events(client, {"state": ["completed"]})
    for lines in (wanted, of_jobs):
        await anext(lines)
    for queue in ("a", "c", "b"):
        for kind in (EventKind.QUEUE_PAUSED, EventKind.QUEUE_RESUMED):
            client._subscription_manager.publish_queue_event(kind, queue)
    client._subscription_manager.close()
    assert [json.loads(line)["queue"] async for line in wanted] == ["a", "b"]
    assert [line async for line in of_jobs] == []


async def test_lease_lines() -> None:
    """Lines about a lease have its name, use, epoch, reason and error, without passwords. The
    filter `lease` leaves out all other lines, and the other filters leave out these."""
    client = Client()
    of_lease = stream_events(client, {"lease": ["s"]})
    of_queue = stream_events(client, {"queue": ["a"]})
    for lines in (of_lease, of_queue):
        await anext(lines)
    client._subscription_manager.publish_queue_event(EventKind.QUEUE_PAUSED, "a")
    error = ConnectionError("postgres://me:secret@host/db is gone")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for name in ("t", "s"):
        change = LeaseChange(name, LeaseUse.SINGLETON, 3, now, None, "it was released", error)
        client._subscription_manager.publish_event(Event(LeaseEventKind.FAILED, lease=change))
    client._subscription_manager.close()
    (line,) = [json.loads(line) async for line in of_lease]
    assert "secret" not in line.pop("error")
    assert datetime.fromisoformat(line.pop("at")) > now
    assert line == {
        "event": "lease_failed",
        "lease": "s",
        "use": "singleton",
        "epoch": 3,
        "reason": "it was released",
    }
    assert [json.loads(line)["event"] async for line in of_queue] == ["queue_paused"]


async def test_keepalive_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that receives no event still receives keepalive lines."""
    monkeypatch.setattr(event_stream, "KEEPALIVE_INTERVAL", 0.0)
    client = Client()
    lines = stream_events(client, {"state": ["completed"]})
    await anext(lines)
    for _ in range(3):
        client._subscription_manager.publish_queue_event(EventKind.QUEUE_PAUSED, "a")
    client._subscription_manager.close()
    assert [line async for line in lines] == [b"\n"] * 3


@pytest.mark.parametrize("params", [{"kinds": ["a"]}, {"event": ["job_lost"]}])
def test_wrong_parameters(params: dict[str, list[str]]) -> None:
    """An unknown name is refused with the list of known names."""
    with pytest.raises(ValueError, match=r"the parameters are event|kinds of events are"):
        stream_events(Client(), params)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--schema a", "--schema needs --fleet"),
        ("--database-url postgres://a/b", "--database-url needs --fleet"),
        ("--job 1", "--job needs --fleet"),
        ("--event job_started", "--event job_started needs --fleet"),
        ("--fleet --url :1", "omit --url"),
        ("--lease a --kind b", "no event matches --kind and the other filters"),
        ("--fleet --event lease_lost --state completed", "--state and --event lease_lost"),
        ("--fleet --event queue_paused --job 1", "--job and --event queue_paused"),
    ],
)
def test_refused_options_of_command(options: str, text: str) -> None:
    """`riverpy events` refuses options that would have no effect, and filters that together match
    no event."""
    result = CliRunner().invoke(events, options.split())
    assert result.exit_code == 2
    assert text in result.output
