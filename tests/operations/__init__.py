"""docs/operations.md: what it shows is what riverpy does."""

from __future__ import annotations
