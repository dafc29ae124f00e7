"""What the workers of `scripts/chaos leases` are told."""

from __future__ import annotations

from enum import StrEnum

from tests.kit.fleet import WorkerSettings


class Break(StrEnum):
    """A protection that is taken away, for the checker to find what it is for."""

    FENCE = "fence"
    """Writers do not fence."""
    MARGIN = "margin"
    """A process trusts itself for longer than its lease lasts."""
    EPOCH = "epoch"
    """A new holder has the epoch of the old one."""


class LeaseChaosSettings(WorkerSettings, frozen=True, kw_only=True):
    """What the process of a worker is told (`tests/kit/lease_chaos_worker.py`)."""

    target: str = "tests.kit.lease_chaos_worker:client"
    notes: str = ""
    """The file of its notes."""
    leases: tuple[str, ...] = ()
    """All that it wants to hold by hand, by a manager of its own."""
    singletons: tuple[str, ...] = ()
    """All that it registers."""
    domain: str = ""
    """Whose lead it stands for."""
    broken: Break | None = None
