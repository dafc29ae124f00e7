"""Modules of `scripts/bench`: the server, the competitors, the measurements and the goals."""

from __future__ import annotations
