"""SessionTime: the time of the jobs of a test. It is the fixture `riverpy_time`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from riverpy.client import Client
from riverpy.testing.advance import advance

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.testing.clock import FixedClock


class SessionTime:
    """Moves the time of the jobs that one session sees, and a clock for unique periods. If `tx` is
    a client, it moves the time of committed jobs."""

    def __init__(self, tx: CallerTransaction | Client, client: Client, clock: FixedClock) -> None:
        """`client` has the periodic jobs. `clock` is the clock in its settings."""
        self._session = None if isinstance(tx, Client) else tx
        self._client = client
        self.clock: Final = clock
        """The clock of the clients of the test."""

    async def advance(self, by: timedelta) -> None:
        """Let time pass: jobs become due, periodic jobs are inserted, and the clock moves; see
        `riverpy.testing.advance`. No job is worked."""
        await advance(by, client=self._client, tx=self._session)
