"""The payloads of riverpy's notifications."""

from __future__ import annotations


def due_payload(queue: str, notify_interval_ms: int = 0) -> str:
    """Return the payload for a queue with due jobs. It is River's payload with one more key, from
    which a worker of riverpy knows whether more jobs may follow without a notification."""
    return f'{{"queue": "{queue}", "notify_interval_ms": {notify_interval_ms}}}'
