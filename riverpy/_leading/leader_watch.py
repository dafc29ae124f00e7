"""LeaderWatch: checks which client is the leader, and logs a warning if that is a problem.

It is a problem if no client can become leader of this client's domain. It is also a problem if the
leader of the domain `default` is not a riverpy client, for example River in Go: such a leader does
less maintenance than riverpy, and does not support domains. A client of another domain also warns
if the leader of `default` has an older riverpy version that does not support domains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from riverpy._lifecycle import TestSignal
from riverpy._log import get_logger
from riverpy._log_events import (
    LEADER_CHECK_FAILED,
    LEADER_WITHOUT_DOMAINS_FOUND,
    LEADER_WITHOUT_RIVERPY_FOUND,
    NO_LEADER_CANDIDATE_FOUND,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.clients import default_domain_get_election_status
from riverpy._postgres.domains import domain_get_election_status
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.clients import ElectionStatus
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy.config import Config
    from riverpy.periodic import PeriodicJobs

LEADER_CHECKS_WITHIN_DEAD_AFTER = 3
"""How many times the leader is checked within the time `Config.dead_after`."""
CHECK_TIMEOUT = 2.0
NO_CANDIDATE_WARNING_INTERVAL = 3600.0
"""Seconds until the warning that no client can become leader is logged again."""

NON_RIVERPY_LEADER_ADVICE = (
    "register a worker or stub for each of these kinds in the program of the leader, or let only "
    "riverpy clients take part in leader election (docs/go.md)"
)
OLD_RIVERPY_LEADER_EFFECT = (
    "it maintains the queues of this domain too, and deletes finished jobs by its own retention"
)
NON_RIVERPY_LEADER_EFFECT_ON_DOMAIN = (
    "it maintains the queues of this domain too: it deletes finished jobs by its own retention, "
    "and discards jobs that run for an hour if it has no worker for their kind"
)
NON_RIVERPY_LEADER_EFFECT_ON_DEFAULT = (
    "it does not insert these periodic jobs, rescues jobs of dead clients only after an hour, and "
    "discards stuck jobs of kinds that it has no worker for"
)


class LeaderWatch:
    """Checks the leader at an interval while a client runs. The database must have riverpy's table
    of clients."""

    name = "leader watch"

    def __init__(
        self,
        connection: DedicatedConnection,
        config: Config,
        *,
        kinds: Sequence[str],
        queues: Collection[str],
        periodic_jobs: PeriodicJobs,
        is_leader: Callable[[], bool],
        timer: Timer,
    ) -> None:
        """Create the leader watch. `is_leader` returns whether this client is the leader of its
        domain now. The session of `connection` should have a lock timeout shorter than
        `CHECK_TIMEOUT`. Otherwise a locked table lets the whole check time out, which closes the
        connection."""
        self._connection, self._config, self._timer = connection, config, timer
        self._kinds, self._queues, self._periodic_jobs = kinds, queues, periodic_jobs
        self._is_leader = is_leader
        self._domain = None if config.domain == DEFAULT_DOMAIN else config.domain
        self._check_interval = config.dead_after.total_seconds() / LEADER_CHECKS_WITHIN_DEAD_AFTER
        self._last_warned_elected_at: str | None = None
        """The election time (`elected_at`) of the leader for which the last warning was logged."""
        self._no_candidate_since: float | None = None
        self._no_candidate_logged_at = -math.inf
        self._log = get_logger()
        self.leader_checked = TestSignal("LeaderWatch.leader_checked")

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Check the leader until the client stops this service. The first check is made at once."""
        task_status.started()
        while True:
            scope.set_progress_deadline(within=self._check_interval + CHECK_TIMEOUT)
            await self._check_election()
            await self._timer.sleep(self._check_interval)

    async def _check_election(self) -> None:
        """Log a warning if the leader is unsuitable or no client can become leader."""
        if self._domain is None and self._is_leader():  # this client itself is the leader
            return
        try:
            async with self._connection.acquire("checking the leader", CHECK_TIMEOUT) as opened:
                status = await self._read_election_status(opened)
        except DATABASE_ERRORS as error:
            self._log.debug(LEADER_CHECK_FAILED, error=describe_error(error))
            self._no_candidate_since = None  # no client can write a heartbeat in an outage
            return
        self._warn_of_unsuitable_leader(status)
        if not self._config.candidate:
            self._warn_if_no_candidate(status)
        self.leader_checked.emit()

    async def _read_election_status(self, connection: Connection) -> ElectionStatus:
        if self._domain is None:
            return await default_domain_get_election_status(connection, self._config.schema)
        return await domain_get_election_status(
            connection, self._config.schema, domain=self._domain
        )

    def _warn_of_unsuitable_leader(self, status: ElectionStatus) -> None:
        """Log a warning if the leader of the domain `default` does not use riverpy. A client of
        another domain also warns if this leader does not support domains. The warning is logged
        once for each term (the time of one client as leader)."""
        is_suitable = status.is_leader_riverpy and (
            self._domain is None or status.leader_supports_domains
        )
        if (
            status.leader_id is None
            or is_suitable
            or status.elected_at == self._last_warned_elected_at
        ):
            return
        self._last_warned_elected_at = status.elected_at
        keys: dict[str, object] = {"leader_id": status.leader_id, "elected_at": status.elected_at}
        if self._domain is not None:
            keys |= {"domain": self._domain, "queues": list(self._queues)}
        else:
            keys["periodic_job_ids"] = [job.id for job in self._periodic_jobs]
        if status.is_leader_riverpy:
            self._log.warning(
                LEADER_WITHOUT_DOMAINS_FOUND,
                effect=OLD_RIVERPY_LEADER_EFFECT,
                advice="restart it with this version after `riverpy migrate up`",
                **keys,
            )
        else:
            self._log.warning(
                LEADER_WITHOUT_RIVERPY_FOUND,
                kinds=list(self._kinds),
                effect=NON_RIVERPY_LEADER_EFFECT_ON_DOMAIN
                if self._domain
                else NON_RIVERPY_LEADER_EFFECT_ON_DEFAULT,
                advice=NON_RIVERPY_LEADER_ADVICE,
                **keys,
            )

    def _warn_if_no_candidate(self, status: ElectionStatus) -> None:
        """Log a warning if no client can become leader for longer than `Config.leader_ttl`. Repeat
        the warning each hour. A client with `candidate=True` does not need this check, because it
        can become leader itself."""
        now = self._timer.seconds_since_boot()
        if status.has_riverpy_candidate or (self._domain is None and status.leader_id is not None):
            self._no_candidate_since, self._no_candidate_logged_at = None, -math.inf
            return
        if self._no_candidate_since is None:
            self._no_candidate_since = now
        is_long = now - self._no_candidate_since > self._config.leader_ttl.total_seconds()
        if is_long and now - self._no_candidate_logged_at >= NO_CANDIDATE_WARNING_INTERVAL:
            self._no_candidate_logged_at = now
            self._log.warning(
                NO_LEADER_CANDIDATE_FOUND,
                domain=self._domain,
                effect="jobs are not scheduled, retried, rescued or deleted",
                advice="run a client with candidate=True",
            )
