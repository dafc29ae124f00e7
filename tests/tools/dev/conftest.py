"""A place for the embedded servers of the commands under test."""

from __future__ import annotations

from tests.cli.conftest import embedded_directory

__all__ = ["embedded_directory"]
