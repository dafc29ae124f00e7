"""Tracing: keeps the instrumentation of the driver from making spans of riverpy's own statements.

OpenTelemetry marks this in its context, and each instrumentation reads the mark. Nothing is
imported here: a program that has not imported OpenTelemetry has no instrumentation.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING = nullcontext()
_PLAIN_KEY = "suppress_instrumentation"
"""The name that instrumentation read before OpenTelemetry had a key for it, and still reads."""


def untraced(*, trace_internal: bool = False) -> AbstractContextManager[None]:
    """Suppress instrumentation in the block: no span of a driver's is made there.

    Args:
        trace_internal: True changes nothing.
    """
    context: Any = None if trace_internal else sys.modules.get("opentelemetry.context")
    return _NOTHING if context is None else _Suppressed(context)


class _Suppressed(AbstractContextManager[None]):
    __slots__ = ("_context", "_token")

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        context = self._context
        marked = context.set_value(_PLAIN_KEY, True)
        if key := getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None):
            marked = context.set_value(key, True, marked)
        self._token = context.attach(marked)

    def __exit__(self, *_error: object) -> None:
        self._context.detach(self._token)
