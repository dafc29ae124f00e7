"""Server-sent events: encodes one event, and detects when the web server is stopping."""

from __future__ import annotations

import signal

SERVER_STOP_POLL_INTERVAL = 0.5
"""The interval, in seconds, of the checks whether the web server is stopping. Open event streams of
a web server, and runs of doctor's checks in the dashboard, make these checks, so that they end in
time."""


def encode_server_sent_event(name: str, data: bytes, event_id: str | None = None) -> bytes:
    """Encode one server-sent event. Line ends in the arguments cannot end the event early."""
    text = data.decode()
    lines = [f"event: {_join_lines(name)}"]
    if event_id:
        lines.append(f"id: {_join_lines(event_id)}")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines += [f"data: {line}" for line in text.split("\n")]
    return ("\n".join(lines) + "\n\n").encode()


def _join_lines(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ").replace("\0", " ")


def is_uvicorn_stopping() -> bool:
    """Whether uvicorn runs this process and is stopping. uvicorn waits until open streams have
    ended, so each stream must poll this function and end itself. The signal handler is a method of
    uvicorn's server object. Through this method, the function finds the object."""
    for number in (signal.SIGINT, signal.SIGTERM):
        server = getattr(signal.getsignal(number), "__self__", None)
        if getattr(server, "should_exit", False) is True:
            return True
    return False
