"""Fixtures of the tests of the worker."""

from __future__ import annotations

import pytest

from riverpy._work import claim_cursor


@pytest.fixture
def fast_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no claim count as slow on a busy machine, so that a check of a queue is one claim."""
    monkeypatch.setattr(claim_cursor, "SLOW_CLAIM_THRESHOLD", float("inf"))
