"""What scripts/leases computes."""

from __future__ import annotations

import pytest

from scripts.leases_advisory import chance


def test_chance_of_a_collision() -> None:
    """Of 77,163 names two share a number of 32 bits with a chance of one half; of two, hardly."""
    assert chance(77_163, 32) == pytest.approx(0.5, abs=0.005)
    assert chance(2, 32) == pytest.approx(2**-32, rel=0.05)
    assert chance(1, 32) == 0
