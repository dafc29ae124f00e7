"""Makes a virtual environment for a peer that needs a newer Python than the benchmark runs on."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from scripts._bench.process import ROOT, Unavailable

DIRECTORY = ROOT / ".venv" / "peers"
TIMEOUT = 300.0
"""Seconds for one command of an environment."""


def make_environment(name: str, oldest: tuple[int, int], packages: list[str]) -> str:
    """Install packages for a peer, if they are not installed. Return the path of its Python.

    Raises: Unavailable: there is no Python that is new enough, or pip failed.
    """
    directory = DIRECTORY / name
    python, stamp = directory / "bin" / "python", directory / "packages.json"
    try:
        if json.loads(stamp.read_text()) == packages:
            return str(python)
    except (OSError, ValueError):
        pass
    base = _find_python(oldest)
    _run([base, "-m", "venv", "--clear", str(directory)])
    _run([str(python), "-m", "pip", "install", "--quiet", *packages])
    stamp.write_text(json.dumps(packages))
    return str(python)


def _find_python(oldest: tuple[int, int]) -> str:
    names = [f"python3.{minor}" for minor in range(oldest[1], oldest[1] + 4)]
    found = [shutil.which(name) for name in names]
    found += map(str, sorted((Path.home() / ".pyenv/versions").glob("3.*/bin/python")))
    check = f"import sys, ensurepip, venv; sys.exit(sys.version_info < {oldest})"
    for path in filter(None, found):
        done = subprocess.run([path, "-c", check], capture_output=True, check=False)
        if done.returncode == 0:
            return path
    raise Unavailable(f"it needs Python {oldest[0]}.{oldest[1]}, and there is none")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise Unavailable(f"{command[0]} failed: {lines[-1][:300]}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {TIMEOUT:.0f} s") from None
