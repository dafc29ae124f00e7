"""The tests of inserting."""

from __future__ import annotations
