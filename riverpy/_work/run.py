"""Run: one run of a client's worker, as the tree of who owns whom.

    completer                           ends last, when what ended is stored
      heartbeat, notifier, reconciler,  go on during the drain, so that the client counts as alive
      loop watch                        and a cancel still reaches a running job
        running jobs                    drain; past the soft limit they are cancelled
          producers, elector,           end first: no more claims, maintenance ended, leases
          singletons                    released
Leaving the nested blocks is stopping, from the inside out. The clock of the drain starts with the
stop request.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING

import anyio

from riverpy._clients.heartbeat import Heartbeat
from riverpy._clock import SystemTimer
from riverpy._leading.leader_watch import LeaderWatch
from riverpy._leading.membership import Membership
from riverpy._leases.singletons import SingletonRunners
from riverpy._lifecycle import ServiceGroup, only_error
from riverpy._log import JobLines, get_logger, tells_of_jobs
from riverpy._log_events import CLIENT_STOP_STARTED, JOB_CANCELLED_AFTER_ITS_ATTEMPT, JOB_ENDED
from riverpy._names import DEFAULT_DOMAIN, DISTRIBUTION
from riverpy._plugins import Plugins
from riverpy._postgres.batch import report_rows
from riverpy._postgres.clients import Registration
from riverpy._postgres.connection import ConnectionOutage, DedicatedConnection, close_all
from riverpy._postgres.connector import Connector
from riverpy._postgres.driver import CONNECT_TIMEOUT, DATABASE_ERRORS
from riverpy._postgres.jobs import job_any_available
from riverpy._postgres.leases import TOPIC as LEASE_TOPIC
from riverpy._postgres.notifier import Notifier
from riverpy._postgres.schema import (
    CLIENTS_VERSION,
    DOMAINS_VERSION,
    OWN_LINE,
    SLOTS_VERSION,
    STATE_VERSION,
    check_schema,
    expect_feature,
    warn_of_missing_features,
)
from riverpy._work.client_status import ClientStatusReporter
from riverpy._work.completer import Completer
from riverpy._work.counters import Counters
from riverpy._work.executor import Executor
from riverpy._work.leader_setup import LeaderSetup
from riverpy._work.loop_watch import LoopWatch
from riverpy._work.metrics import Metrics
from riverpy._work.notifications import NotificationRouter
from riverpy._work.periodic_warning import PeriodicWarning
from riverpy._work.producer import Producer
from riverpy._work.reconciler import Reconciler
from riverpy._work.running_attempts import RunningAttempts
from riverpy._work.status import RunStatus
from riverpy._work.stop_budget import StopBudget
from riverpy._work.stop_report import StopReport, tell_of_left
from riverpy._work.summary import Summary
from riverpy.errors import ClientIdInUseError, DomainConflictError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping

    from anyio.abc import TaskStatus

    from riverpy._insert.inserter import Inserter
    from riverpy._leading.subscriptions import Leadership
    from riverpy._leases.client_leases import ClientLeases
    from riverpy._postgres.clients import SetAsideRow
    from riverpy._postgres.jobs import ClaimKey
    from riverpy._work.attempt import Attempt
    from riverpy._work.child_process import ChildProcesses
    from riverpy._work.subscriptions import Subscriptions
    from riverpy.config import Config, QueueConfig
    from riverpy.periodic import PeriodicJobs
    from riverpy.singletons import Singletons
    from riverpy.worker import Workers

MAINTENANCE_LEFT_LEAST = 1.0
"""Seconds at the end of a run for maintenance that did not end with its term, at least: it has what
is left of the stop's time, for a reindexer that drops what its interrupted rebuild left."""
DRAIN_POLL = 0.05
"""Seconds between two looks at the queues of a run that ends when they are empty."""
DRAIN_STATEMENT_TIMEOUT = 10.0


