"""scripts/interop: the version of River, and the output where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.interop import pinned, versions_of
from tests.interop.river_go import SOURCES

ROOT = Path(__file__).parents[2]


def test_one_version() -> None:
    """Every module of River is pinned at one version."""
    versions = versions_of((SOURCES / "go.mod").read_text("utf-8"))
    assert len(versions) == 5
    assert set(versions.values()) == {pinned()}


def test_without_go(tmp_path: Path) -> None:
    """Without Go nothing is tested: exit code 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.interop", "--river", "v0.50.0"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "scripts/interop: Go is needed, and there is no `go` on the PATH\n"
