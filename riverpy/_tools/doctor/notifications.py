"""Checks of the notifications: how full the server's queue is, whether notifications arrive, and
whether each client listens.

The server has one notification queue for all of its databases. A notification stays in the queue
until all listening sessions have read it. A session reads the queue only between its transactions,
so a session that stays in a transaction blocks the whole queue.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from time import monotonic
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from riverpy._log_events import CONNECTION_LOST, NOTIFICATIONS_NOT_RECEIVED
from riverpy._postgres.channels import listen_on_channels
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    PostgresError,
    close_connection,
    collect_warnings,
    describe_error,
    is_notification_queue_full,
)
from riverpy._tools.doctor.clients import has_recent_heartbeat
from riverpy._tools.doctor.finding import Finding, Level, ok_finding, warn_finding
from riverpy._tools.doctor.statements import (
    count_listeners,
    enable_server_warnings,
    read_notification_queue_usage,
    read_session_or_oldest_transactions,
    send_notification,
)
from riverpy._tools.text import format_count, format_names, format_seconds
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy._postgres.driver import ServerWarning
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import SessionRow

NOTIFICATION_QUEUE_USAGE_WARN = 0.5
"""If more than this fraction of the queue (0 to 1) is used, the server sends warnings to sessions
that notify."""
NOTIFICATION_QUEUE_USAGE_FULL = 0.9
"""If this fraction of the queue (0 to 1) or more is used, riverpy sends no notifications."""
SERVER_WARNING_INTERVAL = 5.5
"""Seconds to wait for the server's next warning. The server warns at most once in 5 s."""
_PID_PATTERN = re.compile(r"[0-9]+")
DOCTOR_TOPIC = "riverpy_doctor"
TEST_NOTIFICATION_TIMEOUT = 2.0
"""Seconds within which the test notification must arrive."""
LISTEN_TIMEOUT = 10.0
"""The timeout for connecting and the statement LISTEN together, in seconds."""
_LISTEN_SKIPPED_FINDING = warn_finding(
    "not tried, because the server's notification queue is full: see `notifications`",
    "run riverpy doctor again when the queue is no longer full",
    seconds=None,
)


