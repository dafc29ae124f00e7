"""Adapters for connections and sessions that callers pass as `tx=`, of libraries other than
asyncpg."""

from __future__ import annotations
