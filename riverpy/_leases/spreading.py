"""LeaseSpreader: hands singletons of this client over to clients that run fewer of them.

A hand-over ends the lease of one singleton. This client cancels the function and releases the
lease. Then another client that waits for the lease acquires it. If no other client does so for a
while, this client acquires the lease again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from riverpy._lifecycle import TestSignal
from riverpy._log import get_logger
from riverpy._log_events import LEASE_SPREADING_FAILED, SINGLETON_HAND_OVER_FAILED
from riverpy._names import USER_LEASE_NAME_PREFIX
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.lease_reports import client_list_lease_reports
from riverpy._postgres.leases import lease_list_terms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from anyio.abc import TaskStatus

    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.lease import Lease
    from riverpy._leases.singletons import SingletonRunner
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.lease_reports import ReportingClient
    from riverpy._postgres.leases import HeldTerm

CHECK_INTERVAL_SHARE_OF_TTL = 1.0
"""The time between two checks, as a fraction of the time to live of a lease. A check hands over at
most one singleton."""
CHECK_JITTER_FRACTION = 0.1
"""The maximum random delay of a check, as a fraction of the time between two checks. Without a
random delay, clients could check at the same time."""
CHECK_INTERVAL_MAX = 3600.0
"""The maximum time between two checks, in seconds. The time doubles each time that no other client
acquires a lease that was handed over."""
CHECK_TIMEOUT = 5.0
HEARTBEAT_AGE_MAX_SHARE_OF_DEAD_AFTER = 0.5
"""The maximum age of a client's last heartbeat, as a fraction of `Config.dead_after`. A lease is
not handed over to a client with an older heartbeat, because this client may have ended."""
HELD_SINGLETONS_MIN = 2
"""A client that runs fewer singletons than this number hands none over."""
SINGLETON_COUNT_DIFFERENCE_MIN = 2
"""A singleton is handed over only to a client that runs at least this many fewer singletons than
this client. With a difference of one, the hand-over would only reverse this difference."""


class HandOver(NamedTuple):
    """A singleton to hand over, and the client that should run it."""

    lease_name: str
    """The name of the singleton's lease in the table `riverpy_lease`."""
    client_id: str
    """The client that should acquire the lease, because it runs the fewest singletons."""


def choose_hand_over(
    own_client_id: str,
    own_lease_names: Sequence[str],
    *,
    holders: Collection[str],
    standby_by_client: Mapping[str, Collection[str]],
) -> HandOver | None:
    """Return the singleton to hand over, and the client that should run it. Return None if this
    client runs no more than its share, or if no other client can take a singleton.

    The share is the number of held leases, divided by the number of clients that hold one or wait
    for one, rounded up.

    Args:
        own_client_id: the id of this client.
        own_lease_names: the names of the leases that this client could hand over, the preferred one
            first.
        holders: for each held lease, the id of the client that holds it.
        standby_by_client: for the id of each other client, the names of the leases for which it
            waits.
    """
    counts = Counter(holders)
    clients = {own_client_id, *counts, *standby_by_client}
    share = math.ceil(counts.total() / len(clients))
    if counts[own_client_id] <= share:
        return None
    choices = [
        (counts[client_id], client_id, position)
        for client_id, names in standby_by_client.items()
        if counts[own_client_id] - counts[client_id] >= SINGLETON_COUNT_DIFFERENCE_MIN
        for position, name in enumerate(own_lease_names)
        if name in names
    ]
    if not choices:
        return None
    _, client_id, position = min(choices)
    return HandOver(own_lease_names[position], client_id)


