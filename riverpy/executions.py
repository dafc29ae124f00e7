"""The results of `run_once`, `run_at_most_once` and `run_at_least_once`."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

ResultT = TypeVar("ResultT")


class ExecutionState(Enum):
    """The state of an effect after a call."""

    RAN = "ran"
    """The function ran in this call."""
    DONE_BEFORE = "done before"
    """An earlier call completed the effect. This call did nothing."""
    IN_PROGRESS = "in progress"
    """Another call is running the function. For `run_at_most_once` this means that its client is
    alive, and for `run_at_least_once` that its claim has not expired. This call did nothing. Try
    again later."""
    UNKNOWN = "unknown"
    """An earlier call of `run_at_most_once` claimed the key, and did not record that the effect is
    complete. Its function failed or was cancelled, or its client is dead: it has written no
    heartbeat for its `dead_after`. The effect may or may not have happened. The function does not
    run again. This call did nothing."""
    OVERTAKEN = "overtaken"
    """The function ran in this call, but the claim expired and another call claimed the key. So the
    effect may happen twice."""


class Execution(msgspec.Struct, Generic[ResultT], frozen=True):
    """The result of one call for an effect."""

    state: ExecutionState
    value: ResultT | None = None
    """The value that the function returned; None: the function did not run in this call."""
    claimed_by: str | None = None
    """The id of the client that claimed the key; None: not known yet."""
    claimed_at: datetime | None = None
    """The time at which another call claimed the key, by the server's clock; None: not known, or
    the function ran in this call."""

    @property
    def ran(self) -> bool:
        """Whether the function ran in this call."""
        return self.state in {ExecutionState.RAN, ExecutionState.OVERTAKEN}


class Claim(NamedTuple):
    """The right to run an effect outside the database."""

    key: str
    epoch: int
    """A number that rises with each claim of the key. Another system can use it as a fencing token
    and refuse lower numbers. `key` and `epoch` together identify one run."""
