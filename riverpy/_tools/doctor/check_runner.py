"""CheckRunner: runs all checks in order. An error that a check raises becomes a finding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from riverpy._postgres.driver import DATABASE_ERRORS, describe_error, is_damaged_data_error
from riverpy._postgres.schema import read_schema_state
from riverpy._tools.doctor import (
    client_reports,
    clients,
    domains,
    kinds,
    leader,
    leases,
    notifications,
    running_jobs,
    server,
    storage,
    tables,
    waiting_jobs,
)
from riverpy._tools.doctor.finding import (
    Finding,
    add_check_name,
    fail_finding,
    limit_problem_count,
    warn_finding,
)
from riverpy._tools.doctor.session import DoctorSession, SessionLostError
from riverpy._tools.doctor.snapshot import DatabaseSnapshot
from riverpy._tools.domain_map import PRIVILEGE_MISSING_SQLSTATE, TABLE_MISSING_SQLSTATE
from riverpy.errors import ConfigError, RiverError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._postgres.schema import SchemaState
    from riverpy._tools.doctor.snapshot import DoctorOptions
    from riverpy._tools.doctor.statements import ServerRow

_DATABASE_MISSING_SQLSTATE = "3D000"
_UNREACHABLE_SERVER_FIX = (
    "check that the server runs, that the network allows the connection, and that the server "
    "accepts this role"
)
_MISSING_TABLE_FIX = "create the table, as `schema` says, and run riverpy doctor again"
_SLOW_READ_FIX = (
    "run riverpy doctor again when the database is less busy. A lock or an old snapshot (`locks`, "
    "`snapshots`) also makes reads slow"
)
_DAMAGED_DATA_FIX = (
    "the server cannot read its own data: find out what damages its disk "
    "(docs/faults.md#damaged-rows)"
)
SCHEMA_CHECKS: tuple[tuple[str, Callable[[DatabaseSnapshot], Awaitable[list[Finding]]]], ...] = (
    ("schema", tables.check_dropped_tables),
    ("grants", tables.check_grants),
    ("notifications", notifications.check_notification_queue),
    ("listen", notifications.check_notification_delivery),
    ("listeners", notifications.check_listener_count),
    ("leader", leader.check_leader),
    ("domains", domains.check_domains),
    ("clients", clients.check_clients),
    ("stuck", client_reports.check_stuck_jobs),
    ("set aside", client_reports.check_skipped_rows),
    ("running", running_jobs.check_long_running_jobs),
    ("unregistered", running_jobs.check_unregistered_clients),
    ("queues", waiting_jobs.check_queues),
    ("kinds", kinds.check_kinds_without_worker),
    ("failing", kinds.check_failing_kinds),
    ("damaged", running_jobs.check_damaged_jobs),
    ("scheduled", waiting_jobs.check_late_scheduled_jobs),
    ("periodic", waiting_jobs.check_periodic_jobs),
    ("leases", leases.check_leases),
    ("references", storage.check_foreign_keys),
    ("snapshots", storage.check_open_snapshots),
    ("locks", storage.check_locks),
    ("vacuum", storage.check_vacuum),
    ("indexes", storage.check_indexes),
)
"""The checks of a database that has River's tables. Each may raise one of DATABASE_ERRORS."""


