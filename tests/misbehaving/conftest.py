"""Fixtures of the tests of user code that misbehaves."""

from __future__ import annotations

from tests.work.conftest import rig

__all__ = ["rig"]
