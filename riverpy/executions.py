"""The results of `run_once`, `run_at_most_once` and `run_at_least_once`.

These calls run a function for a key. The effect is what the function does, such as a payment.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

ResultT = TypeVar("ResultT")


class ExecutionState(Enum):
    """What a call did, and what is known about its effect (what its function does)."""

    RAN = "ran"
    """The function ran in this call."""
    DONE_BEFORE = "done before"
    """An earlier call completed the effect. This call did nothing."""
    IN_PROGRESS = "in progress"
    """Another call is running the function. This call did nothing: try again later.

    For `run_at_most_once`, the client of the other call is alive. For `run_at_least_once`, the
    other call's claim of the key has not expired."""
    UNKNOWN = "unknown"
    """An earlier call of `run_at_most_once` claimed the key, but did not record that the effect is
    complete. The effect may or may not have happened. This call did nothing, and the function does
    not run again.

    The earlier function failed or was cancelled, or its client is dead (it has written no heartbeat
    for its `dead_after`)."""
    OVERTAKEN = "overtaken"
    """The function ran in this call. But before it ended, this call's claim of the key expired, and
    another call claimed the key. So the effect may happen twice."""


class Execution(msgspec.Struct, Generic[ResultT], frozen=True):
    """The result of one call of `run_once`, `run_at_most_once` or `run_at_least_once`."""

    state: ExecutionState
    value: ResultT | None = None
    """The value that the function returned; None: the function did not run in this call."""
    claimed_by: str | None = None
    """The id of the client whose call claimed the key, to run the function; None: not known
    yet."""
    claimed_at: datetime | None = None
    """The time at which another call claimed the key, by the server's clock; None: not known, or
    the function ran in this call."""

    @property
    def ran(self) -> bool:
        """Whether the function ran in this call."""
        return self.state in {ExecutionState.RAN, ExecutionState.OVERTAKEN}


class Claim(NamedTuple):
    """The right of one call to run its function, whose effect is outside the database."""

    key: str
    epoch: int
    """A number that increases with each claim of the key. Another system can use it as a fencing
    token and refuse lower numbers. `key` and `epoch` together identify one run of the function."""
