"""`scripts/interop` builds the Go program with the given version of River."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts.interop import UnusableError, copy_with, pinned, versions_of
from tests.interop.river_go import SOURCES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("go_binary")
def test_copy(tmp_path: Path) -> None:
    """The copy has the whole program, and each module of River in the given version, with or
    without its `v`. The checkout does not change. An invalid version is an error."""
    before = (SOURCES / "go.mod").read_text("utf-8")
    assert copy_with(pinned(), tmp_path) == pinned()
    assert (SOURCES / "go.mod").read_text("utf-8") == before
    assert (tmp_path / "main.go").exists()
    versions = versions_of((tmp_path / "go.mod").read_text("utf-8"))
    assert set(versions.values()) == {pinned()}
    assert copy_with(pinned().removeprefix("v"), tmp_path) == pinned()
    with pytest.raises(UnusableError, match="go list"):
        copy_with("no version", tmp_path)
