"""The files that the jobs of `riverpy demo` compress."""

from __future__ import annotations

import os
import stat
import sysconfig
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXCLUDED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})


class FileScan:
    """The regular files below a directory, sorted by name. Links are not followed.

    Args:
        directory: the directory. None: the `.py` files of Python's standard library.
        limit: the maximum number of files. None: no limit.
    """

    def __init__(self, directory: Path | None, limit: int | None) -> None:
        self.directory = (directory or Path(sysconfig.get_path("stdlib"))).absolute()
        self.problems: list[str] = []
        """One text for each directory or file that could not be read, and for each file name that
        is not UTF-8."""
        self._is_default_directory = directory is None
        self.paths = list(islice(self._find_paths(), limit))

    def _find_paths(self) -> Iterator[str]:
        for parent, directories, names in os.walk(self.directory, onerror=self._add_problem):
            if self._is_default_directory:
                directories[:] = set(directories) - _EXCLUDED_DIRECTORIES
            directories.sort()
            for name in sorted(names):
                path = os.path.join(parent, name)
                if self._should_include_file(path):
                    yield path

    def _should_include_file(self, path: str) -> bool:
        if self._is_default_directory and not path.endswith(".py"):
            return False
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return False
            path.encode()
        except OSError as error:
            self._add_problem(error)
        except UnicodeEncodeError:
            self.problems.append(f"{os.fsencode(path)!r}: its name is not UTF-8")
        else:
            return True
        return False

    def _add_problem(self, error: OSError) -> None:
        self.problems.append(
            f"{os.fsencode(error.filename).decode('utf-8', 'replace')}: {error.strerror}"
        )
