"""Stats: what a client tells of its work so far, and of how it stands now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN_KINDS = "(unknown)"
"""Under which all kinds are counted that the client has no worker for."""


class Histogram(msgspec.Struct, frozen=True):
    """How often values fell between bounds."""

    bounds: tuple[float, ...]
    """Rising. A value that equals a bound is below it."""
    counts: tuple[int, ...]
    """Values up to each bound and above the one before; the last: above all bounds."""
    sum: float
    """Of all values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def since(self, earlier: Histogram) -> Histogram:
        """What was added since `earlier`."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)

    def merged(self, other: Histogram) -> Histogram:
        """Both together; they have the same bounds."""
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float | None:
        """The bound below which this share of the values lies; infinity: above all bounds; None:
        there are no values."""
        left = share * self.count
        if left <= 0:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return float("inf")


class KindStats(msgspec.Struct, frozen=True):
    """The attempts at jobs of one kind whose end was stored."""

    completed: int
    failed: int
    """Attempts that failed; `discarded` of them were their job's last."""
    discarded: int
    snoozed: int
    cancelled: int
    interrupted: int
    """Ended by a stop."""
    runs: Histogram
    """Seconds that an attempt ran."""


class QueueStats(msgspec.Struct, frozen=True):
    """One queue that the client works."""

    slots: int
    running: int
    """Slots that are taken."""
    paused: bool
    poll_interval: float
    """Seconds."""
    claim_age: float | None
    """Seconds since the last claim that succeeded, or since claiming began; None: it has not."""
    claims: Histogram
    """Seconds that a claim took."""
    batches: Histogram
    """Jobs that a claim brought."""
    claim_failures: int
    waits: Histogram
    """Seconds from the time that a job was due, or inserted, to the start of its attempt."""
    set_aside: tuple[int, ...] = ()
    """The ids of up to 1,000 jobs that cannot be claimed, for an error or because it takes too
    long, and are tried again now and then."""


class SingletonStats(msgspec.Struct, frozen=True):
    """One singleton that the client stands by for, since its run began."""

    held: bool
    """Whether its function may act here now."""
    running: bool
    """Whether its function runs here: also when its lease is over and it has not ended yet."""
    epoch: int | None
    """Of the lease under which it runs; None: it does not run here."""
    terms: int
    """How often it began here."""
    failures: int
    losses: int
    """How often its lease was lost, or somebody asked for it."""
    waited: float | None
    """Seconds that the client stood by before it began last; None: it has not."""


class LeaseStats(msgspec.Struct, frozen=True):
    """The leases of user code in this process. One statement renews them all."""

    held: int = 0
    renewals: int = 0
    renewal_failures: int = 0
    """Renewals that were not answered in time, or refused."""
    renewal_seconds: float = 0.0
    """How long the last renewal took."""


class ClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """A client: how it stands, and counts of its run, or of its last one. Each run counts from
    zero."""

    client_id: str
    state: Literal["starting", "working", "stopping", "stopped"] = "stopped"
    uptime: float = 0.0
    """Seconds since the run began; 0: there was none."""
    domain: str = "default"
    """The leader domain that the client belongs to."""
    is_leader: bool = False
    """Whether it leads that domain."""
    listener: Literal["proven", "deaf", "off"] = "off"
    """Whether notifications arrive; off: the client only polls, or does not run."""
    connections: Mapping[str, bool] = {}
    """By purpose, whether it is up."""
    outages: int = 0
    """How often the database was lost."""
    backlog: int = 0
    """Ends of attempts that wait to be stored."""
    results_set_aside: tuple[int, ...] = ()
    """The ids of the jobs whose results the database refuses, or takes too long for, and that are
    tried again now and then."""
    results_refused: int = 0
    """Results of attempts that were no longer the client's."""
    dropped_events: int = 0
    """Events that subscribers were too slow for, in all runs."""
    heartbeat_age: float | None = None
    """Seconds since the last sign of life; None: there was none, or none are given."""
    lease_renewals: int = 0
    lease_renewal_failures: int = 0
    loop_lag: Histogram = Histogram((), (0,), 0.0)
    """Seconds that the event loop was late, measured twice a second while the client runs."""
    stuck: tuple[str, ...] = ()
    """Services that have not turned in time: a fault of riverpy's."""
    stuck_jobs: int = 0
    """Jobs that go on although they were cancelled `Config.job_stuck_threshold` ago."""
    kinds: Mapping[str, KindStats] = {}
    """By kind; those without a worker are one, `(unknown)`."""
    queues: Mapping[str, QueueStats] = {}
    singletons: Mapping[str, SingletonStats] = {}
    """By name."""
    leases: LeaseStats = LeaseStats()
    """Of `Client.lease` and of singletons, since the client was opened."""
