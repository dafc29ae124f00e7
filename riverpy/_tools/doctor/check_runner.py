"""CheckRunner: all looks in their order, none of which can end the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from riverpy._postgres.driver import DATABASE_ERRORS, describe, is_damage
from riverpy._postgres.schema import read_schema_state
from riverpy._tools.doctor.damaged_jobs import check_damaged
from riverpy._tools.doctor.domains import check_domains
from riverpy._tools.doctor.failing_kinds import check_failing
from riverpy._tools.doctor.finding import Finding, Level
from riverpy._tools.doctor.fleet import check_clients, check_leader
from riverpy._tools.doctor.foreign_keys import check_references
from riverpy._tools.doctor.kinds import check_kinds
from riverpy._tools.doctor.leases import check_leases
from riverpy._tools.doctor.listeners import check_listeners, check_listening
from riverpy._tools.doctor.notification_queue import check_notification_queue
from riverpy._tools.doctor.program import Code, check_code
from riverpy._tools.doctor.running_jobs import check_running
from riverpy._tools.doctor.server import (
    check_clock,
    check_connections,
    check_server,
    check_settings,
)
from riverpy._tools.doctor.session import Session, SessionLostError
from riverpy._tools.doctor.set_aside import check_set_aside
from riverpy._tools.doctor.snapshot import PRIVILEGE_LACKING, DatabaseSnapshot
from riverpy._tools.doctor.storage import (
    check_indexes,
    check_locks,
    check_snapshots,
    check_vacuum,
)
from riverpy._tools.doctor.stuck import check_stuck
from riverpy._tools.doctor.tables import check_grants, lines_findings
from riverpy._tools.doctor.waiting_jobs import check_periodic, check_queues, check_scheduled
from riverpy.errors import ConfigError, RiverError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from riverpy._postgres.schema import SchemaState
    from riverpy._tools.doctor.statements import ServerRow

_NO_DATABASE = "3D000"
_UNREACHABLE = (
    "see that the server runs, that the network leads to it, and that it lets this role in"
)
_BUSY = (
    "look again when the database is less busy; a lock or an old snapshot (`locks`, `snapshots`) "
    "makes reading slow too"
)
_DAMAGED = (
    "the server cannot read what it has stored: find out what damages its disk "
    "(docs/faults.md#damaged-rows)"
)
_LOOKS: tuple[tuple[str, Callable[[DatabaseSnapshot], Awaitable[list[Finding]]]], ...] = (
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


@dataclass(frozen=True)
class Request:
    """What is to be examined."""

    url: str
    schema: str | None
    """None: where the search path leads."""
    listen_url: str | None
    stuck_after: timedelta
    max_lag: timedelta
    code: Code | None = None
    """The program that is to work the jobs, if it is known."""


class CheckRunner:
    """One run over one database."""

    def __init__(
        self,
        request: Request,
        report: Callable[[Finding], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Make it.

        Args:
            request: what to examine.
            report: called with each finding as it is found.
            failed: called with each error that became a finding.
        """
        self._request, self._report, self._failed = request, report, failed
        self._session = Session(request.url)
        self._forbidden: dict[str, str] = {}
        """What the role may not look at, each with what the server says."""

    async def run(self) -> None:
        """Look at everything that can be looked at."""
        try:
            server = await self._connect()
            if server is not None:
                await self._look_at_all(server)
                self._report_forbidden(server)
        except SessionLostError as error:
            self._failed(error)
            text = f"the connection was lost, and cannot be made again: {error}"
            self._report(Finding(Level.FAIL, "connect", text, _UNREACHABLE))
        finally:
            await self._session.close()

    async def _connect(self) -> ServerRow | None:
        try:
            server, findings = await check_server(self._session)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._failed(error)
            self._report(Finding(Level.FAIL, "connect", describe(error), _fix(error)))
            return None
        for finding in findings:
            self._report(finding)
        return server

    async def _look_at_all(self, server: ServerRow) -> None:
        for name, look in (
            ("settings", partial(check_settings, self._session, server.role)),
            ("clock", partial(check_clock, self._session)),
            ("connections", partial(check_connections, self._session)),
        ):
            await self._look(name, look)
        state = await self._schema()
        if state is not None and not server.is_standby:
            await self._look_at_jobs(server, state)

    async def _schema(self) -> SchemaState | None:
        """What there is of River's tables. None: nothing that could be looked at further."""
        try:
            async with self._session.reading() as connection:
                state = await read_schema_state(connection, self._request.schema)
        except (*DATABASE_ERRORS, RiverError) as error:
            self._failed(error)
            fix = "name the schema with --schema, make it, or let this role use it (`grants`)"
            self._report(Finding(Level.FAIL, "schema", describe(error), fix))
            return None
        for finding in lines_findings(state, self._request.schema, self._request.url):
            self._report(finding)
        return state if not state.needed() else None

    async def _look_at_jobs(self, server: ServerRow, state: SchemaState) -> None:
        patient = DatabaseSnapshot(
            session=self._session,
            server=server,
            state=state,
            listen_url=self._request.listen_url,
            stuck_after=self._request.stuck_after,
            max_lag=self._request.max_lag,
        )
        for name, look in _LOOKS:
            await self._look(name, partial(look, patient))
        if self._request.code is not None:
            await self._look("code", partial(check_code, self._request.code, patient))

    async def _look(self, name: str, look: Callable[[], Awaitable[list[Finding]]]) -> None:
        try:
            findings = await look()
        except (*DATABASE_ERRORS, ConfigError) as error:
            self._failed(error)
            if getattr(error, "sqlstate", None) == PRIVILEGE_LACKING:
                self._forbidden[name] = describe(error)
                return
            findings = [
                Finding(
                    Level.WARN,
                    name,
                    f"could not be looked at: {describe(error)}",
                    _DAMAGED if is_damage(error) else _BUSY,
                )
            ]
        for finding in findings:
            self._report(finding)

    def _report_forbidden(self, server: ServerRow) -> None:
        if not self._forbidden:
            return
        looks = list(self._forbidden)
        why = "; ".join(dict.fromkeys(self._forbidden.values()))
        self._report(
            Finding(
                Level.WARN,
                "unseen",
                f"{', '.join(looks)} could not be looked at: {why}",
                f'run riverpy doctor with the role of the workers, or grant "{server.role}" '
                "SELECT on River's tables",
                {"looks": looks},
            )
        )


def _fix(error: BaseException) -> str:
    """What helps against an error that kept us from connecting."""
    if isinstance(error, ConfigError):
        return "put the URL right"
    if getattr(error, "sqlstate", None) == _NO_DATABASE:
        return "put the database's name in the URL right, or make the database (CREATE DATABASE)"
    return _UNREACHABLE
