"""RunStatus: the current state and the statistics of one run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from riverpy.stats import ClientStats, QueueStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from riverpy._leases.singletons import SingletonRunners
    from riverpy._lifecycle import ServiceGroup
    from riverpy._postgres.notifier import Notifier
    from riverpy._work.completer import Completer
    from riverpy._work.leader_setup import LeaderSetup
    from riverpy._work.producer import Producer
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts

State = Literal["starting", "working", "stopping", "stopped"]
MEASURED_LAG = 1.0
"""Seconds. A longer lag of the event loop extends the deadlines by which services must make
progress."""


class RunStatus:
    """Reads the state of all parts of a run."""

    def __init__(
        self,
        run: RunContext,
        *,
        running: RunningAttempts,
        completer: Completer,
        producers: Mapping[str, Producer],
        leader_setup: LeaderSetup | None,
        singletons: SingletonRunners,
        notifier: Notifier | None,
    ) -> None:
        self._run, self._running, self._completer = run, running, completer
        self._producers, self._leader_setup = producers, leader_setup
        self._singletons, self._notifier = singletons, notifier
        self._started_at = time.monotonic()
        self._groups: list[ServiceGroup] = []
        self.state: State = "starting"

    def add_group(self, group: ServiceGroup) -> None:
        """Add a group of services, so that its stuck services are reported."""
        self._groups.append(group)

    def record_lag(self, seconds: float) -> None:
        """Record how many seconds the event loop was late."""
        self._run.counters.loop_lag.add(seconds)
        if seconds > MEASURED_LAG:
            for group in self._groups:
                group.postpone(seconds)

    def stats(self) -> ClientStats:
        """Return the current state and the counts of the run."""
        run, notifier, counters = self._run, self._notifier, self._run.counters
        leader_setup = self._leader_setup
        engine = None if leader_setup is None else leader_setup.engine
        connections = {one.name: one.is_up for one in run.connections.all}
        if notifier is not None:
            connections["listener"] = notifier.is_up
        return ClientStats(
            state=self.state,
            client_id=run.client.id,
            domain=run.config.domain,
            uptime=time.monotonic() - self._started_at,
            is_leader=leader_setup is not None and leader_setup.is_leader,
            listener=self._listener,
            connections=connections,
            outages=run.connections.outage.count,
            backlog=len(self._completer.unstored),
            results_set_aside=tuple(aside.row.id for aside in self._completer.set_aside),
            results_refused=counters.results_refused,
            dropped_events=run.client.subscriptions.dropped,
            heartbeat_age=run.heartbeat.age,
            lease_renewals=engine.held.renewals if engine else 0,
            lease_renewal_failures=engine.held.renewal_failures if engine else 0,
            loop_lag=counters.loop_lag.histogram(),
            stuck=tuple(name for group in self._groups for name in group.stuck()),
            stuck_jobs=len(self._running.stuck.keeps_slot),
            kinds={kind: of_kind.stats() for kind, of_kind in counters.kinds.items()},
            queues={name: self._queue(one) for name, one in self._producers.items()},
            singletons=self._singletons.stats,
            leases=run.client.leases.stats,
        )

    @property
    def _listener(self) -> Literal["proven", "deaf", "off"]:
        if self._notifier is None or self.state == "stopped":
            return "off"
        return "proven" if self._notifier.proven else "deaf"

    def _queue(self, producer: Producer) -> QueueStats:
        counters = self._run.counters.queues[producer.queue]
        return QueueStats(
            slots=producer.slots,
            running=producer.running,
            paused=producer.paused,
            poll_interval=producer.poll_interval,
            claim_age=producer.claim_age,
            claims=counters.claims.histogram(),
            batches=counters.batches.histogram(),
            claim_failures=counters.claim_failures,
            waits=counters.waits.histogram(),
            set_aside=tuple(producer.skipped),
        )
