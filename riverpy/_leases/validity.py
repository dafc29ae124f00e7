"""LeaseValidity: what this process may believe about a lease of its own.

Only the server says who leads. Between two answers of it a leader trusts itself, from the start of
the attempt that was granted until a margin before the lease can pass on, by a clock that counts
suspended time. The margin is for clocks that run at different rates.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy.config import ELECT_JITTER_SHARE

if TYPE_CHECKING:
    from riverpy._clock import Timer
    from riverpy.config import Config

TRUST_MARGIN_SHARE = 1 / 15
"""Of the lease's time, how much earlier trust ends: 1 s of the default 15 s, as River's."""
STOP_GRACE_SHARE = 1 / 5
"""Of the lease's time, how long the services of a term may take to end: 3 s of the default 15 s."""
WATCH_MOST = 1.0
"""Seconds between two looks at a trust, at most."""
WATCH_LEAST = 0.001
WATCH_SHARE = 1 / 15
"""The same as a share of the lease's time."""
WAKE_JITTER = 0.05
"""Seconds within which those who stand by bid when a lease is free, as they heard or reckoned."""
RENEWAL_LEAST = 0.01
"""Seconds below which there is no time for another renewal."""
STALL = 1.0
"""Seconds past a deadline from which it is said that this process did not run."""
RELEASE_MOST = 2.0
"""Seconds that giving a lease up may take; else it lapses."""


class Term(NamedTuple):
    """One leadership of one client: a later one of the same client has a later `elected_at`, and a
    higher epoch."""

    leader_id: str
    elected_at: datetime
    """By the server's clock, exact to the microsecond: it is compared for equality."""
    epoch: int = 0
    """Of the lease; 0 in River's table of leaders, which has none: there `elected_at` serves."""


class LeaseTiming(msgspec.Struct, frozen=True):
    """The intervals of an election, in seconds."""

    ttl: float
    """How long a lease lasts that is not renewed."""
    interval: float
    """From one renewal or bid to the next."""

    @classmethod
    def of(cls, config: Config) -> LeaseTiming:
        """As a client is configured."""
        return cls(config.leader_ttl.total_seconds(), config.elect_interval.total_seconds())

    @property
    def ttl_delta(self) -> timedelta:
        """`ttl`, for a statement."""
        return timedelta(seconds=self.ttl)

    @property
    def trust(self) -> float:
        """How long a leader trusts itself after the start of an attempt that was granted."""
        return self.ttl * (1 - TRUST_MARGIN_SHARE)

    @property
    def grace(self) -> float:
        """How long the services of a term may take to end."""
        return self.ttl * STOP_GRACE_SHARE

    @property
    def watch_step(self) -> float:
        """From one look at the trust to the next: a sleep does not count the time of a machine that
        is suspended."""
        return max(min(WATCH_MOST, self.ttl * WATCH_SHARE), WATCH_LEAST)

    def until_next_bid(self, remaining: float | None) -> float:
        """From a bid to the next of the same process, by what is left of the holder's time; None:
        it is not known."""
        usual = self.interval * (1 + random.uniform(0, ELECT_JITTER_SHARE))  # noqa: S311 (no secret)
        if remaining is None:
            return usual
        return min(usual, remaining + random.uniform(0, WAKE_JITTER))  # noqa: S311 (no secret)


class LeaseValidity:
    """The belief of one process. Whoever acts as a leader asks `is_valid` before each step."""

    def __init__(self, timing: LeaseTiming, timer: Timer) -> None:
        self.timing = timing
        self._timer = timer
        self._term: Term | None = None
        self._trusted_until = 0.0

    @property
    def term(self) -> Term | None:
        """The term that this process holds, if it does."""
        return self._term if self.left > 0 else None

    @property
    def left(self) -> float:
        """Seconds that this process may still act as a leader; 0 if it may not."""
        if self._term is None:
            return 0.0
        return max(self._trusted_until - self._timer.boottime(), 0.0)

    def is_valid(self, term: Term) -> bool:
        """Whether `term` is the one that this process holds, and may act under now."""
        return self.term == term

    def granted(self, term: Term, *, asked_at: float) -> None:
        """The server granted or renewed the term, to an attempt that began at `asked_at` by
        boottime: a slow answer never lengthens the trust."""
        self._term = term
        self._trusted_until = asked_at + self.timing.trust

    def ended(self) -> None:
        """The term is over, or in doubt."""
        self._term = None
