"""Server: whether the database server can be reached and used, and what of its state hurts."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

from riverpy._postgres.sql_files import quote_identifier
from riverpy._tools.doctor.finding import Finding, Level, span
from riverpy._tools.doctor.statements import (
    doctor_connections,
    doctor_now,
    doctor_server,
    doctor_settings,
)
from riverpy.errors import DatabaseError

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.doctor.session import Session
    from riverpy._tools.doctor.statements import ServerRow, SettingRow

LATENCY_WARN = 0.1
"""Seconds of a round trip, above which jobs are slow whatever else is done."""
SKEW_WARN = 2.0
"""Seconds by which two clocks may differ."""
LOOKS = 3
"""How often a round trip is measured; the fastest counts."""
CONNECTIONS_WARN = 0.8
CONNECTIONS_FAIL = 0.95
"""Shares of `max_connections`."""
SHORTEST = {
    "statement_timeout": 5.0,
    "transaction_timeout": 10.0,
    "idle_in_transaction_session_timeout": 5.0,
    "idle_session_timeout": 60.0,
    "lock_timeout": 1.0,
}
"""Seconds below which a limit of the role's sessions ends what works as it should."""
ISOLATION = "default_transaction_isolation"
TRACKING = "track_activities"
_GOOD = {ISOLATION: "'read committed'", TRACKING: "on"}
_NAMES = (*SHORTEST, *_GOOD)
_GIVEN_BY_CLIENT = {"client", "environment variable"}


def now() -> datetime:
    """This machine's clock."""
    return datetime.now(UTC)


async def check_server(session: Session) -> tuple[ServerRow, list[Finding]]:
    """Where we are, and what that means for a queue.

    Raises:
        ConfigError, DatabaseError, or one of DATABASE_ERRORS: it cannot be reached or refuses.
    """
    connection = await session.connection()
    server = await session.bounded(doctor_server(connection))
    async with session.reading():
        round_trips: list[float] = []
        for _ in range(LOOKS):
            start = monotonic()
            await doctor_now(connection)
            round_trips.append(monotonic() - start)
    is_pooled = connection.get_server_pid() != server.pid
    findings = [_connected(server, min(round_trips)), _pooler(is_pooled=is_pooled)]
    return server, findings


async def expect_primary(connection: Transaction) -> None:
    """Refuse a standby: its copies of the tables of leader and clients may be empty or old.

    Raises:
        DatabaseError: the server is a standby.
        Exception: one of DATABASE_ERRORS.
    """
    if (await doctor_server(connection)).is_standby:
        raise DatabaseError(
            "the server is a standby, which does not show the current leader and workers. Use the "
            "URL of the primary: name all hosts and add target_session_attrs=primary"
        )


def _connected(server: ServerRow, latency: float) -> Finding:
    data: dict[str, object] = {
        "version": server.version,
        "role": server.role,
        "latency": round(latency, 6),
        "is_standby": server.is_standby,
        "is_read_only": server.is_read_only,
    }
    text = f"PostgreSQL {server.version}, as {server.role}, {latency * 1000:.1f} ms"
    if server.is_standby:
        return Finding(
            Level.FAIL,
            "connect",
            f"{text}: a standby, on which nothing can be written or listened for",
            "let the URL lead to the primary: name all hosts and add target_session_attrs=primary",
            data,
        )
    if server.is_read_only:
        return Finding(
            Level.FAIL,
            "connect",
            f"{text}: the server lets nobody write (default_transaction_read_only is on)",
            "let it: ALTER SYSTEM RESET default_transaction_read_only and SELECT pg_reload_conf(), "
            "or ALTER ROLE … RESET default_transaction_read_only; after a failover wait for the "
            "new primary",
            data,
        )
    if latency >= LATENCY_WARN:
        return Finding(
            Level.WARN,
            "connect",
            f"{text}: a round trip is long, and every job takes some",
            "run workers near the database, or look for what keeps server or network busy",
            data,
        )
    return Finding(Level.OK, "connect", text, data=data)


