"""A wall clock that can be stepped, for processes of their own: all that they and their libraries
read of it. (Clocks that measure durations are not touched.)"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("wall_clock.c")


class WallClock:
    """What stands in `directory`: a compiled library, and a file with the seconds of the step."""

    def __init__(self, directory: Path) -> None:
        """Make it; needs a C compiler."""
        library, self._offset = directory / "wall_clock.so", directory / "wall_clock"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE]
        subprocess.run(command, check=True, capture_output=True)
        library.chmod(0o755)
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._offset)}
        """Of the processes whose clock it is."""

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a C compiler."""
        return shutil.which("cc") is not None

    def step(self, seconds: int) -> None:
        """Step it forward, or back, from where it stands."""
        self.set(self.seconds + seconds)

    def set(self, seconds: int) -> None:
        """Step it: so much before the true time, or behind it."""
        self.seconds = seconds
        if not self._offset.exists():
            self._offset.touch(0o644)
        with self._offset.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("=q", seconds))
