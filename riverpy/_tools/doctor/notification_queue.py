"""Notification queue: whether the server can drop notifications once all sessions have read them.

The server has one queue for all of its databases. A session that listens reads it between its
transactions only, so one that stays in a transaction holds all of it back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from riverpy._postgres.driver import PostgresError, is_notification_queue_full, warnings_of
from riverpy._tools.doctor.finding import Finding, Level, span
from riverpy._tools.doctor.statements import (
    doctor_notification_usage,
    doctor_notify,
    doctor_sessions,
    doctor_show_warnings,
)

if TYPE_CHECKING:
    from riverpy._postgres.driver import Notice
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import SessionRow

USAGE_WARN = 0.5
"""Share of the queue from which on the server itself warns those who notify."""
USAGE_FULL = 0.9
"""Share from which on riverpy sends no notifications."""
WARNING_INTERVAL = 5.5
"""Seconds: the server warns one session each 5 s."""
_CHANNEL = "riverpy_doctor"
_NUMBER = re.compile(r"[0-9]+")


async def check_notification_queue(patient: DatabaseSnapshot) -> list[Finding]:
    """How full the queue is, and which session holds it back.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        usage = await doctor_notification_usage(connection)
    patient.is_queue_full = usage >= USAGE_FULL
    text = f"the server's queue of notifications is {usage:.0%} full"
    if usage <= USAGE_WARN:
        return [Finding(Level.OK, "notifications", text, data={"usage": usage})]
    pid = await _oldest_reader(patient)
    async with patient.session.reading() as connection:
        sessions = await doctor_sessions(connection, pid)
    who = "; ".join(map(_described, sessions)) or "a session that this role may not see"
    verb = "holds" if pid is not None else "probably holds"
    effect = ""
    if patient.is_queue_full:
        effect = (
            ". riverpy sends no notifications, so jobs, cancels and pauses are found by polling"
        )
    return [
        Finding(
            Level.WARN,
            "notifications",
            f"{text}: {who} {verb} it back{effect}. Once it is full, each commit that notifies "
            "fails, in all databases of the server",
            "let that session end its transaction, or end the session: SELECT "
            f"pg_terminate_backend({sessions[0].pid if sessions else 'PID'})",
            {"usage": usage, "pids": [one.pid for one in sessions], "is_certain": pid is not None},
        )
    ]


def _described(row: SessionRow) -> str:
    since = "" if row.seconds is None else f", in a transaction since {span(row.seconds)}"
    state = f", {row.state}" if row.state else ""
    return (
        f'session {row.pid} ("{row.application}", role "{row.role}", database "{row.database}"'
        f"{state}{since})"
    )


async def _oldest_reader(patient: DatabaseSnapshot) -> int | None:
    """The process of the session that has read least. The server names it in a warning to one that
    notifies, but only now and then. None: it did not."""
    for is_last in (False, True):
        if (pid := await _warned_of(patient)) is not None:
            return pid
        if not is_last:
            await anyio.sleep(WARNING_INTERVAL)
    return None


async def _warned_of(patient: DatabaseSnapshot) -> int | None:
    found: list[Notice] = []
    with warnings_of(await patient.session.connection(), found):
        try:
            async with patient.session.reading() as connection:
                await doctor_show_warnings(connection)
                await doctor_notify(connection, channel=_CHANNEL, payload="")
        except PostgresError as error:  # the warning comes before the refusal
            if not is_notification_queue_full(error):
                raise
        await anyio.lowlevel.checkpoint()  # the driver delivers it by the event loop
    for notice in found:
        if notice.source == "async.c" and (number := _NUMBER.search(notice.detail)):
            return int(number[0])
    return None
