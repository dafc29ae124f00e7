"""ElectionManager: the leader elections of one run, and the maintenance that runs during a term. A
term is the time in which this client is leader.

A client takes part in the leader election of its domain. A domain is a group of queues. Some
maintenance is done once for the whole schema, by the leader of the domain `default`. If no
riverpy client is this leader, the holder of the schema lease (`@schema`) does this maintenance. So
the clients of other domains also try to acquire the schema lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._leading.domain_queues import DomainQueueReader
from riverpy._leading.election import Election, receive_leadership_notification
from riverpy._leading.leader_stores import DomainLeaseStore, LeaderRowStore, SchemaLeaseStore
from riverpy._leading.term_context import TermContext
from riverpy._leading.term_fence import TermFence
from riverpy._leading.term_runner import TermServicesRunner
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.timing import LeaseTiming
from riverpy._maintenance.services import (
    DefaultLeaderChangeCheck,
    LeaderFunctionService,
    make_domain_services,
    make_schema_services,
)
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME, domain_lease_name
from riverpy._postgres.connection import DedicatedConnection
from riverpy._postgres.leases import LEASE_TOPIC as LEASE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from riverpy._clock import Timer
    from riverpy._leases.lease import Lease
    from riverpy._leases.store import LeaseStore
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import MaintenanceService
    from riverpy._postgres.skipped_rows import SkippedRowReport
    from riverpy._work.run_context import RunContext

SHARED_CONNECTION_WAIT_MAX = 60.0
"""The longest time that a service waits for the connection that it shares with other services, in
seconds. Each other service may use the connection first, for up to 5 s."""


class ElectionManager:
    """The elections of one run: the election of the client's domain and, if this domain is not
    `default`, the election for the schema lease."""

    def __init__(self, run: RunContext, timer: Timer) -> None:
        """Create the elections, but do not start them. `timer` measures time and waits."""
        self.maintenance_elections = [MaintenanceElection(run, timer, run.config.domain)]
        """One election for each leader lease. The election of the client's domain is the first."""
        if run.config.domain != DEFAULT_DOMAIN:
            self.maintenance_elections.append(MaintenanceElection(run, timer, SCHEMA_LEASE_NAME))
        self._domain_election = self.maintenance_elections[0]

    @property
    def is_leader(self) -> bool:
        """Whether this client is the leader of its domain, and its lease is valid now."""
        return self._domain_election.election.lease is not None

    @property
    def lease_engine(self) -> LeaseEngine:
        """The engine that renews the lease of the client's domain."""
        return self._domain_election.lease_engine

    @property
    def is_standby(self) -> bool:
        """Whether this client would become leader of its domain now if the domain had no leader."""
        return bool(self.lease_engine.standby_lease_names)

    @property
    def standby_lease_names(self) -> list[str]:
        """The names of the leader leases for which this client stands by: it would acquire these
        leases if they were free."""
        elections = self.maintenance_elections
        return [name for one in elections for name in one.lease_engine.standby_lease_names]

    @property
    def elections(self) -> Sequence[Election]:
        """All elections. The election of the client's domain is the first."""
        return [one.election for one in self.maintenance_elections]

    @property
    def notification_handler_by_topic(self) -> Mapping[str, Callable[[str], None]]:
        """The functions that handle notifications about leases, by topic."""
        if len(self.maintenance_elections) == 1:  # only one election: the domain is `default`
            return {
                "river_leadership": lambda payload: receive_leadership_notification(
                    self.lease_engine, payload
                )
            }
        return {LEASE_TOPIC: self._receive_lease_notification}

    def _receive_lease_notification(self, payload: str) -> None:
        for one in self.maintenance_elections:
            one.lease_engine.receive_notification(payload)

    @property
    def skipped_rows(self) -> list[SkippedRowReport]:
        """The rows that the running maintenance services skip for a while, because statements on
        these rows fail."""
        return [row for one in self.maintenance_elections for row in one.skipped_rows]

    def resync(self) -> None:
        """Check all leases, and read again which domain owns which queue, because notifications may
        have been lost."""
        for one in self.maintenance_elections:
            one.lease_engine.wake_all_waiting_callers()
            one.forget_queue_owners()

    def reread_queue_owners(self) -> None:
        """Read again which domain owns which queue, because an owner has changed."""
        for one in self.maintenance_elections:
            one.forget_queue_owners()
            one.wake_services()

    async def close(self, timeout: float) -> bool:
        """Stop maintenance that is still running. Wait at most `timeout` seconds until it has
        ended. Return whether it has ended."""
        ended: list[bool] = []

        async def close_election(election: Election) -> None:
            ended.append(await election.close(timeout))

        async with anyio.create_task_group() as tasks:
            for election in self.elections:
                tasks.start_soon(close_election, election)
        return all(ended)


