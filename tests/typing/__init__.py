"""User code, as the type checkers see it."""

from __future__ import annotations
