"""ChildProcessPool: the child processes of one client, which run its blocking jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._postgres.jobs import ClaimKey
    from riverpy._work.child_process import ChildProcess

IDLE_CHILD_TIMEOUT = 300.0
"""An idle child process is kept for the next job for this many seconds."""
CHILD_EXIT_TIMEOUT = 0.4
"""Seconds to wait until killed child processes have ended."""
CHILD_EXIT_POLL_INTERVAL = 0.005
"""Seconds between two checks whether killed child processes have ended."""


class ChildProcessPool:
    """The busy and the idle child processes of one client."""

    def __init__(self) -> None:
        self._idle_children: list[ChildProcess] = []
        self._busy_children: dict[ClaimKey, ChildProcess] = {}

    def assign_child(self, claim_key: ClaimKey) -> ChildProcess:
        """Return an idle or a new child process for an attempt."""
        child = self._busy_children[claim_key] = self.take_child_without_attempt()
        return child

    def take_child_without_attempt(self) -> ChildProcess:
        """Return an idle or a new child process. The caller must end the child or pass it to
        `keep_or_end_child`."""
        self.end_long_idle_children()
        if self._idle_children:
            return self._idle_children.pop()
        from riverpy._work.child_process import ChildProcess  # most workers start no process

        return ChildProcess()

    @property
    def has_idle_children(self) -> bool:
        """Whether a child is kept for the next job."""
        return bool(self._idle_children)

    def end_long_idle_children(self) -> None:
        """End the children that have been idle for longer than `IDLE_CHILD_TIMEOUT`."""
        now = time.monotonic()
        while self._idle_children and (
            self._idle_children[0].has_exited
            or now - self._idle_children[0].idle_since > IDLE_CHILD_TIMEOUT
        ):
            self._idle_children.pop(0).kill_and_wait(CHILD_EXIT_TIMEOUT)

    def release_child(self, claim_key: ClaimKey) -> None:
        """Release the child of an attempt that has ended. The child is kept for the next job, or
        ended if its job was cancelled."""
        self.keep_or_end_child(self._busy_children.pop(claim_key))

    def keep_or_end_child(self, child: ChildProcess) -> None:
        """Keep a child process for the next job. But if the job of the child was cancelled, kill
        the child. If the child has already exited, only close its pipes and log its output."""
        if child.is_job_cancelled or child.has_exited:
            child.kill_and_wait(CHILD_EXIT_TIMEOUT)
        else:
            child.idle_since = time.monotonic()
            self._idle_children.append(child)

    def end_all_idle_children(self) -> None:
        """End all idle children."""
        idle, self._idle_children = self._idle_children, []
        for child in idle:
            child.kill()
        give_up_at = time.monotonic() + CHILD_EXIT_TIMEOUT
        for child in idle:
            child.kill_and_wait(max(give_up_at - time.monotonic(), 0.0))

    async def kill_children(self, claim_keys: Iterable[ClaimKey]) -> set[ClaimKey]:
        """Kill the children of these attempts. Return the claim keys of the attempts whose child
        still runs after `CHILD_EXIT_TIMEOUT`. Unlike the other methods, this one may be called in
        another thread and event loop."""
        left = {
            claim_key: child
            for claim_key in claim_keys
            if (child := self._busy_children.get(claim_key))
        }
        for child in left.values():
            child.kill()
        give_up_at = time.monotonic() + CHILD_EXIT_TIMEOUT
        while True:
            left = {claim_key: child for claim_key, child in left.items() if not child.has_exited}
            if not left or time.monotonic() >= give_up_at:
                return set(left)
            await anyio.sleep(CHILD_EXIT_POLL_INTERVAL)
