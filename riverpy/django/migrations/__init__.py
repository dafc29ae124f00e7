"""The Django migrations of River's and riverpy's tables. There is one for each version of these
tables.

With `RIVERPY = {"MIGRATIONS": "riverpy"}`, the app has no Django migrations. Then this module has
no `__path__`, so that Django does not use it as a package of migrations.
"""

from __future__ import annotations

import os

from django.conf import ENVIRONMENT_VARIABLE, settings

from riverpy.django.settings import is_migrated_by_django

# A tool that imports all modules of riverpy may have no Django settings.
_has_settings = settings.configured or ENVIRONMENT_VARIABLE in os.environ
if _has_settings and not is_migrated_by_django():
    del __path__
