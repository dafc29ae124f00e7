"""Checks of the database server: connection, settings, clock and number of connections."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING

from riverpy._postgres.sql_files import quote_identifier
from riverpy._tools.doctor.finding import Finding, fail_finding, ok_finding, warn_finding
from riverpy._tools.doctor.statements import (
    read_connection_counts,
    read_server,
    read_server_time,
    read_settings,
)
from riverpy._tools.text import format_seconds
from riverpy.errors import DatabaseError

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.doctor.session import DoctorSession
    from riverpy._tools.doctor.statements import ServerRow, SettingRow

LATENCY_WARN_SECONDS = 0.1
"""doctor warns if a round trip to the server takes this many seconds or more."""
CLOCK_SKEW_WARN_SECONDS = 2.0
"""doctor warns if the clocks of this machine and of the server differ by this many seconds or
more."""
LATENCY_MEASUREMENT_COUNT = 3
"""The number of measured round trips. The fastest one is used."""
CONNECTION_USAGE_WARN = 0.8
"""If this fraction (0 to 1) or more of the allowed connections is used, the check warns."""
CONNECTION_USAGE_FAIL = 0.95
"""If this fraction (0 to 1) or more of the allowed connections is used, the check reports a
failure."""
HARMLESS_TIMEOUT_SECONDS_MIN = {
    "statement_timeout": 5.0,
    "transaction_timeout": 10.0,
    "idle_in_transaction_session_timeout": 5.0,
    "idle_session_timeout": 60.0,
    "lock_timeout": 1.0,
}
"""The shortest harmless value of each timeout setting of PostgreSQL, in seconds. If a timeout in
the sessions of the role is shorter, the server may cancel normal statements of riverpy or close its
connections."""
_HARMLESS_SETTING_VALUES = {
    "default_transaction_isolation": (
        "read committed",
        "claims fail when two workers claim the same job",
    ),
    "track_activities": ("on", "doctor cannot check snapshots and locks"),
}
"""The harmless values of some settings, and the effect of any other value."""
_CLIENT_SETTING_SOURCES = {"client", "environment variable"}


def local_utc_now() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)


async def require_primary(connection: Transaction) -> None:
    """Check that the server is not a standby. On a standby, the unlogged tables of the leader and
    of clients are empty.

    Raises:
        DatabaseError: the server is a standby.
        Exception: one of DATABASE_ERRORS.
    """
    if (await read_server(connection)).is_standby:
        raise DatabaseError(
            "the server is a standby, which does not show the current leader and workers. Use the "
            "URL of the primary: name all hosts and add target_session_attrs=primary"
        )


async def check_server(session: DoctorSession) -> tuple[ServerRow, Finding]:
    """Connect, and report the server and its role. This raises the errors of
    `DoctorSession.ensure_connection`."""
    server = await session.await_with_timeout(read_server(await session.ensure_connection()))
    latency, _ = await session.read(_measure_latency_and_clock_skew)
    return server, _server_finding(server, latency)


def _server_finding(server: ServerRow, latency: float) -> Finding:
    data: dict[str, object] = {
        "version": server.version,
        "role": server.session_role,
        "latency": round(latency, 6),
        "is_standby": server.is_standby,
        "is_read_only": server.is_read_only,
    }
    text = f"PostgreSQL {server.version}, role {server.session_role}, {latency * 1000:.1f} ms"
    if server.is_standby:
        return fail_finding(
            f"{text}: this is a standby. It accepts no writes and no LISTEN",
            "use the URL of the primary: name all hosts and add target_session_attrs=primary",
            **data,
        )
    if server.is_read_only:
        return fail_finding(
            f"{text}: the server is read-only (default_transaction_read_only is on)",
            "allow writes: ALTER SYSTEM RESET default_transaction_read_only and SELECT "
            "pg_reload_conf(), or ALTER ROLE … RESET default_transaction_read_only. After a "
            "failover wait for the new primary",
            **data,
        )
    if latency >= LATENCY_WARN_SECONDS:
        return warn_finding(
            f"{text}: a round trip is slow, and every job needs several",
            "run the workers near the database, or find out what loads the server or the network",
            **data,
        )
    return ok_finding(text, **data)


async def check_pooler(session: DoctorSession, server: ServerRow) -> list[Finding]:
    """Report whether there is a pooler between doctor and the server. A pooler gives the connection
    a process id that differs from the server's."""
    if (await session.ensure_connection()).get_server_pid() == server.session_pid:
        return [ok_finding("none: the connection leads to the server", is_pooled=False)]
    text = (
        "there is a pooler, because the connection and the server name different processes. If it "
        "pools transactions, clients need Config(pooler=True, listen_url=…)"
    )
    return [ok_finding(text, is_pooled=True)]


