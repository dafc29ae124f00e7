"""LeaderSetup: what one run needs to stand for election and to lead, put together.

A client stands for the lead of its domain. One of a domain other than `default` stands for that of
the schema too: for the work that a schema has one of, which is done by who leads `default` if
somebody does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio

from riverpy._leading.announcements import hear_leader, hear_lease
from riverpy._leading.domain_queues import DomainQueues, of_default, of_domain, orphans
from riverpy._leading.elector import Elector
from riverpy._leading.lease_store import LeadLease, SchemaLease
from riverpy._leading.term_fence import TermFence
from riverpy._leading.term_runner import TermRunner
from riverpy._leases.validity import LeaseTiming, LeaseValidity
from riverpy._maintenance.base import TermContext
from riverpy._maintenance.default_leader_check import DefaultLeaderCheck
from riverpy._maintenance.leader_functions import LeaderFunctionService
from riverpy._maintenance.services import domain_services, schema_services
from riverpy._maintenance.term_services import Maintainer
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE, domain_lease
from riverpy._postgres.connection import DedicatedConnection
from riverpy._postgres.leaders import LeaderTable
from riverpy._postgres.leases import TOPIC as LEASE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from riverpy._clients.heartbeat import Heartbeat
    from riverpy._clock import Timer
    from riverpy._insert.inserter import Inserter
    from riverpy._leading.domain_queues import Owner
    from riverpy._leading.elector import LeaderStore
    from riverpy._leading.queue_scope import Scope
    from riverpy._leases.validity import Term
    from riverpy._maintenance.base import MaintenanceService
    from riverpy._postgres.connection import ConnectionOutage
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.set_aside import SetAsideRow
    from riverpy.config import Config
    from riverpy.events import LeadershipChange
    from riverpy.periodic import PeriodicJobs
    from riverpy.singletons import LeaderFunction
    from riverpy.worker import Workers

TURN_WAIT = 60.0
"""Seconds for which a service waits for the connection that it shares with others. A statement may
take 5 s, and each of the others may be before it."""


class LeaderSetup:
    """What one run stands for, and the maintenance of each term that it wins."""

    def __init__(
        self,
        config: Config,
        *,
        client_id: str,
        workers: Workers,
        reserved: DedicatedConnection,
        connect: Callable[[str], Awaitable[Connection]],
        connect_direct: Callable[[], Awaitable[Connection]] | None,
        outage: ConnectionOutage,
        changed: Callable[[LeadershipChange], None],
        heartbeat: Heartbeat,
        periodic_jobs: PeriodicJobs,
        inserter: Inserter,
        functions: Sequence[LeaderFunction],
        timer: Timer,
    ) -> None:
        """Make it; nothing is connected.

        Args:
            config, client_id, workers: the client's.
            reserved: the connection on which leases are held.
            connect: makes a connection for maintenance that has this name.
            connect_direct: makes one that leads past any pooler; None: there is no way.
            outage: told of losses and recoveries.
            changed: told of each transition of the lead of the client's domain.
            heartbeat: the run's.
            periodic_jobs, inserter: the client's.
            functions: of the user's, which run while the client leads its domain.
            timer: by which leading measures and waits.
        """
        self.config, self.client_id, self.workers = config, client_id, workers
        self.connect, self.connect_direct = connect, connect_direct
        self.outage, self.timer = outage, timer
        self._reserved, self.heartbeat = reserved, heartbeat
        is_default = config.domain == DEFAULT_DOMAIN
        self.is_divided = not is_default
        """Whether domains may have queues, so that leaders read which before each pass. Else they
        look now and then whether they may."""
        self._own = _LeaderSlot(
            self,
            config.domain,
            LeaderTable(reserved, config.schema)
            if is_default
            else LeadLease(reserved, config.schema, domain_lease(config.domain)),
            of_default if is_default else of_domain(config.domain),
            lambda context: [
                *domain_services(context, heartbeat, periodic_jobs, inserter),
                *(LeaderFunctionService(context, function) for function in functions),
            ],
            changed,
        )
        self._seats = [self._own] if is_default else [self._own, self._schema_seat()]

    @property
    def is_leader(self) -> bool:
        """Whether this client leads its domain, and may act so now."""
        return self._own.trust.term is not None

    @property
    def elector(self) -> Elector:
        """That of the client's domain."""
        return self._own.elector

    @property
    def electors(self) -> Sequence[Elector]:
        """All of them."""
        return [seat.elector for seat in self._seats]

    @property
    def topics(self) -> Mapping[str, Callable[[str], None]]:
        """What is to be heard, and by whom."""
        if self.config.domain == DEFAULT_DOMAIN:
            return {"river_leadership": lambda payload: hear_leader(self.elector, payload)}
        return {LEASE_TOPIC: self._heard_lease}

    def _heard_lease(self, payload: str) -> None:
        hear_lease(self.elector, domain_lease(self.config.domain), payload)
        hear_lease(self.electors[1], SCHEMA_LEASE, payload)

    @property
    def set_aside(self) -> list[SetAsideRow]:
        """The rows that services of the present terms have set aside."""
        return [row for seat in self._seats for row in seat.set_aside]

    def resync(self) -> None:
        """A connection was lost and made again: what was announced meanwhile was not heard."""
        for seat in self._seats:
            seat.elector.resync()
            seat.forget_owners()

    def owners_changed(self) -> None:
        """Queues have changed hands: leaders look at once."""
        self.is_divided = True
        for seat in self._seats:
            seat.forget_owners()
            seat.wake()

    async def close(self, bound: float) -> bool:
        """End all maintenance that runs, for the client stops; wait for at most `bound` seconds.
        Returns whether nothing runs."""
        async with anyio.create_task_group() as tasks:
            for seat in self._seats:
                tasks.start_soon(seat.maintenance.close, bound)
        return all(seat.maintenance.is_clear for seat in self._seats)

    def _schema_seat(self) -> _LeaderSlot:
        store = SchemaLease(self._reserved, self.config.schema)

        def make_services(context: TermContext) -> list[MaintenanceService]:
            is_foreign = store.is_foreign_led
            give_way = partial(seat.elector.give_way, epoch=context.fence.term.epoch)
            watch = DefaultLeaderCheck(context, give_way, is_foreign_led=is_foreign)
            return [watch, *schema_services(context, self.heartbeat, may_reindex=not is_foreign)]

        seat = _LeaderSlot(self, SCHEMA_LEASE, store, orphans, make_services, None)
        return seat


