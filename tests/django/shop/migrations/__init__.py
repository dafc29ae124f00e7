"""The migrations of the app."""

from __future__ import annotations
