"""An app of a Django project, with a model, jobs and tasks."""

from __future__ import annotations
