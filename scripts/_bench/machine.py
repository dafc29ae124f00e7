"""Facts about the machine of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path


def machine() -> dict[str, str]:
    """Return processors, memory and system, as far as they can be read."""
    return {
        "cores": str(os.cpu_count()),
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "memory": _field("/proc/meminfo", "MemTotal") or "unknown",
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the languages."""
    found = {"python": platform.python_version()}
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(["go", "version"], capture_output=True, text=True, check=True)
        found["go"] = done.stdout.split()[2].removeprefix("go")
    return found


def _field(path: str, name: str) -> str | None:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None
