"""riverpy: the River job queue for asyncio Python on PostgreSQL.

The public names are defined in `riverpy._public_names`. They are imported when a program first uses
one of them, so that a command such as `riverpy --version` starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from riverpy._public_names import *  # noqa: F403 (type checkers alone read this)
    from riverpy._public_names import __all__ as __all__
else:

    def __getattr__(name):
        """Return the value of a public name. The first call imports all public names, except a few,
        such as `Migrator`, which `riverpy._public_names` imports only when a program uses them."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from riverpy import _public_names

        if name != "__all__" and name not in _public_names.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        loaded = vars(_public_names)
        for public_name in ("__all__", *_public_names.__all__):
            if public_name in loaded or public_name == name:
                globals()[public_name] = getattr(_public_names, public_name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