class _LeaderSlot:
    """One lead: who bids for it, and what is done while it is held."""

    def __init__(
        self,
        candidacy: LeaderSetup,
        domain: str,
        store: LeaderStore,
        choose: Callable[[Sequence[Owner]], Scope],
        make_services: Callable[[TermContext], list[MaintenanceService]],
        changed: Callable[[LeadershipChange], None] | None,
    ) -> None:
        """Make it.

        Args:
            candidacy: what all seats of the run share.
            domain: whose lead it is.
            store: its row.
            choose: which queues are maintained.
            make_services: makes the services of a term.
            changed: told of each transition.
        """
        self._run, self._store = candidacy, store
        self._choose, self._make_services = choose, make_services
        self._territory: DomainQueues | None = None
        self._services: Sequence[MaintenanceService] = ()
        timer = candidacy.timer
        self.trust = LeaseValidity(LeaseTiming.of(candidacy.config), timer)
        self.maintenance = TermRunner(self._make, grace=self.trust.timing.grace, timer=timer)
        self.elector = Elector(
            leader_id=candidacy.client_id,
            trust=self.trust,
            store=store,
            services=self.maintenance,
            timer=timer,
            domain=domain,
            is_outage_told=lambda: candidacy.outage.is_logged,
            changed=changed,
        )
        self.maintenance.resign = self.elector.resign
        self.maintenance.is_up = self.elector.term_is_up

    def forget_owners(self) -> None:
        """Read anew whose the queues are, at the next pass."""
        if self._territory is not None:
            self._territory.forget()

    @property
    def set_aside(self) -> list[SetAsideRow]:
        """The rows that services of the present term have set aside."""
        if self.trust.term is None:
            return []
        reports = [report for service in self._services for report in service.reports]
        return [row for report in reports for row in report()]

    def wake(self) -> None:
        """Begin a pass of each service now."""
        for service in self._services:
            service.wake()

    def _make(self, term: Term) -> Maintainer:
        run, connection = self._run, self._connection("maintenance")
        fence = TermFence(term, self.trust, store=self._store, fenced_out=self.elector.fenced_out)
        self._territory = DomainQueues(
            connection,
            run.config.schema,
            self._choose,
            is_divided=lambda: run.is_divided,
            listens=not run.config.poll_only,
            timer=run.timer,
            dead_after=run.config.dead_after,
            contact=run.heartbeat.contact,
        )
        context = TermContext(
            fence=fence,
            config=run.config,
            workers=run.workers,
            connection=connection,
            cleaning=self._connection("cleaning"),
            timer=run.timer,
            connect_direct=run.connect_direct,
            scope=self._territory.scope,
        )
        self._services = self._make_services(context)
        return Maintainer(context, self._services)

    def _connection(self, name: str) -> DedicatedConnection:
        """One that services share: each gets its turn, however slow the others are."""
        run = self._run
        return DedicatedConnection(
            name,
            lambda: run.connect(f"riverpy {name}"),
            run.outage,
            trace_internal=run.config.trace_internal,
            wait=TURN_WAIT,
        )
