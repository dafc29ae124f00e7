"""Fixtures of the tests of hooks and middleware."""

from __future__ import annotations

from tests.work.conftest import rig

__all__ = ["rig"]
