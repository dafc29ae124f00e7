"""The Django app: add `riverpy.django` to INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class RiverpyConfig(AppConfig):
    """The app `riverpy`: commands, system checks, admin pages and migrations of River's tables."""

    name = "riverpy.django"
    label = "riverpy"
    verbose_name = "River jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, close Django's connections around all jobs, and create tables
        in test databases."""
        from riverpy.django import checks
        from riverpy.django.connections import install_connection_closer
        from riverpy.django.test_databases import install_test_tables

        checks.register_checks()
        install_connection_closer()
        install_test_tables(self)
