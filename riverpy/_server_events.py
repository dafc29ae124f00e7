"""Server-sent events: encodes one event, and detects when the web server is stopping."""

from __future__ import annotations

import signal

SERVER_STOP_POLL_INTERVAL = 0.5
"""The seconds between two checks whether the web server is stopping. Open event streams check this,
and so do runs of doctor in the dashboard, so that they end when the server stops."""


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
    ended, so each stream must poll this function and end itself. The function finds uvicorn's
    server object through the signal handler, which is a method of this object."""
    for number in (signal.SIGINT, signal.SIGTERM):
        server = getattr(signal.getsignal(number), "__self__", None)
        if getattr(server, "should_exit", False) is True:
            return True
    return False
