"""Django's tasks as jobs: what Django expects of a backend that queues tasks and keeps results."""

from __future__ import annotations
