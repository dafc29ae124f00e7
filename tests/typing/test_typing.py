"""User code that strict type checking accepts can also be imported."""

from __future__ import annotations

import riverpy
from tests.typing import user_code


def test_user_code() -> None:
    """The program for the type checkers can be imported, and its workers are registered."""
    kinds = [
        "audited",
        "billed",
        "crunch",
        "greet",
        "invoice",
        "long",
        "loose",
        "other",
        "resize",
        "welcome",
    ]
    assert sorted(user_code.workers) == kinds
    assert isinstance(user_code.client, riverpy.Client)
