"""Probes: whether a worker is alive, and whether it is ready, judged by its stats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._duration import format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from riverpy.stats import ClientStats, QueueStats

CLAIM_AGE_POLLS = 3
"""Poll intervals within which a queue that has something to do must have been claimed from."""
CLAIM_AGE_MARGIN = 1.0
"""Seconds more, so that a quick poll is no race."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    ok: bool
    reason: str


class Verdict(msgspec.Struct, frozen=True):
    """The answer of a probe."""

    ok: bool
    checks: dict[str, Check]

    @classmethod
    def of(cls, checks: dict[str, Check]) -> Verdict:
        """All must be well."""
        return cls(all(check.ok for check in checks.values()), checks)

    @property
    def summary(self) -> str:
        """What is wrong; or that nothing is."""
        wrong = [f"{name}: {one.reason}" for name, one in self.checks.items() if not one.ok]
        return "; ".join(wrong) or "ok"


def liveness(stats: ClientStats | None) -> Verdict:
    """Whether the process does what it should, whatever the database does. That it can be asked
    shows that its event loop turns.

    Args:
        stats: None: there is no client yet.
    """
    stuck = stats.stuck if stats is not None else ()
    reason = f"stuck: {', '.join(stuck)}; restart the worker" if stuck else "all turn"
    return Verdict.of({"event_loop": Check(True, "turns"), "services": Check(not stuck, reason)})


def readiness(stats: ClientStats | None, lag: Check | None = None) -> Verdict:
    """Whether it works jobs.

    Args:
        stats: None: there is no client yet.
        lag: what `lag_within` says. None: it is not asked for.
    """
    state = "starting" if stats is None else stats.state
    checks = {"state": Check(state == "working", state)}
    if stats is not None and stats.state not in {"starting", "stopped"}:
        checks["schema"] = Check(True, "as expected")  # the start checks it
        checks["listener"] = _listener(stats)
        for name, queue in stats.queues.items():
            checks[f"queue {name}"] = _queue(queue)
    if lag is not None:
        checks["lag"] = lag
    return Verdict.of(checks)


def lag_within(
    most: timedelta, lags: Mapping[str, timedelta] | None, stats: ClientStats | None
) -> Check:
    """Whether no due job waits for longer than `most`, but in paused queues.

    Args:
        most: how long one may wait.
        lags: how long the oldest of each queue does. None: the database does not say.
        stats: None: there is no client yet.
    """
    if lags is None:
        return Check(False, "the database does not say how long due jobs wait")
    queues = list(stats.queues.items()) if stats is not None else []
    paused = {name for name, queue in queues if queue.paused}
    late = ", ".join(
        f"{name} {format_duration(age)}"
        for name, age in lags.items()
        if age > most and name not in paused
    )
    return Check(not late, f"due jobs wait too long: {late}" if late else "short")


def _listener(stats: ClientStats) -> Check:
    match stats.listener:
        case "proven":
            return Check(True, "notifications arrive")
        case "off":
            return Check(True, "polling, as configured")
        case "deaf":  # slower, but it works: claims by polling are what decides
            reason = "no notification arrives, jobs are found by polling: see `riverpy doctor`"
            return Check(True, reason)


def _queue(queue: QueueStats) -> Check:
    if queue.paused:
        return Check(True, "paused")
    if queue.running >= queue.slots:
        return Check(True, "every slot is taken")
    age = queue.claim_age
    if age is None:
        return Check(False, "not claimed from yet")
    most = CLAIM_AGE_POLLS * queue.poll_interval + CLAIM_AGE_MARGIN
    return Check(age <= most, f"last claimed from {age:.1f} s ago, at most {most:g} s are well")
