"""Controls how the child processes of a worker import its main module.

A child process runs jobs of the worker. The child imports the worker's main module, because this
module may define the functions that run the jobs. If the main module started a client without a
check of `__name__`, each child would start a client too, and this client would start more children.
So a client refuses to open during the import.

The main module of the command `riverpy` defines no functions that run jobs, so the child processes
of this command do not import it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from riverpy.errors import ClientStateError

if TYPE_CHECKING:
    from collections.abc import Generator

_is_importing_main_module = False
"""Whether this process is a worker's child process that is importing the worker's main module
now."""
_is_main_module_import_disabled = False


class MainGuardMissingError(ClientStateError):
    """The main module does not check `__name__`, so it starts a client when a child process imports
    it."""


@contextmanager
def mark_main_module_import() -> Generator[None]:
    """Mark that this process imports the main module of its worker. Clients refuse to open during
    the `with` block."""
    global _is_importing_main_module
    _is_importing_main_module = True
    try:
        yield
    finally:
        _is_importing_main_module = False


def refuse_client_during_main_import() -> None:
    """Raise MainGuardMissingError if this process imports the main module of its worker."""
    if _is_importing_main_module:
        raise MainGuardMissingError(
            "this process runs jobs of a worker, and imports the worker's script to find their "
            'functions: put the code that opens the client under `if __name__ == "__main__":`'
        )


def disable_main_module_import() -> None:
    """Do not let child processes import the main module of this process. The command `riverpy`
    calls this, because its main module defines no functions that run jobs."""
    global _is_main_module_import_disabled
    _is_main_module_import_disabled = True


def get_main_module_location() -> dict[str, str]:
    """Return a dict with the main module that child processes import: its name under the key
    `init_main_from_name`, or its path under `init_main_from_path`. multiprocessing uses the same
    keys. An empty dict means that child processes import no main module."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if _is_main_module_import_disabled:
        return {}
    if spec is not None:
        # As in multiprocessing, the `__main__` module of a package is not imported. It may have no
        # check of `__name__`.
        return {} if spec.name.endswith("__main__") else {"init_main_from_name": spec.name}
    if path is None or not Path(path).exists():  # an interactive session, or a script from stdin
        return {}
    return {"init_main_from_path": str(Path(path).absolute())}
