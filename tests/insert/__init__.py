"""Tests of inserting jobs."""

from __future__ import annotations
