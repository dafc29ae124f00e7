"""Django's migrations of River's and riverpy's tables, one for each version.

With `RIVERPY = {"MIGRATIONS": "riverpy"}` the app has no migrations: this module is then no
package, which is how Django recognizes such an app.
"""

from __future__ import annotations

from riverpy.django.settings import are_migrations_of_django

if not are_migrations_of_django():
    del __path__