async def check_settings(session: DoctorSession, role: str) -> list[Finding]:
    """Report PostgreSQL settings that harm riverpy, such as short timeouts. The values are those of
    doctor's session. `role` is the role of this session."""
    connection = await session.ensure_connection()
    names = [*HARMLESS_TIMEOUT_SECONDS_MIN, *_HARMLESS_SETTING_VALUES]
    findings = [
        warn_finding(
            f"{setting.name} is {_format_setting_value(setting)}, set by the {setting.source}: "
            f"{effect}",
            _setting_fix(setting, role),
            setting=setting.name,
            value=setting.value,
            seconds=setting.seconds,
            source=setting.source,
        )
        for setting in await session.await_with_timeout(read_settings(connection, names))
        if (effect := _harmful_effect(setting))
    ]
    return findings or [ok_finding("no setting of the role harms riverpy")]


def _harmful_effect(setting: SettingRow) -> str | None:
    """Return how a setting harms riverpy, or None if it is harmless."""
    if setting.name in _HARMLESS_SETTING_VALUES:
        value, effect = _HARMLESS_SETTING_VALUES[setting.name]
        return None if setting.value == value else effect
    if not setting.seconds or setting.seconds >= HARMLESS_TIMEOUT_SECONDS_MIN[setting.name]:
        return None
    what = "closes idle connections" if "session" in setting.name else "cancels statements"
    return f"it {what} of normal work. riverpy has its own timeouts"


def _format_setting_value(setting: SettingRow) -> str:
    return setting.value if setting.seconds is None else format_seconds(setting.seconds)


def _setting_fix(setting: SettingRow, role: str) -> str:
    """Return the command that corrects the setting for the sessions of the role."""
    if setting.source in _CLIENT_SETTING_SOURCES:
        return f"remove {setting.name} from the URL or from PGOPTIONS"
    if setting.name in _HARMLESS_SETTING_VALUES:
        value = f"'{_HARMLESS_SETTING_VALUES[setting.name][0]}'"
    else:
        value = f"'{HARMLESS_TIMEOUT_SECONDS_MIN[setting.name]:g}s', or 0 for no limit"
    alter = f"ALTER ROLE {quote_identifier(role)} SET {setting.name}"
    return f"{alter} = {value}; then restart the workers"


async def check_clock(session: DoctorSession) -> list[Finding]:
    """Report the difference between the clock of this machine and the clock of the server."""
    round_trip, skew = await session.read(_measure_latency_and_clock_skew)
    error = round_trip / 2
    data: dict[str, object] = {"skew": round(skew, 6), "error": round(error, 6)}
    text = (
        f"this machine is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} the server, "
        f"± {error:.3f} s"
    )
    if abs(skew) - error < CLOCK_SKEW_WARN_SECONDS:
        return [ok_finding(text, **data)]
    text += ": times that programs on this machine give to jobs are wrong by that"
    return [
        warn_finding(text, "synchronise both clocks (NTP: chronyd or systemd-timesyncd)", **data)
    ]


async def _measure_latency_and_clock_skew(connection: Transaction) -> tuple[float, float]:
    """Return two durations in seconds. The first is a round trip to the server. The second is how
    far this machine's clock is ahead of the server's clock."""
    measured: list[tuple[float, float]] = []
    for _ in range(LATENCY_MEASUREMENT_COUNT):
        before, start = local_utc_now(), monotonic()
        at = await read_server_time(connection)
        round_trip = monotonic() - start
        measured.append((round_trip, (before - at).total_seconds() + round_trip / 2))
    return min(measured)


async def check_connection_usage(session: DoctorSession) -> list[Finding]:
    """Report how many of the server's connections are in use."""
    row = await session.read(read_connection_counts)
    text = (
        f"{row.used_count:,} of the server's {row.allowed_count:,} connections are used, "
        f"{row.riverpy_connections:,} of them by riverpy, in all databases"
    )
    data = {"used": row.used_count, "limit": row.allowed_count, "own": row.riverpy_connections}
    share = row.used_count / max(row.allowed_count, 1)
    if share < CONNECTION_USAGE_WARN:
        return [ok_finding(text, **data)]
    return [
        (fail_finding if share >= CONNECTION_USAGE_FAIL else warn_finding)(
            f"{text}: the server may refuse new connections",
            "raise max_connections, make the pools of your programs smaller, or use a pooler. "
            "pg_stat_activity shows who uses the connections, by application_name",
            **data,
        )
    ]