class LeaseSpreader:
    """A service of a client. While this client runs more singletons than its share, the service
    hands them over to other clients, one at a time."""

    name = "lease spreader"

    def __init__(
        self,
        runners: Sequence[SingletonRunner],
        engine: LeaseEngine,
        connection: DedicatedConnection,
        schema: str | None,
        *,
        heartbeat_age_max: float,
    ) -> None:
        """Create the lease spreader. It sends no statement.

        Args:
            runners: the runners of the client's singletons.
            engine: the engine that holds the leases of these singletons.
            connection: the connection for the statements. Other services use it too.
            schema: the schema of River's tables; None: the search path decides.
            heartbeat_age_max: a client gets a singleton only if its last heartbeat is at most this
                many seconds old.
        """
        self._runners, self._engine = runners, engine
        self._connection, self._schema = connection, schema
        self._heartbeat_age_max = heartbeat_age_max
        self._open_hand_over: tuple[HandOver, int] | None = None
        """The last hand-over, and the epoch (number) of the term that it ended. None: there was no
        hand-over, or a client has acquired the lease since."""
        self._failed_count = 0
        """The number of consecutive hand-overs after which no other client acquired the lease."""
        self._log = get_logger(holder=engine.holder)
        self.checked = TestSignal("LeaseSpreader.checked")

    @property
    def check_interval(self) -> float:
        """The time between two checks, in seconds, without the random delay."""
        interval = self._engine.timing.ttl * CHECK_INTERVAL_SHARE_OF_TTL
        longest = max(CHECK_INTERVAL_MAX, interval)
        return min(interval * 2.0 ** min(self._failed_count, 30), longest)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Check repeatedly whether to hand a singleton over, until the client stops this
        service."""
        task_status.started()
        while True:
            jitter = random.uniform(0, CHECK_JITTER_FRACTION)  # noqa: S311 (no secret)
            interval = self.check_interval * (1 + jitter)
            scope.set_progress_deadline(within=interval + CHECK_TIMEOUT)
            await self._engine.timer.sleep(interval)
            try:
                await self._hand_over_if_needed()
            except DATABASE_ERRORS as error:  # the next check tries again
                self._log.debug(LEASE_SPREADING_FAILED, error=describe_error(error))
            self.checked.emit()

    async def _hand_over_if_needed(self) -> None:
        leases = [runner.lease for runner in self._runners]
        own = sorted((lease for lease in leases if lease is not None), key=_get_acquisition_time)
        if len(own) < HELD_SINGLETONS_MIN and self._open_hand_over is None:
            return
        names = [USER_LEASE_NAME_PREFIX + runner.singleton.name for runner in self._runners]
        async with self._connection.acquire(
            "reading which clients hold leases", CHECK_TIMEOUT
        ) as connection:
            terms = await lease_list_terms(connection, self._schema, names=names)
            clients = await client_list_lease_reports(connection, self._schema)
        if not self._record_hand_over_result(terms):
            return
        # Prefer the singleton that started last, because it has done the least work.
        own_names = [USER_LEASE_NAME_PREFIX + lease.name for lease in reversed(own)]
        choice = choose_hand_over(
            self._engine.holder,
            own_names,
            holders=[term.holder for term in terms],
            standby_by_client=self._find_standby_leases_by_client(clients, frozenset(names)),
        )
        if choice is not None:
            lease = own[-1 - own_names.index(choice.lease_name)]
            reason = f"client {choice.client_id!r} runs fewer singletons"
            if self._engine.hand_over(lease, reason):
                self._open_hand_over = choice, lease.epoch

    def _find_standby_leases_by_client(
        self, clients: Sequence[ReportingClient], lease_names: frozenset[str]
    ) -> dict[str, frozenset[str]]:
        """Return which of `lease_names` each other client waits for, by client id. Stopping
        clients, clients without a recent heartbeat, and clients that wait for none of these leases
        are left out."""
        standby_by_client = {
            client.client_id: lease_names.intersection(client.report.standby)
            for client in clients
            if client.report is not None
            and client.client_id != self._engine.holder
            and not client.is_stopping
            and client.seconds_since_heartbeat <= self._heartbeat_age_max
        }
        return {client_id: waits for client_id, waits in standby_by_client.items() if waits}

    def _record_hand_over_result(self, terms: Sequence[HeldTerm]) -> bool:
        """Record which client has acquired the lease that was handed over last. Return whether this
        client may hand over another lease now. If this client has acquired the lease again, wait
        longer before the next check, because each hand-over interrupts a function."""
        if self._open_hand_over is None:
            return True
        (name, client_id), epoch = self._open_hand_over
        term = next((term for term in terms if term.name == name and term.epoch > epoch), None)
        if term is None:
            return False
        self._open_hand_over = None
        if term.holder != self._engine.holder:
            self._failed_count = 0
            return True
        self._failed_count += 1
        self._log.warning(
            SINGLETON_HAND_OVER_FAILED,
            singleton=name.removeprefix(USER_LEASE_NAME_PREFIX),
            client_id=client_id,
            effect="the function runs in this process again",
            seconds=round(self.check_interval, 1),
        )
        return False


def _get_acquisition_time(lease: Lease) -> float:
    return lease.acquired_at.timestamp()
