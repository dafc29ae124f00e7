"""Leases: who holds one, for how long, and what cannot be written without."""

from __future__ import annotations
