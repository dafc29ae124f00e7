"""A place for the embedded servers of the commands under test."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from riverpy.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def embedded_directory() -> Generator[Path]:
    """An empty directory that the owner of a server process can enter. Its servers are removed."""
    path = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    for directory in path.glob("*-pg*"):
        EmbeddedPostgres(directory.name.rpartition("-")[0], base_dir=path).remove()
    shutil.rmtree(path)
