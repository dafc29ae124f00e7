"""ProgressReports: the progress of running jobs that is not yet stored."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from riverpy._postgres.jobs import ClaimKey


class ProgressReports:
    """The newest progress of each attempt of one client that is not stored yet. Any thread may add
    a report.

    A new report replaces the older one of its attempt, so there are never more reports than
    attempts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text_by_claim_key: dict[ClaimKey, str] = {}
        self.wake_writer: Callable[[], None] | None = None
        """The function that wakes the ProgressWriter. None if the client does not work jobs."""

    def add_report(self, claim_key: ClaimKey, text: str) -> None:
        """Add the progress of an attempt, as JSON text."""
        with self._lock:
            is_first = not self._text_by_claim_key
            self._text_by_claim_key[claim_key] = text
        if is_first:
            self._wake_writer_if_set()

    def take_reports(self) -> dict[ClaimKey, str]:
        """Remove and return all reports."""
        with self._lock:
            texts, self._text_by_claim_key = self._text_by_claim_key, {}
        return texts

    def add_unstored_reports(
        self, texts: Mapping[ClaimKey, str], running_claim_keys: Collection[ClaimKey]
    ) -> None:
        """Add the reports `texts` again, because they could not be stored. A report is dropped if
        its attempt has ended or has reported newer progress."""
        kept = {key: text for key, text in texts.items() if key in running_claim_keys}
        with self._lock:
            self._text_by_claim_key = kept | self._text_by_claim_key
            is_any = bool(self._text_by_claim_key)
        if is_any:
            self._wake_writer_if_set()

    def _wake_writer_if_set(self) -> None:
        wake = self.wake_writer
        if wake is not None:
            wake()
