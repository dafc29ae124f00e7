"""Fixtures of the tests of user code that misbehaves."""

from __future__ import annotations

from tests.work.conftest import log, rig

__all__ = ["log", "rig"]
