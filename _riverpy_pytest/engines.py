"""The arguments of the engines of SQLAlchemy for tests."""

from __future__ import annotations

from typing import Any

from _riverpy_pytest.failures import fail


def make_engine_arguments(fixture: str, url: str, driver: str) -> dict[str, Any]:
    """Return arguments for the engine of a fixture."""
    try:
        from sqlalchemy import make_url
    except ImportError:
        fail(f"{fixture} needs SQLAlchemy: pip install 'sqlalchemy[asyncio]'")
    return {"url": make_url(url).set(drivername=f"postgresql+{driver}")}
