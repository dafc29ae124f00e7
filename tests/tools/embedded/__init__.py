"""The tests of the embedded PostgreSQL."""

from __future__ import annotations
