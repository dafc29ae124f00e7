"""Callers' transactions in other libraries than asyncpg."""

from __future__ import annotations
