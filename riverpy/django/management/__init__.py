"""The package in which Django looks for commands."""

from __future__ import annotations
