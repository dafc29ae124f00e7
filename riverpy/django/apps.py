"""The configuration of the Django app `riverpy.django`."""

from __future__ import annotations

from django.apps import AppConfig


class RiverpyConfig(AppConfig):
    """The Django app `riverpy`. It has commands, system checks, admin pages, and the migrations of
    River's tables."""

    name = "riverpy.django"
    label = "riverpy"
    verbose_name = "River jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Set up the app: register the system checks, close Django's connections around each job,
        and create River's tables in test databases."""
        from riverpy.django import checks
        from riverpy.django.connections import install_connection_closer
        from riverpy.django.test_databases import register_test_table_creator

        checks.register_checks()
        install_connection_closer()
        register_test_table_creator(self)
