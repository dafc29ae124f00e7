"""Adapters for connections and sessions of other libraries than asyncpg, which callers pass as
`tx=`."""

from __future__ import annotations
