"""CheckRunner: runs all checks in order. If a check raises an error, the error becomes a
finding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from riverpy._postgres.driver import DATABASE_ERRORS, describe, is_damage
from riverpy._postgres.schema import read_schema_state
from riverpy._tools.doctor.client_reports import check_set_aside, check_stuck
from riverpy._tools.doctor.clients import check_clients
from riverpy._tools.doctor.domains import check_domains
from riverpy._tools.doctor.finding import Finding, fail, limited, named, warn
from riverpy._tools.doctor.kinds import Program, check_failing, check_kinds, check_program
from riverpy._tools.doctor.leader import check_leader
from riverpy._tools.doctor.leases import check_leases
from riverpy._tools.doctor.listeners import check_listeners, check_listening
from riverpy._tools.doctor.notification_queue import check_notification_queue
from riverpy._tools.doctor.running_jobs import check_damaged, check_running, check_unregistered
from riverpy._tools.doctor.server import (
    check_clock,
    check_connections,
    check_pooler,
    check_server,
    check_settings,
)
from riverpy._tools.doctor.session import Session, SessionLostError
from riverpy._tools.doctor.snapshot import DatabaseSnapshot
from riverpy._tools.doctor.storage import (
    check_indexes,
    check_locks,
    check_references,
    check_snapshots,
    check_vacuum,
)
from riverpy._tools.doctor.tables import (
    check_grants,
    check_migrations,
    check_tables,
    row_security_finding,
)
from riverpy._tools.doctor.waiting_jobs import check_periodic, check_queues, check_scheduled
from riverpy._tools.domain_map import PRIVILEGE_MISSING, TABLE_MISSING
from riverpy.errors import ConfigError, RiverError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from riverpy._postgres.schema import SchemaState
    from riverpy._tools.doctor.statements import ServerRow

_DATABASE_MISSING = "3D000"
_UNREACHABLE = (
    "check that the server runs, that the network allows the connection, and that the server "
    "accepts this role"
)
_TABLE_FIX = "create the table, as `schema` says, and run riverpy doctor again"
_SLOW = (
    "run riverpy doctor again when the database is less busy. A lock or an old snapshot (`locks`, "
    "`snapshots`) also makes reads slow"
)
_DAMAGED = (
    "the server cannot read its own data: find out what damages its disk "
    "(docs/faults.md#damaged-rows)"
)
_CHECKS: tuple[tuple[str, Callable[[DatabaseSnapshot], Awaitable[list[Finding]]]], ...] = (
    ("schema", check_tables),
    ("grants", check_grants),
    ("notifications", check_notification_queue),
    ("listen", check_listening),
    ("listeners", check_listeners),
    ("leader", check_leader),
    ("domains", check_domains),
    ("clients", check_clients),
    ("stuck", check_stuck),
    ("set aside", check_set_aside),
    ("running", check_running),
    ("unregistered", check_unregistered),
    ("queues", check_queues),
    ("kinds", check_kinds),
    ("failing", check_failing),
    ("damaged", check_damaged),
    ("scheduled", check_scheduled),
    ("periodic", check_periodic),
    ("leases", check_leases),
    ("references", check_references),
    ("snapshots", check_snapshots),
    ("locks", check_locks),
    ("vacuum", check_vacuum),
    ("indexes", check_indexes),
)
"""The checks of a database that has River's tables. Each may raise one of DATABASE_ERRORS."""


@dataclass(frozen=True)
class Request:
    """The database to check, and the options of the checks."""

    url: str
    schema: str | None
    """The schema of River's tables; None: the schema of the search path."""
    listen_url: str | None
    stuck_after: timedelta
    max_lag: timedelta
    program: Program | None = None
    """The program that will work the jobs; None: there is no program to check."""


