"""Fixtures of the tests of maintenance."""

from __future__ import annotations

from tests.leading.conftest import held

__all__ = ["held"]
