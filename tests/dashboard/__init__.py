"""Tests of the dashboard."""

from __future__ import annotations
