"""Whose heartbeat has stopped, by what one observer sees."""

from __future__ import annotations

import math

from riverpy._clients.observer import HeartbeatObserver
from riverpy._postgres.clients import LastHeartbeat
from tests._time import VirtualTimer


def beat(name: str, value: bytes = b"1", limit: float = 0.0) -> LastHeartbeat:
    """A heartbeat that was read."""
    return LastHeartbeat(name, value, limit)


async def test_silence() -> None:
    """A heartbeat that stays the same is silent after the limit, its own limit or the time for
    which it is kept; it says when the next may be. One that changes is observed from then on."""
    timer = VirtualTimer()
    observer = HeartbeatObserver(timer)
    assert observer.find_stopped_heartbeats(60.0) == ({}, math.inf)
    observer.observe([beat("a"), beat("b"), beat("slow", limit=100.0)])
    assert observer.find_stopped_heartbeats(60.0) == ({}, 60.0)
    await timer.advance(50.0)
    observer.observe([beat("a"), beat("b", b"2"), beat("slow", limit=100.0)])
    assert observer.find_stopped_heartbeats(60.0) == ({}, 10.0)
    await timer.advance(10.0)
    assert observer.find_stopped_heartbeats(60.0) == ({"a": b"1"}, 40.0)
    assert observer.find_stopped_heartbeats(60.0, extra_seconds=30.0) == ({}, 30.0)
    observer.observe([beat("b", b"2")])
    await timer.advance(50.0)
    assert observer.find_stopped_heartbeats(60.0) == ({"b": b"2"}, math.inf)


async def test_restarted_server() -> None:
    """No client could write a heartbeat while the server was down."""
    timer = VirtualTimer()
    observer = HeartbeatObserver(timer)
    observer.observe([beat("a")], b"first")
    await timer.advance(50.0)
    observer.observe([beat("a")], b"second")
    assert observer.find_stopped_heartbeats(60.0).seconds_until_next_stop == 60.0
    assert observer.server_start == b"second"


async def test_observer_out_of_contact() -> None:
    """An observer counts no time in which it could not write a heartbeat itself."""
    timer = VirtualTimer()
    contact = 5.0
    observer = HeartbeatObserver(timer, lambda: contact)
    observer.observe([beat("a")])
    await timer.advance(100.0)
    assert observer.find_stopped_heartbeats(60.0) == ({}, 55.0)
    contact = 60.0
    assert observer.find_stopped_heartbeats(60.0).heartbeats == {"a": b"1"}