async def check_notification_queue(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report how full the notification queue is, and which session blocks it."""
    usage = await snapshot.session.read(read_notification_queue_usage)
    snapshot.is_notification_queue_full = usage >= NOTIFICATION_QUEUE_USAGE_FULL
    text = f"the server's notification queue is {usage:.0%} full"
    if usage <= NOTIFICATION_QUEUE_USAGE_WARN:
        return [ok_finding(text, usage=usage)]
    pid = await _find_blocking_session_pid(snapshot)
    sessions = await snapshot.session.read(read_session_or_oldest_transactions, pid)
    blockers = "; ".join(map(_describe_session, sessions)) or "a session that this role may not see"
    verb = "blocks" if pid is not None else "probably blocks"
    effect = ""
    if snapshot.is_notification_queue_full:
        effect = ". riverpy sends no notifications now, so clients find jobs by polling"
    return [
        warn_finding(
            f"{text}: {blockers} {verb} it{effect}. When it is full, each commit that notifies "
            "fails, in all databases of the server",
            "let that session end its transaction, or end the session: SELECT "
            f"pg_terminate_backend({sessions[0].pid if sessions else 'PID'})",
            usage=usage,
            pids=[row.pid for row in sessions],
            is_certain=pid is not None,
        )
    ]


def _describe_session(row: SessionRow) -> str:
    age = row.transaction_age_seconds
    since = "" if age is None else f", in a transaction for {format_seconds(age)}"
    state = f", {row.state}" if row.state else ""
    return (
        f'session {row.pid} ("{row.application}", role "{row.role}", database "{row.database}"'
        f"{state}{since})"
    )


async def _find_blocking_session_pid(snapshot: DatabaseSnapshot) -> int | None:
    """Return the process id of the session that blocks the queue, or None if it is not known. The
    server names this session in a warning to a session that notifies."""
    pid = await _read_pid_from_server_warning(snapshot)
    if pid is None:
        await anyio.sleep(SERVER_WARNING_INTERVAL)
        pid = await _read_pid_from_server_warning(snapshot)
    return pid


async def _read_pid_from_server_warning(snapshot: DatabaseSnapshot) -> int | None:
    """Send a notification, and return the process id in the server's warning. Return None if the
    server sent no warning."""
    found: list[ServerWarning] = []
    with collect_warnings(await snapshot.session.ensure_connection(), found):
        try:
            async with snapshot.session.read_only_transaction() as connection:
                await enable_server_warnings(connection)
                await send_notification(connection, channel=DOCTOR_TOPIC, payload="")
        except PostgresError as error:  # the server sends the warning before this error
            if not is_notification_queue_full(error):
                raise
        await anyio.lowlevel.checkpoint()  # the event loop must run to deliver the warning
    for notice in found:
        if notice.source_file == "async.c" and (number := _PID_PATTERN.search(notice.detail)):
            return int(number[0])
    return None


async def check_notification_delivery(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Send a notification, and report whether it arrives. Without notifications, clients find a job
    only at their next poll, by default within one second."""
    finding = (
        _LISTEN_SKIPPED_FINDING
        if snapshot.is_notification_queue_full
        else await _notification_delay_finding(snapshot)
    )
    snapshot.has_received_notification = finding.level is Level.OK
    return [finding]


async def _notification_delay_finding(snapshot: DatabaseSnapshot) -> Finding:
    listen_url = snapshot.options.listen_url
    url = listen_url or snapshot.session.url
    what = "the listen URL" if listen_url else "the database URL"
    try:
        seconds = await _measure_notification_delay(snapshot, url)
    except (*DATABASE_ERRORS, ConfigError) as error:
        return warn_finding(
            f"LISTEN over {what} failed: {describe_error(error)}",
            "use the URL of a server that can be reached. Until then clients find jobs by polling",
        )
    if seconds is not None:
        text = f"a notification over {what} took {seconds * 1000:.1f} ms"
        return ok_finding(text, seconds=round(seconds, 6))
    other = " Or does the URL name another database?" if listen_url else ""
    return warn_finding(
        f"no notification arrived over {what} within {TEST_NOTIFICATION_TIMEOUT:g} s. Is there a "
        f"pooler in transaction mode?{other} Clients that listen over it find jobs by polling",
        "set Config(pooler=True, listen_url=…) to a URL that does not go through the pooler (try "
        "it with --listen-url), or Config(pooler=True, poll_only=True)",
        seconds=None,
    )


async def check_listener_count(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report how many connections listen for notifications. Warn if this number is smaller than the
    number of live clients that should listen. The server shows only the number of listening
    connections, over all schemas of the database."""
    clients = await snapshot.clients()
    if clients is None:
        return []
    listeners = await snapshot.session.read(count_listeners)
    expected = [one for one in clients if has_recent_heartbeat(one) and not one.poll_only]
    data: dict[str, object] = {"listeners": listeners, "needed": len(expected)}
    if listeners >= len(expected):
        text = (
            f"{format_count(listeners, 'client')} of this database listen{'s' * (listeners == 1)}"
        )
        return [ok_finding(text, **data)]
    if not snapshot.has_received_notification:  # the check `listen` has reported the cause
        text = f"{listeners} for {format_count(len(expected), 'client')}: see `listen`"
        return [ok_finding(text, **data)]
    return [
        warn_finding(
            f"{format_count(len(expected), 'client')} should listen, but there "
            f"{'is' if listeners == 1 else 'are'} only {format_count(listeners, 'connection')} for "
            "LISTEN. A client without one finds jobs by polling. The clients are "
            f"{format_names(client.client_id for client in expected)}",
            f"search their logs for `{NOTIFICATIONS_NOT_RECEIVED}` and for `{CONNECTION_LOST}` of "
            "the listener, and try their listen URL with --listen-url. A killed client counts "
            "until half of its dead_after has passed",
            **data,
        )
    ]


async def _measure_notification_delay(snapshot: DatabaseSnapshot, url: str) -> float | None:
    """Open a connection with `url` and LISTEN on it, then send a notification over doctor's own
    connection. Return the seconds until the notification arrived, or None if it did not arrive
    within `TEST_NOTIFICATION_TIMEOUT`."""
    channel, token = f"{snapshot.schema}.{DOCTOR_TOPIC}", secrets.token_hex(8)
    arrived = asyncio.Event()

    def receive_notification(payload: str) -> None:
        if payload == token:
            arrived.set()

    with anyio.fail_after(LISTEN_TIMEOUT, reason=f"LISTEN took longer than {LISTEN_TIMEOUT:g} s"):
        connection = await snapshot.session.open_extra_connection(url)
        try:
            await listen_on_channels(connection, {channel: receive_notification})
        except BaseException:
            connection.terminate()
            raise
    try:
        start = monotonic()
        await snapshot.session.read(send_notification, channel=channel, payload=token)
        with anyio.move_on_after(TEST_NOTIFICATION_TIMEOUT):
            await arrived.wait()
            return monotonic() - start
        return None
    finally:
        await close_connection(connection)
