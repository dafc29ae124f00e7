"""Fixtures of the tests of working."""

from __future__ import annotations

import pytest

from riverpy._work import claim_cursor


@pytest.fixture
def fast_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim counts as slow, however busy the machine is: a look at a queue is one claim."""
    monkeypatch.setattr(claim_cursor, "SLOW", float("inf"))
