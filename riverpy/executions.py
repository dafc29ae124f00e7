"""The results of `run_once`, `run_at_most_once` and `run_at_least_once`.

Each call has a key, which the caller chooses to identify one effect, for example `order-7-paid`.
The call runs a function, and the effect is what this function does, for example a payment.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

ResultT = TypeVar("ResultT")


class ExecutionState(Enum):
    """The outcome of one call of `run_once`, `run_at_most_once` or `run_at_least_once`: whether the
    call ran the function, and what riverpy knows about the effect of the function. The effect is
    what the function does, for example sending a mail."""

    RAN = "ran"
    """The function ran in this call."""
    DONE_BEFORE = "done before"
    """The function of an earlier call with the same key has completed. This call did nothing."""
    IN_PROGRESS = "in progress"
    """Another call with the same key is running its function. This call did nothing: try again
    later.

    For `run_at_most_once`, the client of the other call is alive. For `run_at_least_once`, the
    other call's claim of the key has not expired."""
    UNKNOWN = "unknown"
    """An earlier call of `run_at_most_once` claimed the same key, but did not record that the
    effect is complete. The effect may or may not have happened. This call did nothing, and the
    function does not run again.

    The function of the earlier call failed or was cancelled, or the client of the earlier call is
    dead (it has written no heartbeat for its `dead_after`)."""
    OVERTAKEN = "overtaken"
    """The function ran in this call. But before the function ended, this call's claim of the key
    expired, and another call claimed the key. So the effect may happen twice."""


class Execution(msgspec.Struct, Generic[ResultT], frozen=True):
    """The result of one call of `run_once`, `run_at_most_once` or `run_at_least_once`."""

    state: ExecutionState
    value: ResultT | None = None
    """The value that the function returned; None: the function did not run in this call."""
    claimed_by: str | None = None
    """The id of the client whose call claimed the key; None: not known, for example because that
    call's transaction is still open."""
    claimed_at: datetime | None = None
    """The time at which another call claimed the key, by the server's clock; None: not known, or
    the function ran in this call."""

    @property
    def ran(self) -> bool:
        """Whether the function ran in this call."""
        return self.state in {ExecutionState.RAN, ExecutionState.OVERTAKEN}


class Claim(NamedTuple):
    """The right of one call of `run_at_most_once` or `run_at_least_once` to run its function. The
    call passes this object to the function."""

    key: str
    epoch: int
    """A number that increases with each claim of the key. Another system can use this number as a
    fencing token and refuse lower numbers. `key` and `epoch` together identify one run of the
    function."""
