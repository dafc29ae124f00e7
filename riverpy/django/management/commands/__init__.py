"""Django looks for commands here."""

from __future__ import annotations
