"""Settings of the workers of `scripts/chaos leases`."""

from __future__ import annotations

from enum import StrEnum

from tests.kit.fleet import WorkerSettings


class DisabledProtection(StrEnum):
    """A protection that is switched off, so that the checker finds violations."""

    FENCE = "fence"
    """Writers do not use the fence."""
    MARGIN = "margin"
    """The lease of a process is valid locally for longer than in the database."""
    EPOCH = "epoch"
    """A new holder gets the epoch of the old one."""


class LeaseChaosSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker process (`tests/kit/lease_chaos_worker.py`)."""

    target: str = "tests.kit.lease_chaos_worker:client"
    notes: str = ""
    """Path of the file with its records."""
    leases: tuple[str, ...] = ()
    """Leases that it acquires directly, by a manager of its own."""
    singletons: tuple[str, ...] = ()
    """Singletons that it registers."""
    domain: str = ""
    """The domain whose leader election it takes part in."""
    broken: DisabledProtection | None = None
