"""The version of riverpy. The packaging reads it from here."""

from __future__ import annotations

VERSION = "0.1.0"
