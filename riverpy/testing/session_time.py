"""SessionTime: moves the time for the jobs of a test. The fixture `riverpy_time` returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from riverpy.client import Client
from riverpy.testing.advance import advance

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.testing.clock import FixedClock


class SessionTime:
    """Lets a test act as if time has passed for its jobs.

    If the test has passed a session, these are the jobs that the session sees. If it has passed a
    client, they are the committed jobs. The object also moves the `FixedClock` of the test's
    clients, which decides the period of a job with `UniqueOpts.by_period`."""

    def __init__(self, tx: CallerTransaction | Client, client: Client, clock: FixedClock) -> None:
        """Create the object.

        Args:
            tx: the test's session, or an open client.
            client: the client with the periodic jobs.
            clock: the clock in the settings of this client.
        """
        self._session = None if isinstance(tx, Client) else tx
        self._client = client
        self.clock: Final = clock
        """The clock in the settings of the test's clients."""

    async def advance(self, by: timedelta) -> None:
        """Act as if time has passed: jobs become due, periodic jobs insert their jobs, and the
        clock moves; see `riverpy.testing.advance`. No job is worked."""
        await advance(by, client=self._client, tx=self._session)
