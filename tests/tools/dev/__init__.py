"""Tests of `riverpy dev`."""

from __future__ import annotations
