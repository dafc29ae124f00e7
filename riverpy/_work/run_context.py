"""RunContext: the objects that all parts of one run of a client use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from riverpy._fleet.publisher import FleetPublisher
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.clients import ClientRegistration
from riverpy._postgres.connection import (
    ConnectionOutageTracker,
    DedicatedConnection,
    close_connections,
)
from riverpy._postgres.connector import Connector
from riverpy._postgres.schema import (
    DOMAINS_MIGRATION,
    LEASE_REPORTS_MIGRATION,
    require_migration_version,
)
from riverpy._version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._clients.heartbeat import HeartbeatWriter
    from riverpy._insert.inserter import Inserter
    from riverpy._leading.subscriptions import LeadershipPublisher
    from riverpy._leases.client_leases import ClientLeaseEngine
    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.singletons import SingletonRunner
    from riverpy._leases.spreading import LeaseSpreader
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.passwords import PasswordSource
    from riverpy._postgres.schema import SchemaState
    from riverpy._waiting.listener import SharedListener
    from riverpy._work.attempt_store import AttemptStore
    from riverpy._work.child_pool import ChildProcessPool
    from riverpy._work.counters import MetricEmitter, RunCounters
    from riverpy._work.subscriptions import SubscriptionManager
    from riverpy.config import Config, QueueConfig
    from riverpy.periodic import PeriodicJobs
    from riverpy.singletons import SingletonRegistry
    from riverpy.worker import Workers

FLEET_OUTAGE_EFFECT = "clients that follow this one miss events"
"""The text that logs use to explain the effect of an outage of the connection for events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParts:
    """The parts of a client that all its runs use."""

    id: str
    url: str | None
    password: PasswordSource | None
    config: Config
    workers: Workers
    queues: dict[str, QueueConfig]
    """The queues whose jobs the client runs now. A run adds and removes queues in this dict."""
    singletons: SingletonRegistry
    leases: ClientLeaseEngine
    subscriptions: SubscriptionManager
    listener: SharedListener
    leadership: LeadershipPublisher
    periodic_jobs: PeriodicJobs
    inserter: Inserter
    child_processes: ChildProcessPool
    attempt_store: AttemptStore

    def make_registration(self) -> ClientRegistration:
        """Return the values that a run stores in the row of the client."""
        return ClientRegistration(
            client_id=self.id,
            queues=list(self.queues),
            kinds=list(self.workers),
            is_candidate=self.config.candidate,
            poll_only=self.config.poll_only,
            version=VERSION,
            dead_after=self.config.dead_after,
        )

    @property
    def slots_per_queue(self) -> dict[str, int]:
        """The number of slots of each queue."""
        return {name: queue.max_workers for name, queue in self.queues.items()}


class RunConnections:
    """The dedicated connections of one run. `on_reconnect` is called when the connection for claims
    or for results was opened again after a loss."""

    def __init__(self, client: ClientParts, on_reconnect: Callable[[], None]) -> None:
        self.connector = connector = Connector(client.url, client.config, client.password)
        self.outage_tracker = ConnectionOutageTracker(client_id=client.id)
        self._config, self._client_id = client.config, client.id
        self.claims = self._make_connection("claims", connector.connect_for_claims, on_reconnect)
        self.results = self._make_connection("results", connector.connect_for_results, on_reconnect)
        self.reserved = self._make_connection(
            "reserved", connector.connect_for_leases_and_heartbeats
        )

    def _make_connection(
        self,
        name: str,
        connect: Callable[[], Awaitable[Connection]],
        on_reconnected: Callable[[], None] | None = None,
    ) -> DedicatedConnection:
        return DedicatedConnection(
            name,
            connect,
            self.outage_tracker,
            through_pooler=self._config.pooler,
            trace_internal=self._config.trace_internal,
            on_reconnected=on_reconnected,
        )

    def make_fleet_event_connection(self) -> DedicatedConnection:
        """Return a connection that sends the events of this client to other clients. It is not in
        `all_connections`, because it is open only while another client follows the events."""
        return DedicatedConnection(
            "fleet",
            self.connector.connect_for_fleet_events,
            ConnectionOutageTracker(outage_effect=FLEET_OUTAGE_EFFECT, client_id=self._client_id),
            through_pooler=self._config.pooler,
            trace_internal=self._config.trace_internal,
        )

    @property
    def all_connections(self) -> tuple[DedicatedConnection, ...]:
        """The connections of the run for claims, for results, and for leases and heartbeats."""
        return self.claims, self.results, self.reserved

    async def close(self) -> None:
        """Close `all_connections`."""
        await close_connections(self.all_connections)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects that all parts of one run of a client use."""

    client: ClientParts
    connections: RunConnections
    heartbeat: HeartbeatWriter
    counters: RunCounters
    metric_emitter: MetricEmitter

    @property
    def config(self) -> Config:
        """The client's settings."""
        return self.client.config

    @property
    def kinds_to_claim(self) -> list[str] | None:
        """The kinds of jobs to claim, including aliases; None means all kinds."""
        return list(self.client.workers) if self.config.known_kinds_only else None

    @property
    def schema(self) -> str | None:
        """The schema of River's tables; None means that the search path decides."""
        return self.client.config.schema

    def require_needed_migrations(self, state: SchemaState) -> None:
        """Check that the migrations which the client's settings need are applied.

        Raises:
            SchemaMissingError: a migration is missing. The message has the command that applies it.
        """
        for is_needed, needed_version in (
            (self.config.domain != DEFAULT_DOMAIN, DOMAINS_MIGRATION),
            (self.config.spread_leases, LEASE_REPORTS_MIGRATION),
        ):
            if is_needed:
                require_migration_version(state, needed_version, self.schema, url=self.client.url)

    def make_fleet_event_publisher(self) -> FleetPublisher:
        """Return the service that sends the events of this client to the clients that follow it."""
        return FleetPublisher(
            self.client.id,
            self.client.subscriptions,
            self.connections.make_fleet_event_connection,
            self.schema,
        )

    def make_lease_spreader(
        self, runners: Sequence[SingletonRunner], engine: LeaseEngine
    ) -> LeaseSpreader | None:
        """Return the service that hands singletons over to clients that run fewer of them. Return
        None if the setting `spread_leases` is off."""
        if not self.config.spread_leases:
            return None
        from riverpy._leases.spreading import HEARTBEAT_AGE_MAX_SHARE_OF_DEAD_AFTER, LeaseSpreader

        dead_after = self.config.dead_after.total_seconds()
        return LeaseSpreader(
            runners,
            engine,
            self.connections.reserved,
            self.schema,
            heartbeat_age_max=dead_after * HEARTBEAT_AGE_MAX_SHARE_OF_DEAD_AFTER,
        )
