"""Tests of docs/operations.md: its examples agree with riverpy."""

from __future__ import annotations
