"""ClientRun: one run of a client, from its start to its stop. Its parts run in nested `async with`
blocks:

    completer                           ends last, when all results are stored
      heartbeat, notifier, reconciler,  keep running while jobs end, so that the client stays
      loop watch                        alive and a cancel still reaches a running job
        running jobs                    end, or are cancelled after the soft stop timeout
          producers, elections,         end first: no more claims, maintenance ended, leases
          singletons                    released

A stop leaves the blocks from the inside out. The soft stop timeout starts at the stop request.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal

import anyio

from riverpy._clients.heartbeat import HeartbeatWriter
from riverpy._clock import Timer
from riverpy._leading.leader_watch import LeaderWatch
from riverpy._leading.membership import DomainMembership
from riverpy._leases.singletons import SingletonRunnerGroup
from riverpy._lifecycle import ServiceGroup, unwrap_single_error
from riverpy._log import get_logger
from riverpy._log_events import CLIENT_STOP_STARTED
from riverpy._names import DEFAULT_DOMAIN
from riverpy._plugins import PluginLists
from riverpy._postgres.domains import OWNERSHIP_CHANGED_ACTION
from riverpy._postgres.driver import CONNECT_TIMEOUT, DATABASE_ERRORS
from riverpy._postgres.job_maintenance import JOBS_DUE_ACTION
from riverpy._postgres.lease_reports import LeaseReport
from riverpy._postgres.leases import LEASE_TOPIC as LEASE_TOPIC
from riverpy._postgres.notifier import Notifier, decode_notification
from riverpy._postgres.periodic import PERIODIC_CHANGED_ACTION, RIVERPY_EVENT_TOPIC
from riverpy._postgres.schema import (
    CLIENT_SLOTS_MIGRATION,
    CLIENT_STATE_MIGRATION,
    CLIENTS_MIGRATION,
    DOMAINS_MIGRATION,
    JOB_COUNTS_MIGRATION,
    LEASE_REPORTS_MIGRATION,
    RIVERPY_MIGRATION_LINE,
    check_schema,
    warn_of_missing_features,
)
from riverpy._postgres.skipped_rows import make_skipped_row_reports
from riverpy._work.claimer import Claimer
from riverpy._work.client_status import ClientStatusReporter
from riverpy._work.completer import Completer
from riverpy._work.counters import MetricEmitter, RunCounters
from riverpy._work.due_jobs import DueJobs
from riverpy._work.elections import ElectionManager
from riverpy._work.executor import JobExecutor
from riverpy._work.ignored_periodic_jobs import IgnoredPeriodicJobsLog
from riverpy._work.job_count_writer import JobCountWriter
from riverpy._work.loop_watch import EventLoopWatch
from riverpy._work.producer import Producer
from riverpy._work.progress_writer import ProgressWriter
from riverpy._work.reconciler import Reconciler
from riverpy._work.run_context import RunConnections, RunContext
from riverpy._work.run_queues import RunQueueManager
from riverpy._work.running_attempts import RunningAttempts
from riverpy._work.stop import StopReport, StopTimeouts, log_stop_report
from riverpy._work.summary import JobSummaryLogger
from riverpy.errors import ClientIdInUseError, DomainConflictError
from riverpy.stats import ClientStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from anyio.abc import TaskStatus

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._postgres.skipped_rows import SkippedRowReport
    from riverpy._work.run_context import ClientParts
    from riverpy.config import QueueConfig

MAINTENANCE_STOP_TIMEOUT_MIN = 1.0
"""The shortest timeout, in seconds, for the end of maintenance at a stop. For example, the
reindexer has to drop an index that it has not completed."""
DRAIN_POLL_INTERVAL = 0.05
"""Seconds between two checks whether the queues are empty. Only a run with `drain` checks this."""
DRAIN_STATEMENT_TIMEOUT = 10.0
"""The timeout of the statement that checks whether the queues are empty, in seconds."""
LOOP_LAG_THRESHOLD = 1.0
"""If the event loop is late by more than this many seconds, all progress deadlines are extended by
the delay. A service that makes no progress before its progress deadline counts as stuck."""


class ClientRun:
    """One run of a client. `stop` and `stop_hard` may be called at any time, even before `run`."""

    def __init__(self, client: ClientParts, *, abandoned_claim_keys: frozenset[ClaimKey]) -> None:
        """Create the parts of the run, in the task that executes `run`. `abandoned_claim_keys` are
        the claim keys of attempts of earlier runs in this process whose code may still run."""
        self._client, self._config = client, client.config
        config = client.config
        self.state: Literal["starting", "working", "stopping", "stopped"] = "starting"
        self._started_at = time.monotonic()
        self._groups: list[ServiceGroup] = []
        self._stop_requested = asyncio.Event()
        self._stop_timeouts = StopTimeouts(config.soft_stop_timeout, config.hard_stop_timeout)
        self._scope_cancelled_at_stop: anyio.CancelScope | None = None
        """The cancel scope that a stop request cancels. None: there is no code to cancel."""
        self._is_maintenance_abandoned = False
        self._abandoned_singletons: tuple[str, ...] = ()
        self._status_reporter: ClientStatusReporter | None = None
        self._riverpy_schema_versions: frozenset[int] = frozenset()
        """The versions of the applied migrations of riverpy's own tables."""

        self._connections = RunConnections(client, self._resync)
        self._registration = client.make_registration()
        self._heartbeat = self._make_heartbeat()
        self._run_context = context = RunContext(
            client,
            self._connections,
            self._heartbeat,
            RunCounters(client.workers, client.queues),
            MetricEmitter(PluginLists(config.plugins, config.hooks).metric_emit_hooks),
        )
        self.producers: dict[str, Producer] = {}
        self._due_jobs = DueJobs(context, self.producers)
        self._completer = Completer(context, self._due_jobs.plan_claim_of_retry)
        self.running_attempts = RunningAttempts(config, self._completer.add_ended_attempt)
        self._job_executor = JobExecutor(
            client.workers,
            config,
            client.child_processes,
            self.running_attempts,
            lambda: self._heartbeat.can_claim_jobs,
            client.attempt_store,
        )
        self._claimer = Claimer(context)
        self.queues = self._make_queue_manager()
        self._reconciler = Reconciler(
            context,
            running=self.running_attempts,
            completer=self._completer,
            producers=self.producers,
            is_listening=self._is_listening,
            abandoned_claim_keys=abandoned_claim_keys,
        )
        self._singleton_runners = SingletonRunnerGroup(
            client.singletons, client.leases, Timer(), context.make_lease_spreader
        )
        self._domain_membership = self._make_domain_membership()
        self._election_manager = ElectionManager(context, Timer()) if config.candidate else None
        self._leader_watch = self._make_leader_watch()
        self._fleet_publisher = context.make_fleet_event_publisher()
        self._notifier = None if config.poll_only else self._make_notifier()
        self._summary_logger = JobSummaryLogger(context.counters, self.stats, client.id)
        self._job_count_writer = JobCountWriter(context)

    def _make_heartbeat(self) -> HeartbeatWriter:
        connections = self._connections
        return HeartbeatWriter(
            self._registration,
            self._config,
            [connections.results, connections.claims, connections.reserved],
            Timer(),
            on_client_id_lost=self.stop_hard,
            get_lease_report=self._make_lease_report,
        )

    def _make_lease_report(self) -> LeaseReport | None:
        """Return the report about leases for a heartbeat. None: the database has no column for the
        report."""
        if LEASE_REPORTS_MIGRATION not in self._riverpy_schema_versions:
            return None
        leases, elections = self._client.leases, self._election_manager
        names = [] if elections is None else elections.standby_lease_names
        return LeaseReport.make([*leases.standby_lease_names, *names], leases.reported_lags)

    def _make_queue_manager(self) -> RunQueueManager:
        return RunQueueManager(
            self._run_context,
            self.producers,
            self._make_producer,
            self.running_attempts,
            self._completer,
            prepare=self._claim_and_write_added_queue,
            on_changed=self._report_changed_queues,
            on_removed=self._forget_removed_queue,
        )

    def _make_producer(self, name: str, queue: QueueConfig) -> Producer:
        return Producer(
            name,
            queue,
            self._run_context,
            executor=self._job_executor,
            running=self.running_attempts,
            completer=self._completer,
            claimer=self._claimer,
            check_after_failed_claim=lambda: self._reconciler.schedule_check_after_failed_claim(),
        )

    def _make_domain_membership(self) -> DomainMembership | None:
        if self._config.domain == DEFAULT_DOMAIN:
            return None
        return DomainMembership(
            self._registration,
            self._config,
            periodic_jobs=self._client.periodic_jobs,
            connection=self._connections.results,
            reserved_connection=self._connections.reserved,
            heartbeat=self._heartbeat,
            timer=Timer(),
        )

    def _make_leader_watch(self) -> LeaderWatch:
        return LeaderWatch(
            self._connections.results,
            self._config,
            kinds=list(self._client.workers),
            queues=self._client.queues,
            periodic_jobs=self._client.periodic_jobs,
            is_leader=lambda: self.is_leader,
            timer=Timer(),
        )

    def _make_notifier(self) -> Notifier:
        quiet = self._config.quiet_interval
        notifier = Notifier(
            self._connections.connector.connect_for_notifications,
            schema=self._config.schema,
            reserved=self._connections.reserved,
            outage=self._connections.outage_tracker,
            resync=self._resync,
            probe_interval_min=0.0 if quiet is None else quiet.total_seconds(),
            trace_internal=self._config.trace_internal,
        )
        self._client.listener.use_notifier_of_working_client(notifier)
        notifier.subscribe("river_insert", self._receive_insert_notification)
        notifier.subscribe("river_control", self._receive_control_notification)
        notifier.subscribe(RIVERPY_EVENT_TOPIC, self._receive_riverpy_notification)
        notifier.subscribe(LEASE_TOPIC, self._client.leases.receive_notification)
        self._fleet_publisher.subscribe_to(notifier)
        if self._election_manager is not None:
            for topic, receive in self._election_manager.notification_handler_by_topic.items():
                notifier.subscribe(topic, receive)
        return notifier

    # -- received notifications. Unknown and invalid notifications are ignored.

    def _receive_insert_notification(self, payload: str) -> None:
        if (message := decode_notification(payload)) and message.queue in self.producers:
            self.producers[message.queue].wake_after_notification(message.notify_interval_ms)

    def _receive_control_notification(self, payload: str) -> None:
        message = decode_notification(payload)
        if message is None:
            return
        match message.action:
            case "cancel" if message.job_id:
                self.running_attempts.cancel_job(message.job_id, message.queue)
                if message.queue in self.producers:
                    self.producers[message.queue].cancel_job_if_being_claimed(message.job_id)
            case "pause" | "resume":
                self._reconciler.set_queue_paused(message.queue, paused=message.action == "pause")
            case _:  # ignore metadata_changed and actions of newer versions
                pass

    def _receive_riverpy_notification(self, payload: str) -> None:
        message = decode_notification(payload)
        if message is None:
            return
        if message.action == PERIODIC_CHANGED_ACTION:
            self._client.periodic_jobs.wake()
        elif message.action == OWNERSHIP_CHANGED_ACTION and self._election_manager is not None:
            self._election_manager.reread_queue_owners()
        elif message.action == JOBS_DUE_ACTION:
            for seconds in message.seconds:
                self._due_jobs.plan_claim(message.queue, seconds)

    # -- callbacks that the parts of this run call

    def _is_listening(self) -> bool:
        """Whether the client is known to receive notifications."""
        return self._notifier is not None and self._notifier.is_delivery_proven

    async def _claim_and_write_added_queue(self, name: str) -> None:
        """Claim an added queue for the leader domain, and read whether it is paused."""
        if self._domain_membership is not None:
            await self._domain_membership.claim_added_queue(name)
        await self._reconciler.write_added_queue_row(name)

    def _report_changed_queues(self) -> None:
        """Tell the parts of the run that report queues and slots about a change of both."""
        self._due_jobs.request_read()
        self._registration.queues[:] = self._client.queues
        self._completer.set_slot_count(sum(self._client.slots_per_queue.values()))
        if self._status_reporter is not None:
            self._status_reporter.report_changed_queues()

    def _forget_removed_queue(self, name: str) -> None:
        self._reconciler.forget_removed_queue(name)
        if self._domain_membership is not None:
            self._domain_membership.forget_removed_queue(name)

    def _resync(self) -> None:
        """Read the current state from the database, because notifications may have been lost."""
        self._reconciler.resync()
        self._due_jobs.request_read()
        self._client.leases.wake_all_waiting_callers()
        if self._election_manager is not None:
            self._election_manager.resync()

    def _collect_skipped_rows(self) -> list[SkippedRowReport]:
        """Return the rows that the client skips for a while, because statements on these rows
        failed: claims, results, checks of the reconciler and maintenance."""
        return [
            *make_skipped_row_reports("claim", self.queues.skipped_jobs),
            *make_skipped_row_reports(
                "result", self._completer.results_to_retry, lambda attempt: attempt.id
            ),
            *self._reconciler.skipped_rows,
            *([] if self._election_manager is None else self._election_manager.skipped_rows),
        ]

    # -- status

    @property
    def is_leader(self) -> bool:
        """Whether this client is the leader, and its lease is valid now."""
        return self._election_manager is not None and self._election_manager.is_leader

    def stats(self) -> ClientStats:
        """Return the current state and the counts of the run."""
        client, counters = self._client, self._run_context.counters
        elections = self._election_manager
        leases = elections and elections.lease_engine.renewer
        connections = {one.name: one.is_connected for one in self._connections.all_connections}
        is_listening = self._notifier is not None and self.state != "stopped"
        if self._notifier is not None:
            connections["listener"] = self._notifier.is_connected
        return ClientStats(
            state=self.state,
            client_id=client.id,
            domain=self._config.domain,
            uptime=time.monotonic() - self._started_at,
            is_leader=self.is_leader,
            is_leader_standby=elections is not None and elections.is_standby,
            listener=("proven" if self._is_listening() else "unproven") if is_listening else "off",
            connections=connections,
            outages=self._connections.outage_tracker.outage_count,
            backlog=len(self._completer.unstored_attempts),
            results_set_aside=tuple(entry.row.id for entry in self._completer.results_to_retry),
            results_refused=counters.refused_result_count,
            dropped_events=client.subscriptions.dropped_item_count,
            heartbeat_age=self._heartbeat.seconds_since_last_heartbeat,
            lease_renewals=leases.renewal_count if leases else 0,
            lease_renewal_failures=leases.renewal_failure_count if leases else 0,
            loop_lag=counters.loop_lag.build_histogram(),
            stuck=tuple(name for group in self._groups for name in group.stuck_service_names()),
            stuck_jobs=len(self.running_attempts.stuck_attempts),
            kinds={kind: of_kind.stats() for kind, of_kind in counters.counters_by_kind.items()},
            queues={name: producer.stats() for name, producer in self.producers.items()},
            singletons=self._singleton_runners.stats,
            leases=client.leases.stats,
        )

    def _record_loop_lag(self, seconds: float) -> None:
        """Record how many seconds the event loop was late."""
        self._run_context.counters.loop_lag.add_value(seconds)
        if seconds > LOOP_LAG_THRESHOLD:
            for group in self._groups:
                group.extend_progress_deadlines(seconds)

    # -- running

    async def run(self, *, drain: bool, task_status: TaskStatus[None]) -> StopReport:
        """Work jobs until a stop is requested or, with `drain`, until the queues are empty.

        Raises:
            ConfigError, DatabaseError: the client cannot work with this configuration or with this
                database.
            Exception: one of DATABASE_ERRORS at the start, or a fault of riverpy in a service.
        """
        if self._election_manager is None:
            IgnoredPeriodicJobsLog(self._client.periodic_jobs).start()
        try:
            with self.cancelling_at_stop_request():
                await self._job_executor.check_functions_importable_in_child()
                await self._open_connections()
            async with (
                self._completer.storing_results(self._stop_timeouts.wait_until_results_stored),
                self._ending_maintenance(),
                ServiceGroup() as services,
            ):
                self._groups.append(services)
                with self.cancelling_at_stop_request():
                    await self._start_services(services)
                try:
                    await self._run_until_stopped(task_status, drain=drain)
                finally:
                    self._report_stopping()
                    await self._stop_running_jobs()
            self._summary_logger.log_last_summary()
            await self._due_jobs.notify_other_clients()
            await self._job_count_writer.write_last_counts()
            return await self._report_stop_and_delete_client_row()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from None
        finally:
            self.queues.end_removal_waits()
            self._job_executor.close()
            self._heartbeat.record_run_end()
            await self._connections.close()
            self.state = "stopped"

    async def _open_connections(self) -> None:
        """Open the connections, and check the schema of the database."""
        schema, url, reserved = self._config.schema, self._client.url, self._connections.reserved
        await reserved.open()
        async with reserved.acquire("checking the schema", CONNECT_TIMEOUT) as connection:
            state = await check_schema(connection, schema, url=url)
        self._run_context.require_needed_migrations(state)
        warn_of_missing_features(state, schema, url=url)
        self._riverpy_schema_versions = frozenset(state.applied_versions(RIVERPY_MIGRATION_LINE))
        await self._singleton_runners.create_runners()
        await self._connections.claims.open()
        await self._connections.results.open()

    async def _start_services(self, services: ServiceGroup) -> None:
        schema_versions = self._riverpy_schema_versions
        if CLIENTS_MIGRATION in schema_versions:
            await self._heartbeat.register()
            await services.start(self._heartbeat)
        if self._domain_membership is not None:
            try:
                await self._domain_membership.join_domain()
            except DomainConflictError:
                await self._heartbeat.delete_client_row()
                raise
            await services.start(self._domain_membership)
        if CLIENTS_MIGRATION in schema_versions:
            if CLIENT_SLOTS_MIGRATION in schema_versions:
                self._status_reporter = ClientStatusReporter(
                    self._run_context,
                    self.running_attempts,
                    self._collect_skipped_rows,
                    has_state_columns=CLIENT_STATE_MIGRATION in schema_versions,
                    supports_domains=DOMAINS_MIGRATION in schema_versions
                    and self._domain_membership is None,
                )
                await services.start(self._status_reporter)
            await services.start(self._leader_watch)
        await services.start(self._claimer)
        await services.start(self._reconciler)
        await services.start(self._due_jobs)
        await services.start(ProgressWriter(self._run_context, self.running_attempts))
        await services.start(self._summary_logger)
        if JOB_COUNTS_MIGRATION in schema_versions:
            await services.start(self._job_count_writer)
        await services.start(EventLoopWatch(self.running_attempts, self._record_loop_lag))
        if self._notifier is not None:
            await services.start(self._fleet_publisher)
            await services.start(self._notifier)

    async def _run_until_stopped(self, task_status: TaskStatus[None], *, drain: bool) -> None:
        """Claim jobs, take part in leader election and run singletons until stopped."""
        elections = () if self._election_manager is None else self._election_manager.elections
        async with ServiceGroup() as claiming:
            self._groups.append(claiming)
            with self.cancelling_at_stop_request():
                await self.queues.start_producers(claiming)
                self._due_jobs.request_read()
                for service in (*elections, *self._singleton_runners):
                    await claiming.start(service)
            # Report soon for which leases this client is a standby, because this has changed.
            self._heartbeat.request_early_heartbeat()
            if not self._stop_requested.is_set():
                self.state = "working"
                self.queues.accept_queue_changes(claiming)
            task_status.started()
            if drain:
                with self.cancelling_at_stop_request():
                    while True:
                        if await self._are_queues_empty():
                            break
                        await anyio.sleep(DRAIN_POLL_INTERVAL)
                self.stop()
            await self._stop_requested.wait()

    # -- stopping

    def stop(self) -> None:
        """Stop claiming, and let running jobs end."""
        if not self._stop_requested.is_set():
            self._stop_timeouts.start_timeouts()
            self.state = "stopping"
            self.queues.refuse_queue_changes()
            self._report_stopping()
            self._stop_requested.set()
        if self._scope_cancelled_at_stop is not None:
            self._scope_cancelled_at_stop.cancel()

    def stop_hard(self) -> None:
        """Stop claiming, and cancel the running jobs."""
        self.running_attempts.end_soft_stop()
        self._stop_timeouts.start_hard_stop_timeout()
        self.stop()

    def _report_stopping(self) -> None:
        if self._status_reporter is not None:
            self._status_reporter.report_stopping()

    @contextmanager
    def cancelling_at_stop_request(self) -> Generator[None]:
        """Return a context manager whose `with` block is cancelled by a stop request."""
        with anyio.CancelScope() as self._scope_cancelled_at_stop:
            if self._stop_requested.is_set():
                self._scope_cancelled_at_stop.cancel()
            yield
        self._scope_cancelled_at_stop = None

    async def _are_queues_empty(self) -> bool:
        """Return whether no job is running or available, and no result waits to be stored. The
        query uses the connection for claims, so that no claim runs at the same time. A job may
        start during the wait for this connection, so check `_is_busy` again."""
        if self._is_busy:  # check this first: the statement below delays claims
            return False
        try:
            async with self._connections.claims.acquire(
                "checking for jobs", DRAIN_STATEMENT_TIMEOUT
            ) as connection:
                return not self._is_busy and not await self.queues.is_any_job_available(connection)
        except DATABASE_ERRORS:  # the state is unknown, so jobs may be available
            return False

    @property
    def _is_busy(self) -> bool:
        """Whether a job is running, a result waits to be stored, or a claim without an answer may
        have claimed jobs."""
        return bool(
            self.running_attempts
            or self._completer.unstored_attempts
            or self._reconciler.has_unanswered_claim
        )

    async def _stop_running_jobs(self) -> None:
        """Wait for the running jobs until the soft stop timeout expires, then cancel the jobs that
        are still running."""
        running = self.running_attempts
        if running.is_run_cancelled:  # the event loop ends soon, so do not wait
            self._stop_timeouts.start_hard_stop_timeout()
        soft = 0.0 if running.is_run_cancelled else self._stop_timeouts.soft_stop_seconds_left()
        if running and soft != 0.0:
            seconds = None if soft is None else round(soft, 1)
            get_logger().info(CLIENT_STOP_STARTED, running=len(running), seconds=seconds)
        try:
            with anyio.CancelScope(shield=soft == 0.0):
                await running.stop_attempts(
                    soft, self._stop_timeouts.seconds_left_for_cancelled_jobs
                )
        finally:  # do this even if this task is cancelled
            await self._reconciler.release_unanswered_claims(
                self._stop_timeouts.seconds_left_for_cancelled_jobs()
            )

    @asynccontextmanager
    async def _ending_maintenance(self) -> AsyncGenerator[None]:
        """End maintenance and singletons after the `async with` block."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                if self._election_manager is not None:
                    has_ended = await self._election_manager.close(self._maintenance_stop_timeout())
                    self._is_maintenance_abandoned = not has_ended
                self._abandoned_singletons = await self._singleton_runners.close(
                    self._maintenance_stop_timeout()
                )

    def _maintenance_stop_timeout(self) -> float:
        """Return how many seconds maintenance and singletons may take to end."""
        if self.running_attempts.is_run_cancelled or not self._stop_timeouts.is_stop_requested:
            return MAINTENANCE_STOP_TIMEOUT_MIN
        return max(self._stop_timeouts.stop_seconds_left(), MAINTENANCE_STOP_TIMEOUT_MIN)

    async def _report_stop_and_delete_client_row(self) -> StopReport:
        report = StopReport(
            tuple(sorted(self.running_attempts.collect_claim_keys())),
            len(self._completer.unstored_attempts),
            self._reconciler.has_unanswered_claim,
            self._is_maintenance_abandoned,
            self._abandoned_singletons,
        )
        log_stop_report(report)
        if report.is_clean:
            await self._heartbeat.delete_client_row()
        if self._heartbeat.has_lost_client_id:
            raise ClientIdInUseError(self._client.id, None)
        return report
