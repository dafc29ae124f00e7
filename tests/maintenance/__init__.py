"""Maintenance: what the leader does, on a real schema."""

from __future__ import annotations
