"""What `import riverpy` loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import riverpy
unwanted = ("riverpy._tools", "riverpy.cli.", "click")
print(*(name for name in sys.modules if name.startswith(unwanted)))
"""


def test_library_loads_no_tool() -> None:
    """`import riverpy` loads no module of the tools or of the command, and not click."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
