"""The tests of riverpy, on a real PostgreSQL."""

from __future__ import annotations
