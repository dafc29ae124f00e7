"""A wall clock that can be stepped, for other processes and their libraries. Monotonic clocks are
not changed."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("wall_clock.c")


class WallClock:
    """A compiled library and a file with the seconds of the step, both in `directory`."""

    def __init__(self, directory: Path) -> None:
        """Compile the library; this needs a C compiler."""
        library, self._offset = directory / "wall_clock.so", directory / "wall_clock"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE]
        subprocess.run(command, check=True, capture_output=True)
        library.chmod(0o755)
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._offset)}
        """Environment variables of the processes that use the clock."""

    @staticmethod
    def is_possible() -> bool:
        """Return whether there is a C compiler."""
        return shutil.which("cc") is not None

    def step(self, seconds: int) -> None:
        """Step the clock forward or back from its current time."""
        self.set(self.seconds + seconds)

    def set(self, seconds: int) -> None:
        """Set how many seconds the clock is ahead of the true time."""
        self.seconds = seconds
        if not self._offset.exists():
            self._offset.touch(0o644)
        with self._offset.open("r+b") as file:  # in place: the file is mapped into memory
            file.write(struct.pack("=q", seconds))
