"""The calculations of scripts/leases."""

from __future__ import annotations

import pytest

from scripts.leases_advisory import chance


def test_chance_of_a_collision() -> None:
    """Of 77,163 names two have the same 32-bit number with a chance of one half. Two names hardly
    ever do."""
    assert chance(77_163, 32) == pytest.approx(0.5, abs=0.005)
    assert chance(2, 32) == pytest.approx(2**-32, rel=0.05)
    assert chance(1, 32) == 0
