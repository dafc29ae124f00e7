"""Check of the server's notification queue.

The server has one queue for all of its databases. A notification stays in the queue until all
listening sessions have read it. A session reads the queue only between its transactions, so a
session that stays in a transaction blocks the whole queue.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from riverpy._postgres.driver import PostgresError, is_notification_queue_full, warnings_of
from riverpy._tools.doctor.finding import Finding, ok, warn
from riverpy._tools.doctor.statements import (
    doctor_notification_usage,
    doctor_notify,
    doctor_sessions,
    doctor_show_warnings,
)
from riverpy._tools.text import span

if TYPE_CHECKING:
    from riverpy._postgres.driver import Notice
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import SessionRow

USAGE_WARN = 0.5
"""The used share of the queue, from 0 to 1, above which the server warns sessions that notify."""
USAGE_FULL = 0.9
"""The used share of the queue, from 0 to 1, above which riverpy sends no notifications."""
WARNING_INTERVAL = 5.5
"""Seconds to wait for the server's next warning. The server warns at most once in 5 s."""
_CHANNEL = "riverpy_doctor"
_NUMBER = re.compile(r"[0-9]+")


async def check_notification_queue(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report how full the queue is, and which session blocks the queue."""
    usage = await snapshot.session.read(doctor_notification_usage)
    snapshot.is_queue_full = usage >= USAGE_FULL
    text = f"the server's notification queue is {usage:.0%} full"
    if usage <= USAGE_WARN:
        return [ok(text, usage=usage)]
    pid = await _blocking_pid(snapshot)
    sessions = await snapshot.session.read(doctor_sessions, pid)
    blockers = (
        "; ".join(map(_described_session, sessions)) or "a session that this role may not see"
    )
    verb = "blocks" if pid is not None else "probably blocks"
    effect = ""
    if snapshot.is_queue_full:
        effect = ". riverpy sends no notifications now, so clients find jobs by polling"
    return [
        warn(
            f"{text}: {blockers} {verb} it{effect}. When it is full, each commit that notifies "
            "fails, in all databases of the server",
            "let that session end its transaction, or end the session: SELECT "
            f"pg_terminate_backend({sessions[0].pid if sessions else 'PID'})",
            usage=usage,
            pids=[row.pid for row in sessions],
            is_certain=pid is not None,
        )
    ]


def _described_session(row: SessionRow) -> str:
    since = "" if row.seconds is None else f", in a transaction for {span(row.seconds)}"
    state = f", {row.state}" if row.state else ""
    return (
        f'session {row.pid} ("{row.application}", role "{row.role}", database "{row.database}"'
        f"{state}{since})"
    )


async def _blocking_pid(snapshot: DatabaseSnapshot) -> int | None:
    """Return the process id of the session that blocks the queue; None: not known. The server names
    this session in a warning to a session that notifies."""
    pid = await _pid_of_warning(snapshot)
    if pid is None:
        await anyio.sleep(WARNING_INTERVAL)
        pid = await _pid_of_warning(snapshot)
    return pid


async def _pid_of_warning(snapshot: DatabaseSnapshot) -> int | None:
    found: list[Notice] = []
    with warnings_of(await snapshot.session.connection(), found):
        try:
            async with snapshot.session.reading() as connection:
                await doctor_show_warnings(connection)
                await doctor_notify(connection, channel=_CHANNEL, payload="")
        except PostgresError as error:  # the warning comes before this error
            if not is_notification_queue_full(error):
                raise
        await anyio.lowlevel.checkpoint()  # the driver delivers the warning in the event loop
    for notice in found:
        if notice.source == "async.c" and (number := _NUMBER.search(notice.detail)):
            return int(number[0])
    return None