class CheckRunner:
    """Runs the checks on one database.

    Args:
        request: the database and the options.
        report: called with each finding as soon as it is made.
        failed: called with each error that became a finding.
    """

    def __init__(
        self,
        request: Request,
        report: Callable[[Finding], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._request, self._report_finding, self._failed = request, report, failed
        self._session = Session(request.url)
        self._forbidden: dict[str, str] = {}
        """The checks for which the role lacks a privilege, each with the server's error."""
        self._without_table: dict[str, str] = {}
        """The checks for which a table is missing, each with the server's error."""

    async def run(self) -> None:
        """Run the checks, as far as the server and the tables allow."""
        try:
            server = await self._connect()
            if server is not None:
                await self._check_all(server)
                self._report_skipped_checks(server)
        except SessionLostError as error:
            self._failed(error)
            text = f"the connection was lost and cannot be made again: {error}"
            self._report("connect", fail(text, _UNREACHABLE))
        finally:
            await self._session.close()

    async def _connect(self) -> ServerRow | None:
        try:
            server, finding = await check_server(self._session)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._failed(error)
            self._report("connect", fail(describe(error), _connection_fix(error)))
            return None
        self._report("connect", finding)
        return server

    async def _check_all(self, server: ServerRow) -> None:
        session = self._session
        await self._run_check("pooler", partial(check_pooler, session, server))
        await self._run_check("settings", partial(check_settings, session, server.role))
        await self._run_check("clock", partial(check_clock, session))
        await self._run_check("connections", partial(check_connections, session))
        state = await self._read_schema()
        if state is not None and not server.is_standby:
            await self._check_jobs(server, state)

    async def _read_schema(self) -> SchemaState | None:
        """Return the migrations of River's tables; None: the tables cannot be checked further."""
        schema, url = self._request.schema, self._request.url
        try:
            state = await self._session.read(read_schema_state, schema)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._failed(error)
            fix = "name the schema with --schema, create it, or let this role use it (`grants`)"
            self._report("schema", fail(describe(error), fix))
            return None
        if "river_migration" in state.row_security.hidden:  # the migrations cannot be read
            self._report("grants", row_security_finding(state.row_security, schema=state.schema))
        else:
            self._report("schema", *check_migrations(state, schema, url))
        return state if not state.needed() else None

    async def _check_jobs(self, server: ServerRow, state: SchemaState) -> None:
        snapshot = DatabaseSnapshot(
            session=self._session,
            server=server,
            state=state,
            listen_url=self._request.listen_url,
            stuck_after=self._request.stuck_after,
            max_lag=self._request.max_lag,
        )
        for name, check in _CHECKS:
            await self._run_check(name, partial(check, snapshot))
        if self._request.program is not None:
            await self._run_check("code", partial(check_program, self._request.program, snapshot))

    async def _run_check(self, name: str, check: Callable[[], Awaitable[list[Finding]]]) -> None:
        findings: list[Finding] = []
        try:
            findings = await check()
        except (*DATABASE_ERRORS, ConfigError) as error:
            self._failed(error)
            sqlstate = getattr(error, "sqlstate", None)
            if sqlstate == PRIVILEGE_MISSING:
                self._forbidden[name] = describe(error)
            elif sqlstate == TABLE_MISSING:
                self._without_table[name] = describe(error)
            else:
                fix = _DAMAGED if is_damage(error) else _SLOW
                findings = [warn(f"this check failed: {describe(error)}", fix)]
        self._report(name, *findings)

    def _report(self, name: str, *findings: Finding) -> None:
        for finding in named(name, limited(findings)):
            self._report_finding(finding)

    def _report_skipped_checks(self, server: ServerRow) -> None:
        """Report the checks that could not run."""
        role_fix = (
            f'run riverpy doctor with the role of the workers, or grant "{server.role}" SELECT on '
            "River's tables"
        )
        for reason, checks, fix in (
            ("the role may not run these checks", self._forbidden, role_fix),
            ("these checks need a table that is missing", self._without_table, _TABLE_FIX),
        ):
            if checks:
                errors = "; ".join(dict.fromkeys(checks.values()))
                text = f"{reason}: {', '.join(checks)} ({errors})"
                self._report("skipped", warn(text, fix, checks=list(checks)))


def _connection_fix(error: BaseException) -> str:
    """Return the remedy for an error of the first connection."""
    if isinstance(error, ConfigError):
        return "correct the URL"
    if getattr(error, "sqlstate", None) == _DATABASE_MISSING:
        return "correct the name of the database in the URL, or create it (CREATE DATABASE)"
    return _UNREACHABLE
