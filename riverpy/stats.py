"""ClientStats: the current state of a client and the counts of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

UNKNOWN_KINDS_LABEL = "(unknown)"
"""The name under which all kinds without a worker are counted."""


class Histogram(msgspec.Struct, frozen=True):
    """The number of values in each interval between bounds."""

    bounds: tuple[float, ...]
    """The bounds in increasing order. A value that equals a bound belongs to the interval below the
    bound."""
    counts: tuple[int, ...]
    """The number of values in each interval. The last number counts the values above all bounds."""
    sum: float
    """The sum of all values."""

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def since(self, earlier: Histogram) -> Histogram:
        """Return the histogram of the values that were added since `earlier`."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)

    def merged(self, other: Histogram) -> Histogram:
        """Return the sum of two histograms with the same bounds."""
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float | None:
        """Return the lowest bound for which at least the fraction `share` of the values (0.5: half
        of them) is not above the bound. Infinity: no bound is high enough. None: there are no
        values."""
        left = share * self.count
        if left <= 0:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return float("inf")


class KindStats(msgspec.Struct, frozen=True):
    """The counts of ended attempts of one kind. An attempt is counted when its result is stored."""

    completed: int
    failed: int
    """The number of failed attempts, including attempts whose job was discarded."""
    discarded: int
    snoozed: int
    cancelled: int
    interrupted: int
    """The number of attempts that a stop ended."""
    runs: Histogram
    """Duration of the attempts in seconds."""


class QueueStats(msgspec.Struct, frozen=True):
    """State and counts of a queue of the client."""

    slots: int
    running: int
    """The number of slots in which a job runs."""
    paused: bool
    poll_interval: float
    """Seconds between two polls while the queue is idle."""
    claim_age: float | None
    """Seconds since the last successful claim, or since the client started to claim; None: the
    client has not started to claim."""
    claims: Histogram
    """Duration of the claims in seconds."""
    batches: Histogram
    """The number of jobs that each claim returned."""
    claim_failures: int
    waits: Histogram
    """Seconds from the time at which a job was due (or inserted, if that was later) to the start of
    its attempt."""
    set_aside: tuple[int, ...] = ()
    """The ids of up to 1,000 jobs that claims skip, because claiming these jobs fails or takes too
    long. These jobs are tried again at intervals."""


class LeaseLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far the holder of a lease is behind, as it last reported with `Lease.report_lag`."""

    count: int | None
    """The number of items that are not handled yet; None: not reported."""
    age: float | None
    """The age of the oldest of these items in seconds, when it was reported; None: not
    reported."""
    reported_ago: float
    """Seconds since the report."""


class SingletonStats(msgspec.Struct, frozen=True):
    """The state of one singleton (a function that runs in one process at a time), and its counts
    since the run started."""

    held: bool
    """Whether this client holds the lease and the lease is valid."""
    running: bool
    """Whether the function runs in this client. The function may still run after the lease has
    ended."""
    epoch: int | None
    """The epoch of the running function's lease, a number that increases each time the lease is
    acquired; None: the function does not run in this client."""
    terms: int
    """How often the function has started in this client."""
    failures: int
    losses: int
    """How often the lease was lost, or another client requested it."""
    waited: float | None
    """Seconds that the client waited before the last start of the function; None: the function has
    not started."""
    standby: bool = False
    """Whether this client waits for the lease, and would acquire it if it was free."""
    valid_for: float | None = None
    """Seconds for which the lease is valid if it is not renewed; None: it is not held here."""
    lag: LeaseLag | None = None
    """What the function last reported with `Lease.report_lag` under the held lease; None: there is
    no report."""


class LeaseStats(msgspec.Struct, frozen=True):
    """The leases of user code in this process. One statement renews all of them."""

    held: int = 0
    renewals: int = 0
    renewal_failures: int = 0
    """The number of renewals that were refused, or not answered in time."""
    renewal_seconds: float = 0.0
    """Seconds that the last renewal took."""
    lags: Mapping[str, LeaseLag] = {}
    """What the code under the held leases last reported with `Lease.report_lag`, by the name of the
    lease. Leases without a report are left out."""


class ClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a client, and the counts of its current or last run. Each run counts from
    zero."""

    client_id: str
    state: Literal["starting", "working", "stopping", "stopped"] = "stopped"
    uptime: float = 0.0
    """Seconds since the run started; 0: there was no run."""
    domain: str = "default"
    """The leader domain that the client belongs to."""
    is_leader: bool = False
    """Whether the client is the leader of its domain."""
    is_leader_standby: bool = False
    """Whether the client would become leader of its domain now if there was none."""
    listener: Literal["proven", "unproven", "off"] = "off"
    """`proven`: notifications arrive. `unproven`: it is not certain that they arrive. `off`: the
    client only polls, or does not run."""
    connections: Mapping[str, bool] = {}
    """Whether each connection is open, by its purpose."""
    outages: int = 0
    """How often the connection to the database was lost."""
    backlog: int = 0
    """Number of results not stored yet."""
    results_set_aside: tuple[int, ...] = ()
    """The ids of jobs whose results the database has refused or not stored in time. These results
    are sent again at intervals."""
    results_refused: int = 0
    """Results not stored, because the attempt no longer belonged to the client."""
    dropped_events: int = 0
    """Events that were dropped because subscribers were too slow, in all runs."""
    heartbeat_age: float | None = None
    """Seconds since the last heartbeat; None: the client has written no heartbeat."""
    lease_renewals: int = 0
    lease_renewal_failures: int = 0
    loop_lag: Histogram = Histogram((), (0,), 0.0)
    """Seconds by which the event loop was late, measured twice a second while the client runs."""
    stuck: tuple[str, ...] = ()
    """Services that made no progress in time, because of a fault in riverpy."""
    stuck_jobs: int = 0
    """Number of jobs that run longer than `Config.job_stuck_threshold` after their cancellation."""
    kinds: Mapping[str, KindStats] = {}
    """The counts of each kind. Kinds without a worker are counted together as `(unknown)`."""
    queues: Mapping[str, QueueStats] = {}
    singletons: Mapping[str, SingletonStats] = {}
    """The state of each singleton, by its name."""
    leases: LeaseStats = LeaseStats()
    """The leases of `Client.lease` and of singletons since the client was opened."""
