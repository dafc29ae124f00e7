"""User code that strict type checking accepts also works."""

from __future__ import annotations

import riverpy
from tests.typing import user_code


def test_user_code() -> None:
    """The program that the type checkers read can be imported; its workers are registered."""
    kinds = ["audited", "crunch", "greet", "loose", "other", "resize", "welcome"]
    assert sorted(user_code.workers) == kinds
    assert isinstance(user_code.client, riverpy.Client)
