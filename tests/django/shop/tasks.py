"""The tasks of the app."""

from __future__ import annotations

import subprocess
from typing import Any

from riverpy.django.tasks_api import task
from tests.django.shop.models import Order

not_a_task = subprocess.check_output


@task
def add(left: int, *, right: int = 0) -> int:
    """Return a sum."""
    return left + right


@task(priority=50, queue_name="mail")
async def count_orders() -> dict[str, Any]:
    """Count the orders in async code."""
    return {"orders": await Order.objects.acount(), "tuple": (1, 2)}


@task
def fail(name: str) -> None:
    """Raise an error."""
    raise {"ValueError": ValueError, "SystemExit": SystemExit}[name](f"this is a {name}")


@task
async def fail_async() -> None:
    """Raise an error with an error as its argument."""
    raise ValueError(ValueError("inner"))


@task
def return_object(name: str) -> object:
    """Return what is not JSON."""
    return {"object": object(), "nan": float("nan")}[name]


@task(takes_context=True)
def get_context(context: Any, word: str) -> list[Any]:
    """Return what the context has."""
    result = context.task_result
    return [result.id, context.attempt, str(result.status), word, result.worker_ids != []]
