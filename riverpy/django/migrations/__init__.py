"""Django's migrations of River's and riverpy's tables, one for each version.

With `RIVERPY = {"MIGRATIONS": "riverpy"}` the app has no migrations: this module then has no
`__path__`, so Django does not treat it as a package of migrations.
"""

from __future__ import annotations

from riverpy.django.settings import is_migrated_by_django

if not is_migrated_by_django():
    del __path__
