"""Periodic jobs: their schedules, their registry, and what a leader inserts."""

from __future__ import annotations
