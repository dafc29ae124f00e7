"""Checks of the notifications: whether they arrive, and whether each client listens."""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic
from typing import TYPE_CHECKING

import anyio

from riverpy._log_events import CONNECTION_LOST, NOTIFICATIONS_NOT_RECEIVED
from riverpy._postgres.driver import DATABASE_ERRORS, close, connect, describe, listen
from riverpy._tools.doctor.clients import is_on_time
from riverpy._tools.doctor.finding import Finding, Level, ok, warn
from riverpy._tools.doctor.statements import doctor_listeners, doctor_notify
from riverpy._tools.text import count, names
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot

TOPIC = "riverpy_doctor"
PROBE_TIMEOUT = 2.0
"""Seconds within which the test notification must arrive."""
LISTEN_TIMEOUT = 10.0
"""Seconds for the connection and the statement LISTEN."""
_NOT_TRIED = warn(
    "not tried, because the server's notification queue is full: see `notifications`",
    "run riverpy doctor again when the queue is no longer full",
    seconds=None,
)


async def check_listening(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Send a notification, and report whether it arrives. Without notifications a job waits for the
    next poll, one second by default."""
    finding = _NOT_TRIED if snapshot.is_queue_full else await _try_listening(snapshot)
    snapshot.notifications_arrive = finding.level is Level.OK
    return [finding]


async def _try_listening(snapshot: DatabaseSnapshot) -> Finding:
    url = snapshot.listen_url or snapshot.session.url
    what = "the listen URL" if snapshot.listen_url else "the database URL"
    try:
        seconds = await _send_and_wait(snapshot, url)
    except (*DATABASE_ERRORS, ConfigError) as error:
        return warn(
            f"LISTEN over {what} failed: {describe(error)}",
            "use the URL of a server that can be reached. Until then clients find jobs by polling",
        )
    if seconds is not None:
        text = f"a notification over {what} took {seconds * 1000:.1f} ms"
        return ok(text, seconds=round(seconds, 6))
    other = " Or does the URL name another database?" if snapshot.listen_url else ""
    return warn(
        f"no notification arrived over {what} within {PROBE_TIMEOUT:g} s. Is there a pooler in "
        f"transaction mode?{other} Clients that listen over it find jobs by polling",
        "set Config(pooler=True, listen_url=…) to a URL that does not go through the pooler (try "
        "it with --listen-url), or Config(pooler=True, poll_only=True)",
        seconds=None,
    )


async def check_listeners(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report if fewer connections listen than there are clients. The server shows only the number
    of listening connections, over all schemas of the database."""
    clients = await snapshot.clients()
    if clients is None:
        return []
    listeners = await snapshot.session.read(doctor_listeners)
    expected = [client for client in clients if is_on_time(client) and not client.poll_only]
    data: dict[str, object] = {"listeners": listeners, "needed": len(expected)}
    if listeners >= len(expected):
        text = f"{count(listeners, 'client')} of this database listen{'s' * (listeners == 1)}"
        return [ok(text, **data)]
    if not snapshot.notifications_arrive:  # the check `listen` has reported the cause
        text = f"{listeners} for {count(len(expected), 'client')}: see `listen`"
        return [ok(text, **data)]
    return [
        warn(
            f"{count(len(expected), 'client')} should listen, but there "
            f"{'is' if listeners == 1 else 'are'} only {count(listeners, 'connection')} for "
            "LISTEN. A client without one finds jobs by polling. The clients are "
            f"{names(client.client_id for client in expected)}",
            f"search their logs for `{NOTIFICATIONS_NOT_RECEIVED}` and for `{CONNECTION_LOST}` of "
            "the listener, and try their listen URL with --listen-url. A killed client counts "
            "until half of its dead_after has passed",
            **data,
        )
    ]


async def _send_and_wait(snapshot: DatabaseSnapshot, url: str) -> float | None:
    """Return the seconds until the notification arrived; None: no notification arrived."""
    channel, token = f"{snapshot.schema}.{TOPIC}", secrets.token_hex(8)
    arrived = asyncio.Event()

    def receive(payload: str) -> None:
        if payload == token:
            arrived.set()

    with anyio.fail_after(LISTEN_TIMEOUT, reason=f"LISTEN took longer than {LISTEN_TIMEOUT:g} s"):
        connection = await connect(url, pooled=True)
        try:
            await listen(connection, {channel: receive}, lambda: None)
        except BaseException:
            connection.terminate()
            raise
    try:
        start = monotonic()
        await snapshot.session.read(doctor_notify, channel=channel, payload=token)
        with anyio.move_on_after(PROBE_TIMEOUT):
            await arrived.wait()
            return monotonic() - start
        return None
    finally:
        await close(connection)
