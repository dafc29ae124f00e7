"""Database drivers: each in a module of its own, the only one that imports its library."""

from __future__ import annotations
