"""Listening: whether a notification that is sent arrives."""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic
from typing import TYPE_CHECKING

import anyio

from riverpy._db.doctor import doctor_notify
from riverpy._doctor.finding import Finding, Level
from riverpy.drivers.asyncpg import DATABASE_ERRORS, close, connect, describe, listen
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy._doctor.patient import Patient

TOPIC = "riverpy_doctor"
PROBE_TIMEOUT = 2.0
"""Seconds within which a probe must come back."""
LISTEN_TIMEOUT = 10.0
"""Seconds to connect and listen."""


async def look_at_listening(patient: Patient) -> list[Finding]:
    """Whether clients hear of jobs.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    url = patient.listen_url or patient.session.url
    what = "the listen URL" if patient.listen_url else "the database URL"
    try:
        seconds = await _probe(patient, url)
    except (*DATABASE_ERRORS, ConfigError) as error:
        return [
            Finding(
                Level.FAIL,
                "listen",
                f"nobody can listen over {what}: {describe(error)}",
                "give the URL of a server that can be reached; until then clients poll",
            )
        ]
    if seconds is not None:
        text = f"a notification over {what} took {seconds * 1000:.1f} ms"
        return [Finding(Level.OK, "listen", text, data={"seconds": round(seconds, 6)})]
    return [
        Finding(
            Level.FAIL,
            "listen",
            f"no notification over {what} in {PROBE_TIMEOUT:g} s: is there a pooler in transaction "
            "mode? Jobs are found by polling",
            "set Config(listen_url=…) to a URL that leads past the pooler (try it here with "
            "--listen-url), or Config(poll_only=True)",
            {"seconds": None},
        )
    ]


async def _probe(patient: Patient, url: str) -> float | None:
    """Seconds that a notification takes from the session to a listener. None: too many."""
    channel, token = f"{patient.schema}.{TOPIC}", secrets.token_hex(8)
    heard = asyncio.Event()

    def hear(payload: str) -> None:
        if payload == token:
            heard.set()

    with anyio.fail_after(
        LISTEN_TIMEOUT, reason=f"listening took longer than {LISTEN_TIMEOUT:g} s"
    ):
        connection = await connect(url, pooled=True)
        try:
            await listen(connection, {channel: hear}, _nothing)
        except BaseException:
            connection.terminate()
            raise
    try:
        start = monotonic()
        async with patient.session.reading() as sender:
            await doctor_notify(sender, channel=channel, payload=token)
        with anyio.move_on_after(PROBE_TIMEOUT):
            await heard.wait()
            return monotonic() - start
        return None
    finally:
        await close(connection)


def _nothing() -> None:
    pass
