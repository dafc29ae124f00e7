"""The model of the app."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, for which jobs are inserted."""

    number = models.IntegerField()

    class Meta:
        app_label = "shop"
