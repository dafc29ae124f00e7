"""RunStatus: how one run of a client stands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from riverpy.stats import ClientStats, QueueStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from riverpy._clients.heartbeat import Heartbeat
    from riverpy._leading.elector import Elector
    from riverpy._leases.client_leases import ClientLeases
    from riverpy._leases.singletons import SingletonRunners
    from riverpy._lifecycle import ServiceGroup
    from riverpy._postgres.connection import ConnectionOutage, DedicatedConnection
    from riverpy._postgres.notifier import Notifier
    from riverpy._work.completer import Completer
    from riverpy._work.counters import Counters
    from riverpy._work.producer import Producer
    from riverpy._work.running_attempts import RunningAttempts

State = Literal["starting", "working", "stopping", "stopped"]
MEASURED_LAG = 1.0
"""Seconds of the loop's lag from which services are forgiven what they could not do."""


class RunStatus:
    """Sees all parts of a run, and changes none."""

    def __init__(
        self,
        counters: Counters,
        *,
        client_id: str,
        domain: str,
        connections: list[DedicatedConnection],
        outage: ConnectionOutage,
        heartbeat: Heartbeat,
        work: RunningAttempts,
        completer: Completer,
        producers: Mapping[str, Producer],
        elector: Elector | None,
        is_leader: Callable[[], bool],
        singletons: SingletonRunners,
        leases: ClientLeases,
    ) -> None:
        """Make it of the run's parts."""
        self._counters, self._client_id, self._domain = counters, client_id, domain
        self._connections, self._outage = connections, outage
        self._heartbeat, self._work, self._completer = heartbeat, work, completer
        self._producers, self._elector, self._is_leader = producers, elector, is_leader
        self._singletons, self._leases = singletons, leases
        self._started_at = time.monotonic()
        self.notifier: Notifier | None = None
        self.groups: list[ServiceGroup] = []
        """Those whose services must turn."""
        self.state: State = "starting"

    def turned(self, late: float) -> None:
        """The event loop turned, so many seconds late."""
        self._counters.loop_lag.add(late)
        if late > MEASURED_LAG:
            for group in self.groups:
                group.postpone(late)

    def stats(self, dropped_events: int) -> ClientStats:
        """How it stands now."""
        notifier, elector, counters = self.notifier, self._elector, self._counters
        connections = {one.name: one.is_up for one in self._connections}
        if notifier is not None:
            connections["listener"] = notifier.is_up
        return ClientStats(
            state=self.state,
            client_id=self._client_id,
            domain=self._domain,
            uptime=time.monotonic() - self._started_at,
            is_leader=self._is_leader(),
            listener=self._listener,
            connections=connections,
            outages=self._outage.count,
            backlog=len(self._completer.unstored),
            results_set_aside=tuple(aside.row.id for aside in self._completer.set_aside),
            results_refused=counters.results_refused,
            dropped_events=dropped_events,
            heartbeat_age=self._heartbeat.age,
            lease_renewals=elector.renewals if elector else 0,
            lease_renewal_failures=elector.renewal_failures if elector else 0,
            loop_lag=counters.loop_lag.histogram(),
            stuck=tuple(name for group in self.groups for name in group.stuck()),
            stuck_jobs=len(self._work.stuck),
            kinds={kind: of_kind.stats() for kind, of_kind in counters.kinds.items()},
            queues={name: self._queue(one) for name, one in self._producers.items()},
            singletons=self._singletons.stats,
            leases=self._leases.stats,
        )

    @property
    def _listener(self) -> Literal["proven", "deaf", "off"]:
        if self.notifier is None or self.state == "stopped":
            return "off"
        return "proven" if self.notifier.proven else "deaf"

    @staticmethod
    def _queue(producer: Producer) -> QueueStats:
        counters = producer.counters
        return QueueStats(
            slots=producer.slots,
            running=producer.running,
            paused=producer.paused,
            poll_interval=producer.poll,
            claim_age=producer.claim_age,
            claims=counters.claims.histogram(),
            batches=counters.batches.histogram(),
            claim_failures=counters.claim_failures,
            waits=counters.waits.histogram(),
            set_aside=tuple(producer.skipped),
        )
