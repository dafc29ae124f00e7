"""Whether this process is a child that imports the main module of its worker.

A child process of a worker imports the worker's main module, to find the functions of jobs in it.
If this module starts a client without a check of `__name__`, the child would start the client too,
and each client would start more children. So a client refuses to open during the import.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Generator

_is_importing = False


class MainGuardMissingError(ClientStateError):
    """The main module starts a client when it is imported."""


@contextmanager
def importing_main_module() -> Generator[None]:
    """Refuse to open clients during the `with` block."""
    global _is_importing
    _is_importing = True
    try:
        yield
    finally:
        _is_importing = False


def refuse_during_main_import() -> None:
    """Raise MainGuardMissingError if this process imports the main module of its worker."""
    if _is_importing:
        raise MainGuardMissingError(
            "this process runs jobs of a worker, and imports the worker's script to find their "
            'functions: put the code that opens the client under `if __name__ == "__main__":`'
        )
