"""scripts/scaling: its turns, ratios and a small measurement."""

from __future__ import annotations

import sys

import pytest

from scripts.scaling import (
    ScalingServer,
    Size,
    compared,
    in_turns,
    measure_notify,
    measure_wal,
    parse_arguments,
)

TINY = Size(rounds=1, jobs=200, seconds=0.05, pickups=1)


def test_turns_and_ratios() -> None:
    """Each variant is first in turn, and ratios are computed per round."""
    assert in_turns(3, ["a", "b"]) == ["a", "b", "b", "a", "a", "b"]
    found = compared({"a": [10.0, 20.0, 40.0], "b": [5.0, 40.0, 40.0]}, "a")
    assert found["a"] == {"per_s": 20, "ratio": 1.0, "ratio_min": 1.0, "ratio_max": 1.0}
    assert found["b"] == {"per_s": 40, "ratio": 1.0, "ratio_min": 0.5, "ratio_max": 2.0}


def test_unknown_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown measurement is refused with exit code 2, with the list of known ones."""
    monkeypatch.setattr(sys, "argv", ["scaling", "speed"])
    with pytest.raises(SystemExit) as raised:
        parse_arguments()
    assert raised.value.code == 2
    assert "notify, wal" in capsys.readouterr().err


async def test_small_measurement(fresh_database_url: str) -> None:
    """Inserted and worked jobs are counted: every rate and every number of bytes is present."""
    async with ScalingServer(fresh_database_url, TINY).opened() as scaling:
        rates = await measure_notify(scaling)
        sizes = await measure_wal(scaling)
    assert len(rates) == 4
    assert all(rate["per_s"] > 0 for rate in rates.values())
    assert all(size > 0 for size in sizes.values())
    assert sizes["in all"] == sizes["insert_many"] + sizes["claim"] + sizes["complete"]