class CheckRunner:
    """Runs the checks on one database.

    Args:
        options: the database and the options of the checks.
        report_finding: called with each finding as soon as it is made.
        on_error: called with each error that became a finding.
    """

    def __init__(
        self,
        options: DoctorOptions,
        report_finding: Callable[[Finding], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._options, self._report_finding, self._on_error = options, report_finding, on_error
        self._session = DoctorSession(options.url, options.password)
        self._skipped_checks: dict[str, dict[str, str]] = {
            PRIVILEGE_MISSING_SQLSTATE: {},
            TABLE_MISSING_SQLSTATE: {},
        }
        """The checks that could not run and their error texts, by the SQLSTATE of the error."""

    async def run(self) -> None:
        """Run the checks. Without River's tables, only the checks of the server run."""
        try:
            row = await self._run_connect_check()
            if row is not None:
                await self._run_all_checks(row)
                self._report_skipped_checks(row.session_role)
        except SessionLostError as error:
            self._on_error(error)
            text = f"the connection was lost and cannot be made again: {error}"
            self._report_findings("connect", fail_finding(text, _UNREACHABLE_SERVER_FIX))
        finally:
            await self._session.close()

    async def _run_connect_check(self) -> ServerRow | None:
        try:
            row, finding = await server.check_server(self._session)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._on_error(error)
            self._report_findings(
                "connect", fail_finding(describe_error(error), _connection_error_fix(error))
            )
            return None
        self._report_findings("connect", finding)
        return row

    async def _run_all_checks(self, row: ServerRow) -> None:
        session = self._session
        await self._run_check("pooler", partial(server.check_pooler, session, row))
        await self._run_check("settings", partial(server.check_settings, session, row.session_role))
        await self._run_check("clock", partial(server.check_clock, session))
        await self._run_check("connections", partial(server.check_connection_usage, session))
        state = await self._run_migrations_check()
        if state is not None and not row.is_standby:
            await self._run_schema_checks(row, state)

    async def _run_migrations_check(self) -> SchemaState | None:
        """Report the migrations of the schema, and return the state of the schema. Return None if
        the checks of `SCHEMA_CHECKS` cannot run."""
        schema, url = self._options.schema, self._options.url
        try:
            state = await self._session.read(read_schema_state, schema)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._on_error(error)
            fix = "name the schema with --schema, create it, or let this role use it (`grants`)"
            self._report_findings("schema", fail_finding(describe_error(error), fix))
            return None
        if "river_migration" in state.row_security.hidden_tables:  # its rows cannot be read
            self._report_findings(
                "grants", tables.row_security_finding(state.row_security, schema=state.schema)
            )
        else:
            self._report_findings("schema", *tables.check_migrations(state, schema, url))
        return state if not state.missing_needed_versions() else None

    async def _run_schema_checks(self, row: ServerRow, schema_state: SchemaState) -> None:
        snapshot = DatabaseSnapshot(self._session, row, schema_state, self._options)
        for name, check in SCHEMA_CHECKS:
            await self._run_check(name, partial(check, snapshot))
        program = self._options.program
        if program is not None:
            await self._run_check(
                "code", partial(kinds.check_kinds_missing_in_program, program, snapshot)
            )

    async def _run_check(self, name: str, check: Callable[[], Awaitable[list[Finding]]]) -> None:
        findings: list[Finding] = []
        try:
            findings = await check()
        except (*DATABASE_ERRORS, ConfigError) as error:
            self._on_error(error)
            skipped = self._skipped_checks.get(getattr(error, "sqlstate", None) or "")
            if skipped is not None:
                skipped[name] = describe_error(error)
            else:
                fix = _DAMAGED_DATA_FIX if is_damaged_data_error(error) else _SLOW_READ_FIX
                findings = [warn_finding(f"this check failed: {describe_error(error)}", fix)]
        self._report_findings(name, *findings)

    def _report_findings(self, check_name: str, *findings: Finding) -> None:
        """Report the findings of a check. If there are more problems than
        `PROBLEMS_PER_CHECK_MAX`, report the worst ones and the number of the others."""
        for finding in add_check_name(check_name, limit_problem_count(findings)):
            self._report_finding(finding)

    def _report_skipped_checks(self, role: str) -> None:
        """Report the checks that could not run, because a privilege or a table is missing."""
        role_fix = (
            f'run riverpy doctor with the role of the workers, or grant "{role}" SELECT on '
            "River's tables"
        )
        for code, reason, fix in (
            (PRIVILEGE_MISSING_SQLSTATE, "the role may not run these checks", role_fix),
            (
                TABLE_MISSING_SQLSTATE,
                "these checks need a table that is missing",
                _MISSING_TABLE_FIX,
            ),
        ):
            if checks := self._skipped_checks[code]:
                errors = "; ".join(dict.fromkeys(checks.values()))
                text = f"{reason}: {', '.join(checks)} ({errors})"
                self._report_findings("skipped", warn_finding(text, fix, checks=list(checks)))


def _connection_error_fix(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return "correct the URL"
    if getattr(error, "sqlstate", None) == _DATABASE_MISSING_SQLSTATE:
        return "correct the name of the database in the URL, or create it (CREATE DATABASE)"
    return _UNREACHABLE_SERVER_FIX
