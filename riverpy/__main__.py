"""`python -m riverpy` runs the command `riverpy`."""

from __future__ import annotations

from riverpy.cli import main

if __name__ == "__main__":
    main()
