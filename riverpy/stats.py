"""ClientStats: the current state of a client, and the counts of its current or last run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

UNKNOWN_KINDS_LABEL = "(unknown)"
"""The key in `ClientStats.kinds` for all kinds without a worker."""


class Histogram(msgspec.Struct, frozen=True):
    """A histogram: the number of values in each interval between two bounds."""

    bounds: tuple[float, ...]
    """The bounds of the intervals, in increasing order. A value that equals a bound belongs to the
    interval below the bound."""
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
        """Return an estimate of a quantile of the values, for example the median if `share` is 0.5.

        The estimate is one of `bounds`. `share` is a fraction from 0 to 1: at least this fraction
        of the values is less than or equal to the estimate, and no smaller bound has this property.
        Infinity: the quantile is above all bounds. None: there are no values, or `share` is 0."""
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
    """The number of attempts that ended because the client stopped."""
    runs: Histogram
    """A histogram of the durations of the attempts, in seconds."""


class QueueStats(msgspec.Struct, frozen=True):
    """The state of one queue of a client, and its counts in the client's current or last run."""

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
    """A histogram of the durations of the claims, in seconds."""
    batches: Histogram
    """A histogram of the numbers of jobs that the claims returned."""
    claim_failures: int
    waits: Histogram
    """A histogram of the times that jobs waited for their attempts, in seconds: from the time at
    which a job was due (or inserted, if that was later) to the start of its attempt."""
    set_aside: tuple[int, ...] = ()
    """The ids of up to 1,000 jobs that the client skips, because claiming them failed or took too
    long. The client tries to claim them again at intervals."""


class LeaseLag(msgspec.Struct, frozen=True, kw_only=True):
    """How much work the code under a lease has not done yet. The code reports it with
    `Lease.report_lag`."""

    count: int | None
    """The number of items that are not handled yet; None: not reported."""
    age: float | None
    """The age of the oldest of these items at the time of the report, in seconds; None: not
    reported."""
    reported_ago: float
    """Seconds since the report."""


class SingletonStats(msgspec.Struct, frozen=True):
    """The state of one singleton (a function that runs in only one process at a time), and its
    counts in the client's current or last run."""

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
    """How often this client lost the lease, or stopped the function because a release of the lease
    was requested."""
    waited: float | None
    """Seconds that the client waited before the last start of the function; None: the function has
    not started."""
    standby: bool = False
    """Whether this client waits for the lease, and would acquire it if it were free."""
    valid_for: float | None = None
    """Seconds for which this client may still act under the lease if it is not renewed, i.e. until
    shortly before the lease expires; None: this client does not hold it."""
    lag: LeaseLag | None = None
    """The last report of the function with `Lease.report_lag` since the lease was acquired; None:
    there is no report."""


class LeaseStats(msgspec.Struct, frozen=True):
    """The number of leases that user code holds in this process, and the counts of renewals. One
    statement renews all held leases."""

    held: int = 0
    renewals: int = 0
    renewal_failures: int = 0
    """The number of renewals that the database refused or did not answer in time."""
    renewal_seconds: float = 0.0
    """The duration of the last renewal in seconds."""
    lags: Mapping[str, LeaseLag] = {}
    """The last report with `Lease.report_lag` for each held lease, by the name of the lease. Leases
    without a report are not included."""


class ClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a client, and the counts of its current run or, if it does not run, of its last
    run. A run lasts from the start of the client to its stop. Its counts start at zero."""

    client_id: str
    state: Literal["starting", "working", "stopping", "stopped"] = "stopped"
    uptime: float = 0.0
    """Seconds since the start of the current run or, if the client has stopped, of its last run; 0:
    there was no run."""
    domain: str = "default"
    """The leader domain that the client belongs to. Each domain has its own leader."""
    is_leader: bool = False
    """Whether the client is the leader of its domain."""
    is_leader_standby: bool = False
    """Whether the client is ready to become leader of its domain if there is no leader."""
    listener: Literal["proven", "unproven", "off"] = "off"
    """Whether the client receives notifications. `proven`: they arrive. `unproven`: it is not
    certain that they arrive. `off`: the client only polls, or does not run."""
    connections: Mapping[str, bool] = {}
    """A mapping from the purpose of each connection, for example `results`, to whether this
    connection is open."""
    outages: int = 0
    """How often the connection to the database was lost."""
    backlog: int = 0
    """The number of results of attempts that are not stored yet."""
    results_set_aside: tuple[int, ...] = ()
    """The ids of jobs whose results the database refused or did not store in time. The client sends
    these results again at intervals."""
    results_refused: int = 0
    """The number of results that were not stored, because the attempt no longer belonged to the
    client."""
    dropped_events: int = 0
    """The number of events that were dropped because subscribers were too slow, in all runs."""
    heartbeat_age: float | None = None
    """Seconds since the last heartbeat; None: the client has written no heartbeat."""
    lease_renewals: int = 0
    lease_renewal_failures: int = 0
    loop_lag: Histogram = Histogram((), (0,), 0.0)
    """The delays of the event loop in seconds, measured twice a second while the client runs."""
    stuck: tuple[str, ...] = ()
    """The names of riverpy's services that made no progress in time. This is a fault in riverpy."""
    stuck_jobs: int = 0
    """The number of jobs that run longer than `Config.job_stuck_threshold` after their
    cancellation."""
    kinds: Mapping[str, KindStats] = {}
    """The counts of each kind. Kinds without a worker are counted together as `(unknown)`."""
    queues: Mapping[str, QueueStats] = {}
    singletons: Mapping[str, SingletonStats] = {}
    """The state of each singleton, by its name."""
    leases: LeaseStats = LeaseStats()
    """The held leases of `Client.lease` and of singletons, and the counts of renewals since the
    client was opened."""
