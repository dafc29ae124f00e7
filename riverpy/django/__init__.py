"""The Django app of riverpy. To use it, add `riverpy.django` to INSTALLED_APPS, and set:

    RIVERPY = {"WORKERS": "shop.jobs:workers"}

The functions of this package are imported at their first use, because Django imports the package
before its settings are ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from riverpy.django.django_client import DjangoClient, ainsert, client, insert

__all__ = ["DjangoClient", "ainsert", "client", "insert"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from riverpy.django import django_client

    return getattr(django_client, name)
