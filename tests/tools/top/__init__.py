"""Tests of `riverpy top`."""

from __future__ import annotations
