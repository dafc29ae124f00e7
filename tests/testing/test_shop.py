"""The tests of the sample shop, which use the pytest plugin alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHOP = Path(__file__).parents[2] / "examples" / "shop"


def test_shop(server_url: str, tmp_path: Path) -> None:
    """The 40 tests of the shop pass in two processes."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "RIVERPY_"))}
    options = ["-q", "-n", "2", "--dist", "loadscope", "-o", f"cache_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:faker", "-p", "no:hypothesispytest"],
        cwd=SHOP,
        env={**clean, "RIVERPY_TEST_DATABASE_URL": server_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "40 passed" in done.stdout, done.stdout + done.stderr