class MaintenanceElection:
    """The election for one leader lease, with the maintenance services that run while this client
    holds the lease."""

    def __init__(self, run: RunContext, timer: Timer, domain: str) -> None:
        """`domain` is a leader domain, or `SCHEMA_LEASE_NAME`."""
        self._run, self._timer, self._domain = run, timer, domain
        self._domain_queues: DomainQueueReader | None = None
        self._services: Sequence[MaintenanceService] = ()
        lease_name, self._store = _make_lease_name_and_store(run, domain)
        self.lease_engine = LeaseEngine(
            self._store,
            holder=run.client.id,
            timing=LeaseTiming.from_config(run.config),
            timer=timer,
            publish_event=run.client.subscriptions.publish_event,
        )
        self.election = Election(
            self.lease_engine,
            lease_name,
            self._run_leader_term,
            domain=domain,
            on_leadership_change=None
            if domain == SCHEMA_LEASE_NAME
            else run.client.leadership.publish,
        )

    def make_maintenance_services(self, context: TermContext) -> list[MaintenanceService]:
        """Return the services that run in a term."""
        client, heartbeat = self._run.client, self._run.heartbeat
        if not isinstance(self._store, SchemaLeaseStore):
            functions = client.singletons.leader_functions.values()
            return [
                *make_domain_services(context, heartbeat, client.periodic_jobs, client.inserter),
                *(LeaderFunctionService(context, function) for function in functions),
            ]
        lease, has_foreign_leader = context.fence.lease, self._store.has_non_riverpy_leader

        def resign_lease(reason: str) -> None:
            self.lease_engine.resign(lease, reason, pause=self.lease_engine.timing.attempt_interval)

        return [
            DefaultLeaderChangeCheck(context, resign_lease, has_foreign_leader=has_foreign_leader),
            *make_schema_services(context, heartbeat, should_reindex=not has_foreign_leader),
        ]

    def forget_queue_owners(self) -> None:
        """Forget which domain owns which queue, so that the next run of a service reads it
        again."""
        if self._domain_queues is not None:
            self._domain_queues.forget_queue_owners()

    @property
    def skipped_rows(self) -> list[SkippedRowReport]:
        """The rows that the maintenance services skip for a while, because statements on these rows
        fail."""
        if self.election.lease is None:
            return []
        reports = [report for service in self._services for report in service.skipped_row_reporters]
        return [row for report in reports for row in report()]

    def wake_services(self) -> None:
        """Wake each service, so that it runs now."""
        for service in self._services:
            service.wake()

    async def _run_leader_term(self, lease: Lease, scope: StopScope) -> None:
        runner = TermServicesRunner(
            lease,
            self._make_term_context_and_services,
            timer=self._timer,
            on_services_started=self.election.reset_failed_term_count,
            resign=lambda error: self.election.resign_after_failure(lease, error),
        )
        await runner.run(scope)

    def _make_term_context_and_services(
        self, lease: Lease
    ) -> tuple[TermContext, Sequence[MaintenanceService]]:
        run, connection = self._run, self._make_shared_connection("maintenance")
        self._domain_queues = DomainQueueReader(
            connection,
            run.schema,
            self._domain,
            has_notifications=not run.config.poll_only,
            timer=self._timer,
            dead_after=run.config.dead_after,
            contact_duration=run.heartbeat.unbroken_contact_seconds,
        )
        context = TermContext(
            fence=TermFence(lease),
            config=run.config,
            workers=run.client.workers,
            connection=connection,
            long_statement_connection=self._make_shared_connection("cleaning"),
            timer=self._timer,
            open_direct_connection=run.connections.connector.reindexer_connect_function,
            read_queue_scope=self._domain_queues.read_queue_scope,
            ended_job_publisher=run.client.subscriptions,
        )
        self._services = self.make_maintenance_services(context)
        return context, self._services

    def _make_shared_connection(self, name: str) -> DedicatedConnection:
        """Return a connection that several services share. They use it one after another."""
        run = self._run
        return DedicatedConnection(
            name,
            lambda: run.connections.connector.connect_for_maintenance(f"riverpy {name}"),
            run.connections.outage_tracker,
            trace_internal=run.config.trace_internal,
            lock_wait_timeout=SHARED_CONNECTION_WAIT_MAX,
        )


def _make_lease_name_and_store(run: RunContext, domain: str) -> tuple[str, LeaseStore]:
    """Return the name and the store of the lease of a leader domain, or of the schema lease."""
    connection, schema = run.connections.reserved, run.schema
    if domain == DEFAULT_DOMAIN:
        ttl = run.config.leader_ttl
        return domain, LeaderRowStore(connection, schema, leader_id=run.client.id, ttl=ttl)
    if domain == SCHEMA_LEASE_NAME:
        return domain, SchemaLeaseStore(connection, schema)
    return domain_lease_name(domain), DomainLeaseStore(connection, schema)
