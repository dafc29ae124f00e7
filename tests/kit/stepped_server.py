"""A PostgreSQL whose wall clock can be stepped while it runs. It needs a C compiler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from riverpy.embedded import EmbeddedPostgres
from tests.kit.fleet import SERVER_SETTINGS, Server
from tests.kit.wall_clock import WallClock

if TYPE_CHECKING:
    from pathlib import Path

CLOCK_STEP = 600
"""Size of the usual step, in seconds."""


class SteppedPostgres(EmbeddedPostgres):
    """A server with a clock of its own, below `directory`, which every account may enter."""

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__("fleet", base_dir=directory, settings=SERVER_SETTINGS | settings)
        self.clock = WallClock(directory)

    @property
    def _postgres_environment(self) -> dict[str, str]:
        return super()._postgres_environment | self.clock.environment


class SteppedServer(Server):
    """The server of a fleet with a clock of its own."""

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__(directory)
        self._postgres = postgres = SteppedPostgres(directory, **settings)
        self.clock = postgres.clock


def make_server(directory: Path, **settings: str) -> Server:
    """Create the server of a fleet, with a clock of its own where that is possible."""
    if WallClock.is_possible():
        return SteppedServer(directory, **settings)
    print("no C compiler: the clock of the server is not stepped", file=sys.stderr)
    return Server(directory, **settings)
