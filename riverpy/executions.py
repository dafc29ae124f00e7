"""The results of `run_once`, `run_at_most_once` and `run_at_least_once`."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 (msgspec reads the annotations)
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import msgspec

ResultT = TypeVar("ResultT")


class ExecutionState(Enum):
    """How it stands with an effect after a call."""

    RAN = "ran"
    """It ran here, now."""
    DONE_BEFORE = "done before"
    """It was done by an earlier call; this one did nothing."""
    IN_PROGRESS = "in progress"
    """Another call is at it, or its claim has not expired yet; this one did nothing. Try later."""
    UNKNOWN = "unknown"
    """Somebody has claimed it, at most once, and has not completed it: it is at it, or has ended
    before, between or after. It does not run again; this call did nothing."""
    OVERTAKEN = "overtaken"
    """It ran here, but its claim had expired and was taken over: it may happen twice."""


class Execution(msgspec.Struct, Generic[ResultT], frozen=True):
    """The answer to a call."""

    state: ExecutionState
    value: ResultT | None = None
    """What the function returned, if it ran here."""
    claimed_by: str | None = None
    """The id of the client that did it, or is at it; None: it is not known yet."""
    claimed_at: datetime | None = None
    """When it was claimed, by the server's clock, if another has done so."""

    @property
    def ran(self) -> bool:
        """Whether the function ran in this call."""
        return self.state in {ExecutionState.RAN, ExecutionState.OVERTAKEN}


class Claim(NamedTuple):
    """The right to an effect outside of the database."""

    key: str
    epoch: int
    """Rises with each claim of the key: a token for systems that refuse lower ones. With `key` it
    is what another system needs to tell a repetition."""
