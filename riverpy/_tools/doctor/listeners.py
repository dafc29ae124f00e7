"""Listening: whether a notification that is sent arrives."""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic
from typing import TYPE_CHECKING

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS, close, connect, describe, listen
from riverpy._tools.doctor.finding import Finding, Level, count, names
from riverpy._tools.doctor.statements import doctor_listeners, doctor_notify
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot

TOPIC = "riverpy_doctor"
PROBE_TIMEOUT = 2.0
"""Seconds within which a probe must come back."""
LISTEN_TIMEOUT = 10.0
"""Seconds to connect and listen."""
_NOT_TRIED = Finding(
    Level.WARN,
    "listen",
    "not tried, since the server's queue of notifications is full: see `notifications`",
    "run riverpy doctor again when it is not",
    {"seconds": None},
)


async def check_listening(patient: DatabaseSnapshot) -> list[Finding]:
    """Whether clients hear of jobs. Without, a job waits for the next poll, a second by default.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    finding = _NOT_TRIED if patient.is_queue_full else await _try_listening(patient)
    patient.is_heard = finding.level is Level.OK
    return [finding]


async def _try_listening(patient: DatabaseSnapshot) -> Finding:
    url = patient.listen_url or patient.session.url
    what = "the listen URL" if patient.listen_url else "the database URL"
    try:
        seconds = await _probe(patient, url)
    except (*DATABASE_ERRORS, ConfigError) as error:
        return Finding(
            Level.WARN,
            "listen",
            f"nobody can listen over {what}: {describe(error)}",
            "give the URL of a server that can be reached; until then clients poll",
        )
    if seconds is not None:
        text = f"a notification over {what} took {seconds * 1000:.1f} ms"
        return Finding(Level.OK, "listen", text, data={"seconds": round(seconds, 6)})
    other = ", or does it lead to another database" if patient.listen_url else ""
    return Finding(
        Level.WARN,
        "listen",
        f"no notification over {what} in {PROBE_TIMEOUT:g} s: is there a pooler in transaction "
        f"mode{other}? Clients that listen over it find jobs by polling",
        "set Config(pooler=True, listen_url=…) to a URL that leads past the pooler (try it here "
        "with --listen-url), or Config(pooler=True, poll_only=True)",
        {"seconds": None},
    )


async def check_listeners(patient: DatabaseSnapshot) -> list[Finding]:
    """Whether each client that lives and does not only poll has a connection to listen on. The
    server knows how many there are, in all its schemas, not whose they are. Where nothing is heard,
    they come and go, and that was told.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    if clients is None:
        return []
    async with patient.session.reading() as connection:
        listeners = await doctor_listeners(connection)
    needed = [one for one in clients if one.is_lively and not one.poll_only]
    data: dict[str, object] = {"listeners": listeners, "needed": len(needed)}
    if listeners >= len(needed):
        text = f"{count(listeners, 'client')} of this database listen{'s' * (listeners == 1)}"
        return [Finding(Level.OK, "listeners", text, data=data)]
    if not patient.is_heard:
        text = f"{listeners} for {count(len(needed), 'client')}: see `listen`"
        return [Finding(Level.OK, "listeners", text, data=data)]
    who = names(one.client_id for one in needed)
    return [
        Finding(
            Level.WARN,
            "listeners",
            f"{count(len(needed), 'client')} should listen, and there "
            f"{'is' if listeners == 1 else 'are'} {count(listeners, 'connection')} for that: who "
            f"has none finds jobs by polling. They are {who}",
            "look in their logs for `notifications not received` and for `connection lost` of "
            "the listener, and try the way that they listen on with --listen-url. One that was "
            "killed is counted until it is silent for half of dead_after",
            data,
        )
    ]


async def _probe(patient: DatabaseSnapshot, url: str) -> float | None:
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