class Run:
    """One run. `stop` and `stop_hard` may come at any time, also before and during the start."""

    def __init__(
        self,
        url: str | None,
        config: Config,
        *,
        client_id: str,
        workers: Workers,
        queues: Mapping[str, QueueConfig],
        singletons: Singletons,
        leases: ClientLeases,
        subscriptions: Subscriptions,
        leadership: Leadership,
        periodic_jobs: PeriodicJobs,
        inserter: Inserter,
        abandoned: frozenset[ClaimKey],
        children: ChildProcesses,
    ) -> None:
        """Make it; nothing is started.

        Args:
            url, config, client_id, workers, queues, singletons, leases, subscriptions, leadership,
                periodic_jobs, inserter, children: the client's.
            abandoned: attempts of earlier runs in this process whose code may still go on.
        """
        self._url, self._config = url, config
        self._subscriptions = subscriptions
        self._client_id = client_id
        self._outage = ConnectionOutage(client_id)
        self._log = get_logger()
        self._tells_of_jobs = tells_of_jobs(self._log)
        self._cancelled_lines = JobLines(self._log, "info")
        self._counters = Counters(workers, queues)
        self._connector = connector = Connector(url, config)
        self._claims = DedicatedConnection(
            "claims",
            connector.claims,
            self._outage,
            pooled=config.pooler,
            trace_internal=config.trace_internal,
        )
        self._results = DedicatedConnection(
            "results",
            connector.results,
            self._outage,
            pooled=config.pooler,
            trace_internal=config.trace_internal,
        )
        self._reserved = DedicatedConnection(
            "reserved",
            connector.reserved,
            self._outage,
            pooled=config.pooler,
            trace_internal=config.trace_internal,
        )
        registration = Registration(
            client_id=client_id,
            queues=list(queues),
            kinds=list(workers),
            candidate=config.candidate,
            poll_only=config.poll_only,
            version=version(DISTRIBUTION),
            dead_after=config.dead_after,
        )
        self._heartbeat = Heartbeat(
            registration,
            config,
            [self._results, self._claims, self._reserved],
            SystemTimer(),
            displaced=self.stop_hard,
        )
        self._membership = (
            None
            if config.domain == DEFAULT_DOMAIN
            else Membership(
                registration,
                config,
                periodic_jobs=periodic_jobs,
                connection=self._results,
                reserved=self._reserved,
                heartbeat=self._heartbeat,
                timer=SystemTimer(),
            )
        )
        self._leader_watch = LeaderWatch(
            self._results,
            config,
            kinds=list(workers),
            queues=list(queues),
            periodic_jobs=periodic_jobs,
            is_leader=lambda: self.is_leader,
            timer=SystemTimer(),
        )
        self._completer = Completer(
            self._results,
            config.schema,
            slots=sum(queue.max_workers for queue in queues.values()),
            waits_for_locks=config.pooler,
            stored=self._stored,
            counters=self._counters,
        )
        self._executor = Executor(workers, config, children)
        self._leases = leases
        self._singletons = SingletonRunners(singletons, leases, config, SystemTimer())
        self._notifier: Notifier | None = None
        self.work = RunningAttempts(self._executor, config, self._completer.add)
        self._disclosure = ClientStatusReporter(
            self.work,
            self._reserved,
            self._heartbeat,
            schema=config.schema,
            client_id=client_id,
            slots={name: queue.max_workers for name, queue in queues.items()},
            set_aside=self._set_aside,
        )
        quiet = config.quiet_interval or timedelta(0)
        self._quiet = quiet.total_seconds()
        self._reconciler = Reconciler(
            schema=config.schema,
            client_id=client_id,
            reserved=self._reserved,
            claims=self._claims,
            work=self.work,
            completer=self._completer,
            heartbeat=self._heartbeat,
            is_notified=self._is_notified,
            abandoned=abandoned,
            quiet=self._quiet,
        )
        metrics = Metrics(Plugins(config.plugins, config.hooks).metric_emit)
        self._kinds = list(workers) if config.known_kinds_only else None
        """Which kinds are claimed, aliases included; None: all."""
        self.producers = {
            name: Producer(
                name,
                queue,
                client_id=client_id,
                schema=config.schema,
                kinds=self._kinds,
                poll_interval=config.fetch_poll_interval,
                claims=self._claims,
                completer=self._completer,
                work=self.work,
                subscriptions=subscriptions,
                heartbeat=self._heartbeat,
                claim_failed=self._reconciler.claim_failed,
                counters=self._counters.queues[name],
                metrics=metrics,
            )
            for name, queue in queues.items()
        }
        self._reconciler.watch(self.producers)
        self._candidacy = (
            LeaderSetup(
                config,
                client_id=client_id,
                workers=workers,
                reserved=self._reserved,
                connect=connector.maintenance,
                connect_direct=connector.reindexer,
                outage=self._outage,
                changed=leadership.publish,
                heartbeat=self._heartbeat,
                periodic_jobs=periodic_jobs,
                inserter=inserter,
                functions=singletons.of_leader,
                timer=SystemTimer(),
            )
            if config.candidate
            else None
        )
        self._periodic_warning = None if config.candidate else PeriodicWarning(periodic_jobs)
        self._hearing = NotificationRouter(
            self.producers, self.work, self._reconciler, periodic_jobs, self._candidacy
        )
        self.overview = RunStatus(
            self._counters,
            client_id=client_id,
            domain=config.domain,
            connections=[self._claims, self._results, self._reserved],
            outage=self._outage,
            heartbeat=self._heartbeat,
            work=self.work,
            completer=self._completer,
            producers=self.producers,
            elector=None if self._candidacy is None else self._candidacy.elector,
            is_leader=lambda: self.is_leader,
            singletons=self._singletons,
            leases=leases,
        )
        self._summary = Summary(
            self._counters, lambda: self.overview.stats(subscriptions.dropped), client_id
        )
        self._maintenance_left = False
        self._singletons_left: tuple[str, ...] = ()
        self._claims.reconnected = self._results.reconnected = self._resync
        self._stop_asked, self._hard_asked = asyncio.Event(), asyncio.Event()
        self._budget = StopBudget(config.soft_stop_timeout, config.hard_stop_timeout)
        self._starting: anyio.CancelScope | None = None
        self._keeps_clients = False
        """Whether the database has our table of clients."""
        self._keeps_slots = False

    def stop(self) -> None:
        """Claim no more, let running jobs end."""
        if not self._stop_asked.is_set():
            self._budget.start()
            self.overview.state = "stopping"
            self._disclosure.stopping()
            self._stop_asked.set()
        if self._starting is not None:
            self._starting.cancel()

    @property
    def is_leader(self) -> bool:
        """Whether this run leads, and may act so now."""
        return self._candidacy is not None and self._candidacy.is_leader

    def stop_hard(self) -> None:
        """Cancel running jobs too."""
        self._hard_asked.set()
        self._budget.hurry()
        self.stop()

    async def run(self, *, drain: bool, task_status: TaskStatus[None]) -> StopReport:
        """Work until stopped or, with `drain`, until the queues are empty.

        Raises:
            ConfigError, DatabaseError: the client cannot work as it is configured, or this database
                cannot be worked.
            Exception: one of DATABASE_ERRORS at the start; or a fault of ours in one of the
                services.
        """
        self.work.owner = asyncio.current_task()
        if self._periodic_warning is not None:
            self._periodic_warning.warn()
        try:
            with self.until_stop_asked():
                await self._open_connections()
            async with (
                self._completer.running(self._budget.wait_stored),
                self._ending_maintenance(),
                ServiceGroup() as services,
            ):
                self.overview.groups.append(services)
                with self.until_stop_asked():
                    await self._start_services(services)
                try:
                    async with ServiceGroup() as producers:
                        self.overview.groups.append(producers)
                        with self.until_stop_asked():
                            for producer in self.producers.values():
                                await producers.start(producer)
                            if self._candidacy is not None:
                                for elector in self._candidacy.electors:
                                    await producers.start(elector)
                            for runner in self._singletons:
                                await producers.start(runner)
                        if not self._stop_asked.is_set():
                            self.overview.state = "working"
                        task_status.started()
                        await self._until_stopped(drain=drain)
                finally:
                    self._disclosure.stopping()
                    await self._drain()
            self._summary.end()
            report = self._report()
            if report.is_clean:
                await self._heartbeat.leave()
            if self._heartbeat.is_displaced:
                raise ClientIdInUseError(self._client_id, None)
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        finally:
            self._executor.close()
            self._heartbeat.end()
            await close_all([self._claims, self._results, self._reserved])
            self.overview.state = "stopped"
        return report

    def _set_aside(self) -> list[SetAsideRow]:
        """The rows that are set aside, of jobs and of maintenance."""
        claims = [row for one in self.producers.values() for row in one.set_aside]
        return [
            *report_rows("claim", claims),
            *report_rows("result", self._completer.set_aside, lambda attempt: attempt.id),
            *self._reconciler.set_aside,
            *([] if self._candidacy is None else self._candidacy.set_aside),
        ]

    async def _open_connections(self) -> None:
        await self._reserved.open()
        async with self._reserved.use("checking the schema", CONNECT_TIMEOUT) as connection:
            state = await check_schema(connection, self._config.schema, url=self._url)
        if self._membership is not None:
            expect_feature(state, DOMAINS_VERSION, self._config.schema, url=self._url)
        warn_of_missing_features(state, self._config.schema, url=self._url)
        self._keeps_clients = CLIENTS_VERSION in state.versions(OWN_LINE)
        self._keeps_slots = SLOTS_VERSION in state.versions(OWN_LINE)
        self._disclosure.keeps_state = STATE_VERSION in state.versions(OWN_LINE)
        if DOMAINS_VERSION in state.versions(OWN_LINE):
            self._disclosure.is_marked = self._membership is None
            if self._candidacy is not None:
                self._candidacy.is_divided = True
        await self._singletons.prepare()
        await self._claims.open()
        await self._results.open()

    async def _start_services(self, services: ServiceGroup) -> None:
        if self._keeps_clients:
            await self._heartbeat.register()
            await services.start(self._heartbeat)
        if self._membership is not None:
            await self._join_domain(self._membership)
            await services.start(self._membership)
        if self._keeps_clients:
            if self._keeps_slots:
                await services.start(self._disclosure)
            await services.start(self._leader_watch)
        await services.start(self._reconciler)
        await services.start(self._summary)
        await services.start(LoopWatch(self.work, self.overview.turned))
        if not self._config.poll_only:
            self._notifier = self.overview.notifier = self._make_notifier()
            await services.start(self._notifier)

    async def _join_domain(self, membership: Membership) -> None:
        try:
            await membership.join()
        except DomainConflictError:
            await self._heartbeat.leave()
            raise

    @contextmanager
    def until_stop_asked(self) -> Generator[None]:
        """A step of the start, which a stop ends at once."""
        with anyio.CancelScope() as self._starting:
            if self._stop_asked.is_set():
                self._starting.cancel()
            yield
        self._starting = None

    async def _until_stopped(self, *, drain: bool) -> None:
        if not drain:
            await self._stop_asked.wait()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_when_stopped, tasks.cancel_scope)
            while True:
                if await self._is_empty():
                    break
                await anyio.sleep(DRAIN_POLL)
            tasks.cancel_scope.cancel()
        self.stop()

    async def _cancel_when_stopped(self, scope: anyio.CancelScope) -> None:
        await self._stop_asked.wait()
        scope.cancel()

    async def _is_empty(self) -> bool:
        """Whether nothing runs, waits to be stored, or is available.

        On the connection of the claims: while this holds it no claim is in flight, so nothing can
        begin. What began before is asked for then, ahead of the queues: what of it ends later than
        these are read would be missed by both.
        """
        if self._is_busy:  # do not keep the claims waiting for this
            return False
        claiming = [producer for producer in self.producers.values() if not producer.paused]
        queues = [producer.queue for producer in claiming]
        skipped = [job_id for producer in claiming for job_id in producer.skipped]
        try:
            async with self._claims.use("looking for jobs", DRAIN_STATEMENT_TIMEOUT) as connection:
                return not self._is_busy and not await job_any_available(
                    connection,
                    self._config.schema,
                    queues=queues,
                    kinds=self._kinds,
                    skipped=skipped,
                )
        except DATABASE_ERRORS:  # unknown is not empty
            return False

    @property
    def _is_busy(self) -> bool:
        """Whether jobs are here that run, whose end is to be stored, or whose claim is in doubt."""
        return bool(self.work or self._completer.unstored or self._reconciler.in_doubt)

    async def _drain(self) -> None:
        if self.work.is_cut:  # there is nothing to wait for, whatever was asked before
            self._budget.hurry()
        left = 0.0 if self.work.is_cut else self._budget.soft_left()
        if self.work and left != 0.0:
            seconds = None if left is None else round(left, 1)
            self._log.info(CLIENT_STOP_STARTED, running=len(self.work), seconds=seconds)
        try:
            with anyio.CancelScope(shield=left == 0.0):
                await self.work.drain(left, self._hard_asked, self._budget.left_for_jobs)
        finally:  # a cancellation from outside ends the wait, too
            await self._reconciler.release_last_claims(self._budget.left_for_jobs())

    @asynccontextmanager
    async def _ending_maintenance(self) -> AsyncGenerator[None]:
        """Terms end with the elector, inside of this, and singletons with their leases; what did
        not has a last chance after the drain."""
        try:
            yield
        finally:
            if self._candidacy is not None:
                with anyio.CancelScope(shield=True):
                    is_clear = await self._candidacy.close(self._seconds_of_stop_left())
                    self._maintenance_left = not is_clear
            with anyio.CancelScope(shield=True):
                self._singletons_left = await self._singletons.close(self._seconds_of_stop_left())

    def _seconds_of_stop_left(self) -> float:
        if self.work.is_cut or not self._budget.is_started:
            return MAINTENANCE_LEFT_LEAST
        return max(self._budget.left(), MAINTENANCE_LEFT_LEAST)

    def _report(self) -> StopReport:
        report = StopReport(
            tuple(sorted(self.work.claim_keys())),
            len(self._completer.unstored),
            self._reconciler.in_doubt,
            maintenance_left=self._maintenance_left,
            singletons_left=self._singletons_left,
        )
        tell_of_left(report)
        return report

    def _stored(self, attempts: list[Attempt]) -> None:
        """Results were stored, all plain or none."""
        self._counters.ended(attempts)
        if self._tells_of_jobs:
            self._tell_of(attempts)
        if not attempts or attempts[0].is_plain:
            self._subscriptions.publish_attempts(attempts)
            return
        self._subscriptions.publish_attempts([one for one in attempts if one.is_told])
        for attempt in attempts:
            if attempt.outcome is not None and attempt.state_stored == JobState.AVAILABLE:
                attempt.producer.expect(attempt.outcome.delay or 0.0)
            if attempt.state_stored == JobState.CANCELLED != attempt.target:
                self._cancelled_lines.say(
                    JOB_CANCELLED_AFTER_ITS_ATTEMPT,
                    job_id=attempt.id,
                    kind=attempt.kind,
                    queue=attempt.queue,
                )

    def _tell_of(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._log.debug(
                JOB_ENDED,
                job_id=attempt.id,
                kind=attempt.kind,
                queue=attempt.queue,
                attempt=attempt.attempt,
                outcome=attempt.event.value,
                state=attempt.state_stored,
                seconds=round(attempt.ended - (attempt.started or attempt.ended), 6),
            )

    def _is_notified(self) -> bool:
        return self._notifier is not None and self._notifier.proven

    def _make_notifier(self) -> Notifier:
        notifier = Notifier(
            self._connector.listener,
            schema=self._config.schema,
            reserved=self._reserved,
            outage=self._outage,
            quiet=self._quiet,
            trace_internal=self._config.trace_internal,
        )
        self._hearing.listen(notifier)
        notifier.subscribe(LEASE_TOPIC, self._leases.heard)
        if self._candidacy is not None:
            for topic, heard in self._candidacy.topics.items():
                notifier.subscribe(topic, heard)
        notifier.on_resync(self._resync)
        return notifier

    def _resync(self) -> None:
        """A connection was lost and made again."""
        self._reconciler.resync()
        self._leases.resync()
        if self._candidacy is not None:
            self._candidacy.resync()
