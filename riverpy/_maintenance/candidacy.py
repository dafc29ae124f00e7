"""Candidacy: what one run needs to stand for election and to lead, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._cluster.elector import Elector
from riverpy._cluster.trust import LeaseTiming, Trust
from riverpy._db.connection import DedicatedConnection
from riverpy._db.leaders import LeaderTable
from riverpy._maintenance.base import Office
from riverpy._maintenance.client_reaper import ClientReaper
from riverpy._maintenance.execution_cleaner import ExecutionCleaner
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.leader import MaintenanceLeader
from riverpy._maintenance.maintainer import Maintainer
from riverpy._maintenance.mandate import Mandate
from riverpy._maintenance.periodic_enqueuer import PeriodicEnqueuer
from riverpy._maintenance.queue_cleaner import QueueCleaner
from riverpy._maintenance.reindexer import reindexers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._clock import Timer
    from riverpy._cluster.heartbeat import Heartbeat
    from riverpy._cluster.trust import Term
    from riverpy._db.connection import Outage
    from riverpy._insert import Inserter
    from riverpy._maintenance.base import MaintenanceService
    from riverpy.config import Config
    from riverpy.drivers.asyncpg import Connection
    from riverpy.events import LeadershipChange
    from riverpy.periodic import PeriodicJobs
    from riverpy.worker import Workers


class Candidacy:
    """The elector of one run, and the maintenance of each term that it wins."""

    def __init__(
        self,
        config: Config,
        *,
        client_id: str,
        workers: Workers,
        reserved: DedicatedConnection,
        connect: Callable[[str], Awaitable[Connection]],
        connect_direct: Callable[[], Awaitable[Connection]] | None,
        outage: Outage,
        changed: Callable[[LeadershipChange], None],
        heartbeat: Heartbeat,
        periodic_jobs: PeriodicJobs,
        inserter: Inserter,
        timer: Timer,
    ) -> None:
        """Make it; nothing is connected.

        Args:
            config, client_id, workers: the client's.
            reserved: the connection on which the lease is held.
            connect: makes a connection for maintenance that has this name.
            connect_direct: makes one that leads past any pooler; None: there is no way.
            outage: told of losses and recoveries.
            changed: told of each transition.
            heartbeat: the run's.
            periodic_jobs, inserter: the client's.
            timer: by which leading measures and waits.
        """
        self._config, self._workers = config, workers
        self._connect, self._connect_direct = connect, connect_direct
        self._outage, self._timer = outage, timer
        self._heartbeat = heartbeat
        self._periodic_jobs, self._inserter = periodic_jobs, inserter
        self._trust = Trust(LeaseTiming.of(config), timer)
        self.maintenance = MaintenanceLeader(
            self._make, grace=self._trust.timing.grace, timer=timer
        )
        self.elector = Elector(
            leader_id=client_id,
            trust=self._trust,
            store=LeaderTable(reserved, config.schema),
            keeper=self.maintenance,
            timer=timer,
            is_outage_told=lambda: outage.is_told,
            changed=changed,
        )
        self.maintenance.resign = self.elector.resign
        self.maintenance.is_up = self.elector.term_is_up

    @property
    def is_leader(self) -> bool:
        """Whether this client leads, and may act so now."""
        return self._trust.term is not None

    def _make(self, term: Term) -> Maintainer:
        mandate = Mandate(
            term, self._trust, schema=self._config.schema, fenced_out=self.elector.fenced_out
        )
        office = Office(
            mandate=mandate,
            config=self._config,
            workers=self._workers,
            connection=self._connection("maintenance"),
            cleaning=self._connection("cleaning"),
            timer=self._timer,
            connect_direct=self._connect_direct,
        )
        return Maintainer(
            office, services(office, self._heartbeat, self._periodic_jobs, self._inserter)
        )

    def _connection(self, name: str) -> DedicatedConnection:
        return DedicatedConnection(name, lambda: self._connect(f"riverpy {name}"), self._outage)


def services(
    office: Office, heartbeat: Heartbeat, periodic_jobs: PeriodicJobs, inserter: Inserter
) -> list[MaintenanceService]:
    """The services of a term, in the order in which they start."""
    contact = None if heartbeat.registered_at is None else heartbeat.contact
    return [
        JobScheduler(office),
        JobRescuer(office, contact),
        PeriodicEnqueuer(office, periodic_jobs, inserter),
        JobCleaner(office),
        QueueCleaner(office),
        ExecutionCleaner(office),
        *([] if contact is None else [ClientReaper(office, contact)]),
        *reindexers(office),
    ]
