"""Fixtures of the tests of working."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from riverpy._work import executor
from tests.work.rig import Rig

if TYPE_CHECKING:
    from tests._database import Schema


@pytest.fixture
def rig(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Workers, clients and jobs on a schema of the test's own. What is available since it is due
    soon is not due before the end of a test that takes long."""
    monkeypatch.setattr(executor, "SOON", timedelta(seconds=40))
    return Rig(schema)
