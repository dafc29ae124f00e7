"""The Django migrations of River's and riverpy's tables. There is one for each version of these
tables.

With `RIVERPY = {"MIGRATIONS": "riverpy"}`, the app has no Django migrations. Then this module has
no `__path__`, so that Django does not use it as a package of migrations.
"""

from __future__ import annotations

from riverpy.django.settings import is_migrated_by_django

if not is_migrated_by_django():
    del __path__
