"""Fixtures of the tests of hooks and middleware."""

from __future__ import annotations

from tests.work.conftest import log, rig

__all__ = ["log", "rig"]
