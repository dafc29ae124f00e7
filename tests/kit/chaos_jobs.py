"""Jobs of a fleet under random faults, with the numbers that identify their inserts, and the
settings of its workers."""

from __future__ import annotations

from typing import ClassVar

import msgspec

import riverpy
from tests.kit.fleet import WorkerSettings

PLANNED = "planned"
"""Start of the text of each error that a handler raises on purpose."""


class ChaosSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker process (`tests/kit/chaos_worker.py`)."""

    target: str = "tests.kit.chaos_worker:client"
    elect_interval: float = 1.0
    leader_ttl: float = 3.0
    dead_after: float = 10.0
    slots: int = 60
    """Slots of each of its two queues."""
    acts: str = ""
    """Path of the file with its records."""


class Quick(msgspec.Struct, frozen=True):
    """A job that returns at once."""

    kind: ClassVar[str] = "quick"
    number: int


class Slow(msgspec.Struct, frozen=True):
    """A job that takes a while."""

    kind: ClassVar[str] = "slow"
    number: int
    seconds: float


class Flaky(msgspec.Struct, frozen=True):
    """A job that fails a few times, then succeeds."""

    kind: ClassVar[str] = "flaky"
    number: int
    failures: int


class Snoozing(msgspec.Struct, frozen=True):
    """A job that snoozes once."""

    kind: ClassVar[str] = "snoozing"
    number: int


class Threaded(msgspec.Struct, frozen=True):
    """A job that takes a while in a thread."""

    kind: ClassVar[str] = "threaded"
    number: int
    seconds: float


class Processed(msgspec.Struct, frozen=True):
    """A job that takes a while in a process."""

    kind: ClassVar[str] = "processed"
    number: int
    seconds: float


class Blocking(msgspec.Struct, frozen=True):
    """A job that blocks the event loop of its worker as long as a file exists."""

    kind: ClassVar[str] = "blocking"
    number: int
    path: str


class Endless(msgspec.Struct, frozen=True):
    """A job that ends only when it is cancelled."""

    kind: ClassVar[str] = "endless"
    number: int


class Once(msgspec.Struct, frozen=True):
    """A unique job: it exists once for its number."""

    kind: ClassVar[str] = "once"
    number: int

    def insert_opts(self) -> riverpy.InsertOpts:
        """Make it unique by its args."""
        return riverpy.InsertOpts(unique_opts=riverpy.UniqueOpts(by_args=True))


class Parent(msgspec.Struct, frozen=True):
    """A job that inserts a `Child`."""

    kind: ClassVar[str] = "parent"
    number: int


class Child(msgspec.Struct, frozen=True):
    """A job that a `Parent` inserts, with the parent's number."""

    kind: ClassVar[str] = "child"
    number: int


class PoolExhausting(msgspec.Struct, frozen=True):
    """A job that takes every connection of its client's pool."""

    kind: ClassVar[str] = "pool_exhausting"
    number: int
    seconds: float
