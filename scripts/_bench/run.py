"""A run: its options, competitors, samples, and what it says meanwhile."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

from scripts._bench.competitors import ALL, Peer, Riverpy
from scripts._bench.machine import machine, versions
from scripts._bench.process import Unavailable
from scripts._bench.samples import Samples

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from scripts._bench.competitors import Competitor
    from scripts._bench.server import Server


_PEERS = frozenset(one.name for one in ALL if issubclass(one, Peer))


class Options(NamedTuple):
    """What the command line says."""

    jobs: int
    rounds: int
    is_quick: bool
    only: frozenset[str] | None
    """Keys to measure; None: all."""
    names: Sequence[str]
    """Of the competitors."""
    snapshot_seconds: float
    rows: int
    """Old rows, or jobs of the backlog."""
    memory_jobs: int
    pickups: int
    sustained_seconds: float
    idle_seconds: float

    def wants(self, *measures: str) -> bool:
        """Whether one of these is to be measured."""
        return self.only is None or not self.only.isdisjoint(measures)


class Run:
    """One run on one server."""

    def __init__(self, server: Server, options: Options) -> None:
        self.server = server
        self.options = options
        self.samples = Samples()
        self.notes: list[str] = []
        self._versions: dict[str, str] = {}
        self._all = [one(server) for one in ALL if one.name in options.names]

    @property
    def competitors(self) -> list[Competitor]:
        """Those that can be measured."""
        return [one for one in self._all if one.name in self._versions]

    def named(self, *names: str) -> list[Competitor]:
        """Of those, these."""
        return [one for one in self.competitors if one.name in names]

    @property
    def riverpy(self) -> Riverpy:
        """riverpy, which is always there."""
        return next(one for one in self._all if isinstance(one, Riverpy))

    def in_turn(self, number: int, names: Sequence[str] | None = None) -> list[Competitor]:
        """The competitors in the order of a round: another comes first each time."""
        found = self.competitors if names is None else self.named(*names)
        first = number % len(found)
        return found[first:] + found[:first]

    async def prepare(self) -> None:
        """See who can be measured."""
        for one in self._all:
            async with self.trying(one.name, "preparing"):
                self._versions[one.name] = await one.prepare()

    @asynccontextmanager
    async def trying(self, name: str, what: str) -> AsyncGenerator[None]:
        """Go on when this fails, and keep the reason."""
        print(f"{what}: {name}", file=sys.stderr)
        try:
            yield
        except (Unavailable, asyncpg.PostgresError, OSError, KeyError) as error:
            reason = str(error) or type(error).__name__
            print(f"{what}: {name} is not measured: {reason}", file=sys.stderr)
            if name in _PEERS:  # it would fail in each round again, and most take a while to
                self._versions.pop(name, None)
            self.samples.reasons.setdefault(
                name if what == "preparing" else f"{what}: {name}", reason
            )

    async def about(self) -> dict[str, Any]:
        """Machine, versions, and the size of the run."""
        postgres = await self.server.version()
        return {
            "machine": machine(),
            "versions": {"postgres": postgres, **versions(), **self._versions},
            "rounds": self.options.rounds,
            "jobs": self.options.jobs,
            "notes": self.notes,
        }
