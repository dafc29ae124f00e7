"""LeaseTiming: how long a lease lasts, when it is renewed, and until when this process may rely on
it.

The server decides by its own clock when a lease expires. Between two answers of the server, a
process may act under the lease until the local deadline of the lease. The local deadline is the
start of the last successful acquisition or renewal, plus the time to live, minus a margin. The
margin allows for clocks that run at different rates.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from riverpy.config import ELECT_JITTER_FRACTION
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy.config import Config

DEADLINE_MARGIN_SHARE_OF_TTL = 1 / 15
"""The safety margin by which the local deadline of a lease is earlier than its expiry, as a
fraction of the time to live. With a time to live of 15 s, this is 1 s, as in River."""
GRACE_PERIOD_SHARE_OF_TTL = 1 / 5
"""The grace period in which work under a lease must stop, as a fraction of the time to live. With a
time to live of 15 s, this is 3 s."""
DEADLINE_CHECK_INTERVAL_MAX = 1.0
DEADLINE_CHECK_INTERVAL_MIN = 0.001
DEADLINE_CHECK_INTERVAL_SHARE_OF_TTL = 1 / 15
"""The time between two checks of the local deadline, as a fraction of the time to live."""
ACQUIRE_JITTER_MAX = 0.05
"""The longest random delay before an attempt to acquire a lease that was released or has expired,
in seconds."""


class LeaseTiming(msgspec.Struct, frozen=True):
    """The time to live of a lease, and the interval of its renewals, in seconds."""

    ttl: float
    """The time to live of a lease: how long it lasts without a renewal."""
    attempt_interval: float
    """The time between two renewals, or between two attempts to acquire the lease."""

    @classmethod
    def from_config(cls, config: Config) -> LeaseTiming:
        """Return the timing of a client's configuration."""
        return cls(config.leader_ttl.total_seconds(), config.elect_interval.total_seconds())

    @property
    def ttl_timedelta(self) -> timedelta:
        """`ttl` as a timedelta, the type that SQL statements need."""
        return timedelta(seconds=self.ttl)

    @property
    def validity_seconds(self) -> float:
        """The time from the start of a successful acquisition or renewal of the lease until its
        local deadline, in seconds."""
        return self.ttl * (1 - DEADLINE_MARGIN_SHARE_OF_TTL)

    @property
    def grace_seconds(self) -> float:
        """The grace period in which work under a lease must stop, in seconds."""
        return self.ttl * GRACE_PERIOD_SHARE_OF_TTL

    @property
    def deadline_check_interval(self) -> float:
        """Seconds between two checks of the local deadline. No single sleep is longer: a sleep does
        not count the time during which the machine is suspended, so a long sleep could end after
        the deadline."""
        return max(
            min(DEADLINE_CHECK_INTERVAL_MAX, self.ttl * DEADLINE_CHECK_INTERVAL_SHARE_OF_TTL),
            DEADLINE_CHECK_INTERVAL_MIN,
        )

    def seconds_until_next_attempt(self, seconds_until_expiry: float | None) -> float:
        """Return the delay from a failed attempt to acquire the lease until the next attempt, in
        seconds. `seconds_until_expiry` is the time until the lease of the current holder expires.
        None: this time is not known."""
        usual = self.attempt_interval * (1 + random.uniform(0, ELECT_JITTER_FRACTION))  # noqa: S311 (no secret)
        if seconds_until_expiry is None:
            return usual
        return min(usual, seconds_until_expiry + random.uniform(0, ACQUIRE_JITTER_MAX))  # noqa: S311 (no secret)


def validate_wait_argument(wait: timedelta | None) -> None:
    """Check the argument `wait` of a call that waits for a lease.

    Raises:
        ConfigError: `wait` is neither a timedelta nor None.
    """
    if wait is not None and not isinstance(wait, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"wait takes a timedelta, or None, got {type(wait).__name__}")
