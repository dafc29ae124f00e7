"""User code for the type checkers."""

from __future__ import annotations
