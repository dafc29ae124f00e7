"""The name of the package, and its installed version."""

from __future__ import annotations

from functools import cache

PYPI_PACKAGE_NAME = "riverpy-queue"
"""The name of the package on PyPI."""


@cache
def read_version() -> str:
    """Return the version of the installed package.

    Raises:
        importlib.metadata.PackageNotFoundError: riverpy is not installed as a package.
    """
    from importlib.metadata import version  # imported here, because it takes 10 ms

    return version(PYPI_PACKAGE_NAME)
