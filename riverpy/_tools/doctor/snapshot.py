"""DatabaseSnapshot: the database that is looked at, and what several looks need to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from riverpy._postgres.clients import client_registered
from riverpy._postgres.damaged_jobs import read_undamaged
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.schema import (
    CLIENTS_VERSION,
    DOMAINS_VERSION,
    MAIN_LINE,
    OWN_LINE,
    PERIODIC_VERSION,
    SLOTS_VERSION,
    STATE_VERSION,
    SchemaState,
)
from riverpy._tools.doctor.statements import (
    doctor_clients,
    doctor_kinds,
    doctor_periodic,
    doctor_places,
    doctor_running,
)
from riverpy._tools.domain_map import DomainMap, read_domains

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.leaders import LeaderRow
    from riverpy._tools.doctor.session import Session
    from riverpy._tools.doctor.statements import (
        ClientRow,
        KindRow,
        PeriodicRow,
        PlaceRow,
        RunningRow,
        ServerRow,
    )

COUNT_LIMIT = 10_001
"""Jobs of one queue and state that are counted."""
COUNT_MOST = 100_000
"""The same of all queues and states together: with many each has less."""
TOUCHED_LIMIT = 1200.0
"""Seconds since a client last said that it works a queue, after which none of any language does:
they say so each 10 minutes."""
KINDS_LIMIT = 1_000
"""Jobs of each queue and state whose kinds are looked at."""
KINDS_MOST = 20_000
"""The same of all queues and states together: with many each has less."""
PRIVILEGE_LACKING = "42501"
"""What the server says of what the role may not do."""
WAITING = ("available", "retryable", "scheduled")
"""The states of jobs that wait."""
RUNNING_LIMIT = 10_001
"""Running jobs that are read."""


def kinds_limit(places: Sequence[PlaceRow]) -> int:
    """Of how many jobs of each of these places the kinds are looked at."""
    return min(KINDS_LIMIT, KINDS_MOST // max(len(places), 1) + 1)


@dataclass(frozen=True)
class Lead:
    """Who leads, or led last."""

    row: LeaderRow
    is_registered: bool | None
    """Whether it is a client of riverpy's. None: not known."""

    @property
    def is_over(self) -> bool:
        """Whether the lease has expired."""
        return self.row.remaining < 0


@dataclass
class DatabaseSnapshot:
    """A database that has River's tables."""

    session: Session
    server: ServerRow
    state: SchemaState
    listen_url: str | None
    """Where clients listen, if not on the session's database URL."""
    stuck_after: timedelta
    """For how long a job may run without being reported."""
    max_lag: timedelta
    """For how long a job may be due without being reported."""
    is_heard: bool = True
    """Whether notifications arrive, as far as was seen."""
    is_queue_full: bool = False
    """Whether the server's queue of notifications is too full for notifications of ours."""
    damaged: dict[int, str] = field(default_factory=dict[int, str])
    """The errors of jobs that the server cannot read, by id, as far as they were met."""
    _places: list[PlaceRow] | None = None

    @property
    def schema(self) -> str:
        """The schema of River's tables."""
        return self.state.schema

    @property
    def made_at(self) -> datetime:
        """When River's tables were made."""
        return min(self.state.applied[MAIN_LINE].values())

    @property
    def has_clients(self) -> bool:
        """Whether there is a table of clients."""
        return CLIENTS_VERSION in self.state.versions(OWN_LINE)

    @property
    def has_slots(self) -> bool:
        """Whether clients can tell their slots and stuck jobs."""
        return SLOTS_VERSION in self.state.versions(OWN_LINE)

    @property
    def has_state(self) -> bool:
        """Whether clients can report rows that they have set aside."""
        return STATE_VERSION in self.state.versions(OWN_LINE)

    @property
    def has_periodic(self) -> bool:
        """Whether there is a table of periodic jobs."""
        return PERIODIC_VERSION in self.state.versions(OWN_LINE)

    async def clients(self) -> list[ClientRow] | None:
        """Who is registered. None: there is no table of clients.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if not self.has_clients:
            return None
        async with self.session.reading() as connection:
            return await doctor_clients(connection, self.schema)

    async def domains(self) -> DomainMap | None:
        """Who has and leads which domain. None: their tables are not there, or not to be read.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if DOMAINS_VERSION not in self.state.versions(OWN_LINE):
            return None
        try:
            async with self.session.reading() as connection:
                return await read_domains(connection, self.schema)
        except DATABASE_ERRORS as error:  # a fleet without domains may lack these grants
            if getattr(error, "sqlstate", None) != PRIVILEGE_LACKING:
                raise
            return None

    async def lead(self) -> Lead | None:
        """Who leads, or led last. None: nobody has, or the last one resigned.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self.session.reading() as connection:
            row = await leader_get(connection, self.schema)
            if row is None:
                return None
            if not self.has_clients:
                return Lead(row, None)
            known = await client_registered(connection, self.schema, client_ids=[row.leader_id])
            return Lead(row, row.leader_id in known)

    async def places(self) -> list[PlaceRow]:
        """Where jobs wait, as it was when this was asked first.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if self._places is None:
            async with self.session.reading() as connection:
                self._places = await doctor_places(
                    connection, self.schema, limit=COUNT_LIMIT, most=COUNT_MOST
                )
        return self._places

    async def periodic(self) -> list[PeriodicRow]:
        """The periodic jobs; none, if there is no table of them.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if not self.has_periodic:
            return []
        async with self.session.reading() as connection:
            return await doctor_periodic(connection, self.schema)

    async def kinds(self, places: Sequence[PlaceRow]) -> list[KindRow]:
        """The kinds of the jobs that wait there, of the first `kinds_limit` of each.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self.session.reading() as connection:
            rows, self.damaged = await read_undamaged(
                connection,
                self.schema,
                WAITING,
                lambda skipped: doctor_kinds(
                    connection, self.schema, places, kinds_limit(places), skipped=skipped
                ),
                self.damaged,
            )
            return rows

    async def running(self, clients: Sequence[ClientRow]) -> list[RunningRow]:
        """The running jobs, the longest first; what these clients say of theirs counts.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self.session.reading() as connection:
            rows, self.damaged = await read_undamaged(
                connection,
                self.schema,
                ["running"],
                lambda skipped: doctor_running(
                    connection,
                    self.schema,
                    clients=clients,
                    long=self.stuck_after,
                    limit=RUNNING_LIMIT,
                    skipped=skipped,
                ),
                self.damaged,
            )
            return rows
