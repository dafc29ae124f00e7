"""The fault proxy, which the scripts use too."""

from __future__ import annotations

from scripts._proxy import Proxy, proxied

__all__ = ["Proxy", "proxied"]
