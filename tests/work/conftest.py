"""Fixtures of the tests of working."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy._work import claim_cursor, executor
from tests.work.rig import Rig

if TYPE_CHECKING:
    from tests._database import Schema


@pytest.fixture
def rig(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Workers, clients and jobs on a schema of the test's own. What is available since it is due
    soon is not due before the end of a test that takes long."""
    monkeypatch.setattr(executor, "SOON", timedelta(seconds=40))
    return Rig(schema)


@pytest.fixture
def fast_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim counts as slow, however busy the machine is: a look at a queue is one claim."""
    monkeypatch.setattr(claim_cursor, "SLOW", float("inf"))
