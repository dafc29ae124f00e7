"""One run of the benchmark: options, competitors, samples and progress output."""

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
    """The options of the command line."""

    jobs: int
    rounds: int
    is_quick: bool
    only: frozenset[str] | None
    """The measurements to run; None runs all."""
    names: Sequence[str]
    """Names of the competitors."""
    snapshot_seconds: float
    rows: int
    """Number of finished rows, or of jobs in the backlog."""
    memory_jobs: int
    pickups: int
    sustained_seconds: float
    idle_seconds: float

    def wants(self, *measures: str) -> bool:
        """Return whether one of these measurements is selected."""
        return self.only is None or not self.only.isdisjoint(measures)


class Run:
    """A run on one server."""

    def __init__(self, server: Server, options: Options) -> None:
        self.server = server
        self.options = options
        self.samples = Samples()
        self.notes: list[str] = []
        self._versions: dict[str, str] = {}
        self._all = [one(server) for one in ALL if one.name in options.names]

    @property
    def competitors(self) -> list[Competitor]:
        """Return the competitors that can be measured."""
        return [one for one in self._all if one.name in self._versions]

    def named(self, *names: str) -> list[Competitor]:
        """Return the competitors with these names that can be measured."""
        return [one for one in self.competitors if one.name in names]

    @property
    def riverpy(self) -> Riverpy:
        """Return riverpy, which is always measured."""
        return next(one for one in self._all if isinstance(one, Riverpy))

    def in_turn(self, number: int, names: Sequence[str] | None = None) -> list[Competitor]:
        """Return the competitors in the order of a round. Another one is first in each round."""
        found = self.competitors if names is None else self.named(*names)
        first = number % len(found)
        return found[first:] + found[:first]

    async def prepare(self) -> None:
        """Find out which competitors can be measured."""
        for one in self._all:
            async with self.trying(one.name, "preparing"):
                self._versions[one.name] = await one.prepare()

    @asynccontextmanager
    async def trying(self, name: str, what: str) -> AsyncGenerator[None]:
        """Run the block, and record the reason if it fails."""
        print(f"{what}: {name}", file=sys.stderr)
        try:
            yield
        except (Unavailable, asyncpg.PostgresError, OSError, KeyError) as error:
            reason = str(error) or type(error).__name__
            print(f"{what}: {name} is not measured: {reason}", file=sys.stderr)
            if name in _PEERS:  # it would fail again in each round, often after a long time
                self._versions.pop(name, None)
            self.samples.reasons.setdefault(
                name if what == "preparing" else f"{what}: {name}", reason
            )

    async def about(self) -> dict[str, Any]:
        """Return facts about machine, versions and size of the run."""
        postgres = await self.server.version()
        return {
            "machine": machine(),
            "versions": {"postgres": postgres, **versions(), **self._versions},
            "rounds": self.options.rounds,
            "jobs": self.options.jobs,
            "only": sorted(self.options.only) if self.options.only else None,
            "notes": self.notes,
        }
