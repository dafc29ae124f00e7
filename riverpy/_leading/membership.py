"""DomainMembership: makes a client a member of its leader domain. The clients of a domain elect one
leader.

The client claims queues for the domain before it works jobs, and writes heartbeats of the domain
while it runs. The leader of the domain maintains the queues that were claimed for it. Any client
may work the jobs of any queue.

A client takes a queue from another domain only if no client of that domain is alive. If a client of
that domain has an old heartbeat, the joining client waits for `dead_after` to see whether a new one
is written. The old heartbeat alone proves nothing, because the server's clock may be set to another
time.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from riverpy._clients.client_id import (
    HEARTBEAT_READ_INTERVAL_MAX,
    HEARTBEAT_READS_WITHIN_DEAD_AFTER,
)
from riverpy._clients.heartbeat import (
    CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER,
    HEARTBEATS_WITHIN_DEAD_AFTER,
)
from riverpy._clients.observer import HeartbeatObserver
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    DOMAIN_HEARTBEAT_FAILED,
    DOMAIN_HEARTBEAT_LOST,
    DOMAIN_HEARTBEAT_RESTORED,
    QUEUE_MOVED_TO_ANOTHER_DOMAIN,
    QUEUE_OF_ANOTHER_DOMAIN_FOUND,
    QUEUE_TAKEOVER_STARTED,
    QUEUES_CLAIMED_FOR_DOMAIN,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.clients import client_list_heartbeats
from riverpy._postgres.domains import (
    member_write_heartbeat,
    owner_claim_queues,
    owner_find_conflicts,
    owner_lock_all,
    owner_notify_changed,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy.errors import DomainConflictError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clients.heartbeat import HeartbeatWriter
    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.clients import ClientRegistration
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.domains import QueueOwnershipConflict
    from riverpy._postgres.driver import Connection
    from riverpy.config import Config
    from riverpy.periodic import PeriodicJobs

JOIN_TIMEOUT = 10.0
"""The timeout of one attempt to join a domain, in seconds. Clients that join at the same time wait
for each other."""
HEARTBEAT_WRITE_TIMEOUT = 2.0


class DomainMembership:
    """Joins a domain other than `default`, and writes heartbeats of the domain."""

    name = "domain"

    def __init__(
        self,
        registration: ClientRegistration,
        config: Config,
        *,
        periodic_jobs: PeriodicJobs,
        connection: DedicatedConnection,
        reserved_connection: DedicatedConnection,
        heartbeat: HeartbeatWriter,
        timer: Timer,
    ) -> None:
        """Create the membership of a client. Heartbeats are written over `connection`, so its
        session should have a short lock timeout. The client joins the domain over
        `reserved_connection`."""
        self._registration, self._config = registration, config
        self._periodic_jobs = periodic_jobs
        self._connection, self._reserved, self._timer = connection, reserved_connection, timer
        self._heartbeat = heartbeat
        self._heartbeat_interval = config.dead_after / HEARTBEATS_WITHIN_DEAD_AFTER
        self._claimed_queues: Sequence[str] = ()
        self._owner_by_moved_queue: dict[str, str] = {}
        """The owner of each queue that was moved to another domain, so that each move is logged
        once."""
        self._log = get_logger(domain=config.domain)
        self._last_heartbeat_at = self._timer.seconds_since_boot()
        """The time of the last heartbeat of the domain, by `Timer.seconds_since_boot`."""
        self._failure_log = RepeatedFailureLog(self._log)
        self.heartbeat_written = TestSignal("DomainMembership.heartbeat_written")

    async def join_domain(self) -> None:
        """Claim the queues of the client for its domain. The client must be registered.

        Raises:
            DomainConflictError: another domain owns one of the queues, and `on_domain_conflict`
                makes this an error.
            Exception: one of DATABASE_ERRORS.
        """
        await self._join_domain_with_queues(self._config.domain_queues or self._registration.queues)

    async def claim_added_queue(self, queue: str) -> None:
        """Claim a queue that was added to the running client. If `Config.domain_queues` is set, do
        nothing, because the client claims only those queues.

        Raises:
            DomainConflictError, Exception: as `join_domain`.
        """
        if not self._config.domain_queues:
            await self._join_domain_with_queues([queue])

    def forget_removed_queue(self, queue: str) -> None:
        """Stop checking the owner of a queue, because the client does not work it any more. The
        domain still owns the queue, because other clients may work it."""
        if not self._config.domain_queues:
            self._claimed_queues = [one for one in self._claimed_queues if one != queue]
            self._owner_by_moved_queue.pop(queue, None)

    async def _join_domain_with_queues(self, queues: Iterable[str]) -> None:
        """Claim these queues. If another domain owns one of the queues, first wait until this
        client knows which clients of that domain are alive."""
        wanted = sorted(set(queues))
        observer = HeartbeatObserver(self._timer)
        dead_after = self._config.dead_after.total_seconds()
        interval = min(dead_after / HEARTBEAT_READS_WITHIN_DEAD_AFTER, HEARTBEAT_READ_INTERVAL_MAX)
        dead: Mapping[str, bytes] = {}
        is_logged = False
        while (undecided := await self._try_to_join_domain(wanted, dead)) is not None:
            if not is_logged:
                is_logged = True
                self._log.warning(
                    QUEUE_TAKEOVER_STARTED,
                    client_ids=sorted(undecided),
                    seconds=dead_after,
                )
            async with self._reserved.acquire("reading heartbeats", JOIN_TIMEOUT) as connection:
                observer.observe(*await client_list_heartbeats(connection, self._config.schema))
            stopped = observer.find_stopped_heartbeats(dead_after)
            dead = stopped.heartbeats
            if not undecided <= dead.keys():
                await self._timer.sleep(min(interval, stopped.seconds_until_next_stop))

    async def _try_to_join_domain(
        self, wanted_queues: Sequence[str], dead_clients: Mapping[str, bytes]
    ) -> set[str] | None:
        """Claim those of `wanted_queues` that this client's domain may own, and return None.

        If another domain owns one of the queues, and clients of that domain with an old heartbeat
        may still be alive, claim nothing and return the ids of these clients.

        Raises:
            DomainConflictError: as `join_domain`.
            Exception: one of DATABASE_ERRORS.
        """
        schema = self._config.schema
        async with (
            self._reserved.acquire("joining the leader domain", JOIN_TIMEOUT) as connection,
            connection.transaction(isolation="read_committed"),
        ):
            await owner_lock_all(connection, schema)
            held = await owner_find_conflicts(
                connection, schema, queues=wanted_queues, dead_client_heartbeats=dead_clients
            )
            foreign = [holder for holder in held if holder.owner_domain != self._config.domain]
            kept_by_owner = {holder.queue for holder in foreign if not self._can_take_queue(holder)}
            undecided = {
                client_id
                for holder in foreign
                if holder.queue not in kept_by_owner
                for client_id in holder.maybe_dead_client_ids
            }
            if undecided:
                return undecided
            claimed = [queue for queue in wanted_queues if queue not in kept_by_owner]
            await self._claim_queues(connection, claimed)
            self._claimed_queues = sorted({*self._claimed_queues, *claimed})
            await self._write_heartbeat(connection)
            return None

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Write heartbeats of the domain until the client stops this service."""
        self._last_heartbeat_at = self._timer.seconds_since_boot()
        task_status.started()
        interval = self._heartbeat_interval.total_seconds()
        while True:
            scope.set_progress_deadline(within=interval + HEARTBEAT_WRITE_TIMEOUT)
            await self._timer.sleep(interval)
            try:
                async with self._connection.acquire(
                    "writing a heartbeat of the domain", HEARTBEAT_WRITE_TIMEOUT
                ) as connection:
                    owners = await self._write_heartbeat(connection)
            except DATABASE_ERRORS as error:  # the next heartbeat comes before `dead_after` ends
                self._record_heartbeat_failure(error)
                continue
            self._record_heartbeat_success()
            self._log_moved_queues(owners)
            self.heartbeat_written.emit()

    def _record_heartbeat_failure(self, error: Exception) -> None:
        self._log.debug(DOMAIN_HEARTBEAT_FAILED, error=describe_error(error))
        age = self._timer.seconds_since_boot() - self._last_heartbeat_at
        if age > self._config.dead_after.total_seconds() * CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER:
            self._failure_log.log_failure(
                DOMAIN_HEARTBEAT_LOST,
                effect="if no client of the domain sends heartbeats, the leader of `default` "
                "maintains its queues after ten minutes",
                seconds_since_last=round(age, 3),
                error=describe_error(error),
            )

    def _record_heartbeat_success(self) -> None:
        self._last_heartbeat_at = self._timer.seconds_since_boot()
        self._failure_log.log_recovery(DOMAIN_HEARTBEAT_RESTORED)

    async def _claim_queues(self, connection: Connection, queues: Sequence[str]) -> None:
        claimed = await owner_claim_queues(
            connection,
            self._config.schema,
            queues=queues,
            domain=self._config.domain,
            client_id=self._registration.client_id,
        )
        if claimed:
            await owner_notify_changed(connection, self._config.schema)
            self._log.info(QUEUES_CLAIMED_FOR_DOMAIN, queues=claimed)

    def _can_take_queue(self, conflict: QueueOwnershipConflict) -> bool:
        """Return whether this client's domain may take a queue from the domain that owns it.

        Raises:
            DomainConflictError: the domain may not take the queue, and `on_domain_conflict` is not
                `warn`.
        """
        policy = self._config.on_domain_conflict
        if policy == "warn":
            self._log.warning(
                QUEUE_OF_ANOTHER_DOMAIN_FOUND,
                effect="this client works its jobs, and the other domain's leader maintains it",
                queue=conflict.queue,
                owner=conflict.owner_domain,
            )
            return False
        if policy == "takeover" and not conflict.client_ids:
            return True
        raise DomainConflictError(
            conflict.queue,
            owner=conflict.owner_domain,
            domain=self._config.domain,
            client_ids=conflict.client_ids,
        )

    async def _write_heartbeat(self, connection: Connection) -> Mapping[str, str]:
        return await member_write_heartbeat(
            connection,
            self._config.schema,
            client_id=self._registration.client_id,
            registered_at=self._heartbeat.registered_at,
            domain=self._config.domain,
            settings_digest=compute_settings_digest(self._config, self._periodic_jobs),
            queues=self._claimed_queues,
            heartbeat_interval=self._heartbeat_interval,
        )

    def _log_moved_queues(self, owner_by_queue: Mapping[str, str]) -> None:
        """Log each move of a queue to another domain once. The client does not claim the queue
        again, because an operator has moved it."""
        domain = self._config.domain
        moved = {
            queue: owner
            for queue in self._claimed_queues
            if (owner := owner_by_queue.get(queue, DEFAULT_DOMAIN)) != domain
        }
        for queue, owner in moved.items():
            if self._owner_by_moved_queue.get(queue) != owner:
                self._log.warning(
                    QUEUE_MOVED_TO_ANOTHER_DOMAIN,
                    effect="the leader of that domain maintains it",
                    queue=queue,
                    owner=owner,
                )
        self._owner_by_moved_queue = moved


def compute_settings_digest(config: Config, periodic_jobs: PeriodicJobs) -> str:
    """Return a digest of the settings that a leader uses: periodic jobs and retention. Clients with
    the same settings have the same digest."""
    settings = (
        sorted((job.id, job.schedule_text) for job in periodic_jobs),
        config.retention,
        sorted(config.retention_by_queue.items()),
        sorted(config.retention_by_kind.items()),
    )
    return hashlib.blake2s(repr(settings).encode(), digest_size=8).hexdigest()
