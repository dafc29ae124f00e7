"""The jobs of a fleet under random faults, each with the number by which its insert is known, and
what its workers are told."""

from __future__ import annotations

from typing import ClassVar

import msgspec

import riverpy
from tests.kit.fleet import WorkerSettings

PLANNED = "planned"
"""How the text of an error begins that a handler raises."""


class ChaosSettings(WorkerSettings, frozen=True, kw_only=True):
    """What the process of a worker is told (`tests/kit/chaos_worker.py`)."""

    target: str = "tests.kit.chaos_worker:client"
    elect_interval: float = 1.0
    leader_ttl: float = 3.0
    dead_after: float = 10.0
    slots: int = 60
    """Of each of its two queues."""
    acts: str = ""
    """The file of its acts."""


class Quick(msgspec.Struct, frozen=True):
    """Ends at once."""

    kind: ClassVar[str] = "quick"
    number: int


class Slow(msgspec.Struct, frozen=True):
    """Takes a while."""

    kind: ClassVar[str] = "slow"
    number: int
    seconds: float


class Flaky(msgspec.Struct, frozen=True):
    """Fails, then succeeds."""

    kind: ClassVar[str] = "flaky"
    number: int
    failures: int


class Snoozing(msgspec.Struct, frozen=True):
    """Snoozes once."""

    kind: ClassVar[str] = "snoozing"
    number: int


class Threaded(msgspec.Struct, frozen=True):
    """Takes a while in a thread."""

    kind: ClassVar[str] = "threaded"
    number: int
    seconds: float


class Processed(msgspec.Struct, frozen=True):
    """Takes a while in a process."""

    kind: ClassVar[str] = "processed"
    number: int
    seconds: float


class Blocking(msgspec.Struct, frozen=True):
    """Blocks the event loop of its worker while there is a file."""

    kind: ClassVar[str] = "blocking"
    number: int
    path: str


class Endless(msgspec.Struct, frozen=True):
    """Ends when it is cancelled."""

    kind: ClassVar[str] = "endless"
    number: int


class Once(msgspec.Struct, frozen=True):
    """Exists once for its number."""

    kind: ClassVar[str] = "once"
    number: int

    def insert_opts(self) -> riverpy.InsertOpts:
        """It is unique."""
        return riverpy.InsertOpts(unique_opts=riverpy.UniqueOpts(by_args=True))


class Parent(msgspec.Struct, frozen=True):
    """Inserts a `Child`."""

    kind: ClassVar[str] = "parent"
    number: int


class Child(msgspec.Struct, frozen=True):
    """Is inserted by a `Parent`, whose number it has."""

    kind: ClassVar[str] = "child"
    number: int


class Hoarding(msgspec.Struct, frozen=True):
    """Keeps every connection of its client's pool."""

    kind: ClassVar[str] = "hoarding"
    number: int
    seconds: float