def _pooler(*, is_pooled: bool) -> Finding:
    data: dict[str, object] = {"is_pooled": is_pooled}
    if not is_pooled:
        return Finding(Level.OK, "pooler", "none: the connection leads to the server", data=data)
    return Finding(
        Level.OK,
        "pooler",
        "there is one: the server's process is not the one that the connection was told. Clients "
        "need Config(pooler=True, listen_url=…) if it pools transactions",
        data=data,
    )


async def check_settings(session: Session, role: str) -> list[Finding]:
    """Settings of the role's sessions that hurt.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    connection = await session.connection()
    settings = await session.bounded(doctor_settings(connection, _NAMES))
    bad = [(setting, why) for setting in settings if (why := _why_bad(setting))]
    if not bad:
        return [Finding(Level.OK, "settings", "none of the role's settings is in the way")]
    return [
        Finding(
            Level.WARN,
            "settings",
            f"{setting.name} is {_shown(setting)}, set by the {setting.source}: {why}",
            _reset(setting, role),
            {
                "setting": setting.name,
                "value": setting.value,
                "seconds": setting.seconds,
                "source": setting.source,
            },
        )
        for setting, why in bad
    ]


def _why_bad(setting: SettingRow) -> str | None:
    if setting.name == ISOLATION:
        if setting.value == "read committed":
            return None
        return "claims fail whenever two workers want the same job"
    if setting.name == TRACKING:
        return "snapshots and locks cannot be told" if setting.value == "off" else None
    least = SHORTEST[setting.name]
    if not setting.seconds or setting.seconds >= least:
        return None
    what = "closes idle connections" if "session" in setting.name else "ends statements"
    return f"it {what} that are as they should be; riverpy has bounds of its own"


def _shown(setting: SettingRow) -> str:
    return setting.value if setting.seconds is None else span(setting.seconds)


def _reset(setting: SettingRow, role: str) -> str:
    """How to put it right for the sessions of the role."""
    if setting.source in _GIVEN_BY_CLIENT:
        return f"take {setting.name} out of the URL, or of PGOPTIONS"
    value = _GOOD.get(setting.name) or f"'{SHORTEST[setting.name]:g}s', or 0 for no limit"
    alter = f"ALTER ROLE {quote_identifier(role)} SET {setting.name}"
    return f"{alter} = {value}; then restart the workers"


async def check_clock(session: Session) -> list[Finding]:
    """How far this machine's clock is from the server's.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    looks: list[tuple[float, float]] = []
    async with session.reading() as connection:
        for _ in range(LOOKS):
            before, start = now(), monotonic()
            at = await doctor_now(connection)
            trip = monotonic() - start
            looks.append((trip, (before - at).total_seconds() + trip / 2))
    trip, skew = min(looks)
    error = trip / 2
    data: dict[str, object] = {"skew": round(skew, 6), "error": round(error, 6)}
    text = (
        f"this machine is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} the server, "
        f"± {error:.3f} s"
    )
    if abs(skew) - error < SKEW_WARN:
        return [Finding(Level.OK, "clock", text, data=data)]
    return [
        Finding(
            Level.WARN,
            "clock",
            f"{text}: times that programs here give to jobs are off by that",
            "synchronise both clocks (NTP: chronyd or systemd-timesyncd)",
            data,
        )
    ]


async def check_connections(session: Session) -> list[Finding]:
    """How many of the server's connections are used.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with session.reading() as connection:
        row = await doctor_connections(connection)
    text = (
        f"{row.used:,} of the server's {row.most:,} are used, {row.own:,} of them by riverpy, in "
        "all its databases"
    )
    data: dict[str, object] = {"used": row.used, "most": row.most, "own": row.own}
    share = row.used / max(row.most, 1)
    if share < CONNECTIONS_WARN:
        return [Finding(Level.OK, "connections", text, data=data)]
    level = Level.FAIL if share >= CONNECTIONS_FAIL else Level.WARN
    return [
        Finding(
            level,
            "connections",
            f"{text}: new ones may be refused",
            "raise max_connections, or make the pools of your programs smaller, or put a pooler "
            "before the server. Who has them: pg_stat_activity, by application_name",
            data,
        )
    ]
