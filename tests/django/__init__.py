"""Tests of riverpy.django on real Django projects."""

from __future__ import annotations
