"""LeaderWatch: what a client sees of who leads, and has to say of it.

It warns where nobody can lead its domain, and where a client leads `default` that is not riverpy's,
as River's in Go: that one does not do for this client what a leader of riverpy does, and knows of
no domains. So may one of an older version.
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
from riverpy._postgres.clients import election_status
from riverpy._postgres.domains import domain_election_status
from riverpy._postgres.driver import DATABASE_ERRORS, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.clients import ElectionStatus
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy.config import Config
    from riverpy.periodic import PeriodicJobs

LOOKS = 3
"""Looks within `dead_after`."""
STATEMENT_TIMEOUT = 2.0
REPEAT = 3600.0
"""Seconds after which it is said again that nobody can lead: the first line may be gone by then."""


ADVICE = (
    "register a worker or stub for each of these kinds in the program of the leader, or let only "
    "riverpy clients take part in leader election (docs/go.md)"
)
"""What to do about a leader in another language."""


class LeaderWatch:
    """Looks now and then who leads, while a client runs. Needs the table of clients."""

    name = "leader watch"

    def __init__(
        self,
        connection: DedicatedConnection,
        config: Config,
        *,
        kinds: Sequence[str],
        queues: Sequence[str],
        periodic_jobs: PeriodicJobs,
        is_leader: Callable[[], bool],
        timer: Timer,
    ) -> None:
        """Make it.

        Args:
            connection: the one to look over. Its session should give up locks soon, or a locked
                table would have it cut.
            config, kinds, queues, periodic_jobs: the client's.
            is_leader: whether this client leads its domain now.
            timer: by which it measures and waits.
        """
        self._connection, self._config, self._timer = connection, config, timer
        self._kinds, self._queues, self._periodic_jobs = kinds, queues, periodic_jobs
        self._is_leader = is_leader
        self._domain = None if config.domain == DEFAULT_DOMAIN else config.domain
        self._interval = config.dead_after.total_seconds() / LOOKS
        self._told_of: str | None = None
        """When the leader was elected that was told of last."""
        self._unled_since: float | None = None
        self._unled_told_at = -math.inf
        self._log = get_logger()
        self.looked = TestSignal("LeaderWatch.looked")

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Look until stopped, at once for the first time."""
        task_status.started()
        while True:
            scope.expect_progress(within=self._interval + STATEMENT_TIMEOUT)
            await self._look()
            await self._timer.sleep(self._interval)

    async def _look(self) -> None:
        if self._domain is None and self._is_leader():  # then it knows who leads
            return
        try:
            async with self._connection.use("looking for a leader", STATEMENT_TIMEOUT) as opened:
                look = await self._ask(opened)
        except DATABASE_ERRORS as error:
            self._log.debug(LEADER_CHECK_FAILED, error=describe(error))
            self._unled_since = None  # nobody could give a sign of life in an outage
            return
        self._say_foreign(look)
        if not self._config.candidate:
            self._say_unled(look)
        self.looked.emit()

    async def _ask(self, connection: Connection) -> ElectionStatus:
        if self._domain is None:
            return await election_status(connection, self._config.schema)
        return await domain_election_status(connection, self._config.schema, domain=self._domain)

    def _say_foreign(self, look: ElectionStatus) -> None:
        """Once for each term."""
        is_well = look.is_registered and (self._domain is None or look.knows_domains)
        if look.leader_id is None or is_well or look.elected_at == self._told_of:
            return
        self._told_of = look.elected_at
        if look.is_registered:
            self._log.warning(
                LEADER_WITHOUT_DOMAINS_FOUND,
                effect="it maintains the queues of this domain too, and deletes finished jobs by "
                "its own retention",
                advice="restart it with this version after `riverpy migrate up`",
                leader_id=look.leader_id,
                elected_at=look.elected_at,
                domain=self._domain,
                queues=list(self._queues),
            )
            return
        if self._domain is not None:
            self._log.warning(
                LEADER_WITHOUT_RIVERPY_FOUND,
                leader_id=look.leader_id,
                elected_at=look.elected_at,
                domain=self._domain,
                queues=list(self._queues),
                kinds=list(self._kinds),
                effect="it maintains the queues of this domain too: it deletes finished jobs by "
                "its own retention, and discards jobs that run for an hour if it has no worker "
                "for their kind",
                advice=ADVICE,
            )
            return
        self._log.warning(
            LEADER_WITHOUT_RIVERPY_FOUND,
            leader_id=look.leader_id,
            elected_at=look.elected_at,
            periodic_job_ids=[job.id for job in self._periodic_jobs],
            kinds=list(self._kinds),
            effect="it does not insert these periodic jobs, rescues jobs of dead clients only "
            "after an hour, and discards stuck jobs of kinds that it has no worker for",
            advice=ADVICE,
        )

    def _say_unled(self, look: ElectionStatus) -> None:
        """Once an outage, and each hour of it. A client that never leads notices it, since it is
        always there to see it."""
        now = self._timer.boottime()
        if look.has_candidate or (self._domain is None and look.leader_id is not None):
            self._unled_since, self._unled_told_at = None, -math.inf
            return
        if self._unled_since is None:
            self._unled_since = now
        is_long = now - self._unled_since > self._config.leader_ttl.total_seconds()
        if is_long and now - self._unled_told_at >= REPEAT:
            self._unled_told_at = now
            self._log.warning(
                NO_LEADER_CANDIDATE_FOUND,
                domain=self._domain,
                effect="jobs are not scheduled, retried, rescued or deleted",
                advice="run a client with candidate=True",
            )
