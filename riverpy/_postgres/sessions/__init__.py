"""Connections and sessions of other libraries than asyncpg, as a caller's transaction."""

from __future__ import annotations
