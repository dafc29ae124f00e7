"""OutputSaver: stores the outputs of running jobs before their attempts end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio

from riverpy.job import OUTPUT_METADATA_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from riverpy._postgres.jobs import ClaimKey
    from riverpy.job import JobRow

OUTPUT_STORE_TIMEOUT = 5.0
"""How long a failed statement that stores an output is retried, in seconds."""


class MergeMetadataFunction(Protocol):
    """A function that merges metadata keys and their values (JSON texts) into the row of a running
    job."""

    def __call__(
        self, claim_key: ClaimKey, updates: Mapping[str, str], *, timeout: float
    ) -> Awaitable[None]: ...


class _UnfinishedSaveCalls:
    """The `save_output` calls of one attempt that have not ended."""

    __slots__ = ("call_count", "last_number", "lock", "newest_text", "stored_number")

    def __init__(self) -> None:
        self.lock = anyio.Lock(fast_acquire=True)
        self.call_count = self.last_number = self.stored_number = 0
        self.newest_text = ""


class OutputSaver:
    """Stores outputs of running jobs. For each attempt, one statement runs at a time. If several
    calls of an attempt wait, only the newest output is stored."""

    def __init__(
        self, merge_metadata: MergeMetadataFunction, on_saved: Callable[[JobRow], None]
    ) -> None:
        """`on_saved` is called with each job whose output was stored."""
        self._merge_metadata, self._on_saved = merge_metadata, on_saved
        self._calls_by_claim_key: dict[ClaimKey, _UnfinishedSaveCalls] = {}

    async def save_output(self, job: JobRow, key: ClaimKey, text: str) -> None:
        """Store an output, which is a JSON text. Raises the errors of `Job.save_output`."""
        calls = self._calls_by_claim_key.setdefault(key, _UnfinishedSaveCalls())
        calls.last_number += 1
        calls.newest_text, own_number = text, calls.last_number
        calls.call_count += 1
        try:
            async with calls.lock:
                if calls.stored_number >= own_number:
                    return
                number, updates = calls.last_number, {OUTPUT_METADATA_KEY: calls.newest_text}
                await self._merge_metadata(key, updates, timeout=OUTPUT_STORE_TIMEOUT)
                calls.stored_number = number
            self._on_saved(job)
        finally:
            calls.call_count -= 1
            if not calls.call_count:
                self._calls_by_claim_key.pop(key, None)
