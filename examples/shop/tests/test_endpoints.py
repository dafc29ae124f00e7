"""Requests that insert jobs, in the transaction of the test. No job runs."""

from datetime import timedelta

import pytest
from httpx2 import AsyncClient
from shop.jobs import OrderConfirmation, PaymentReminder, StockSync
from shop.models import Order, Product
from sqlalchemy.ext.asyncio import AsyncSession

import riverpy
from riverpy.testing import FixedClock, SessionJobs

LINES = [{"sku": "tea", "quantity": 2}]
NEW_ORDER = {"email": "bob@example.org", "lines": LINES}


@pytest.mark.usefixtures("order")
async def test_an_order_is_confirmed_by_a_job(http: AsyncClient, riverpy_jobs: SessionJobs) -> None:
    answer = await http.post("/orders", json=NEW_ORDER)
    assert answer.status_code == 201
    await riverpy_jobs.require_inserted(OrderConfirmation, order_id=answer.json()["id"])


@pytest.mark.usefixtures("order")
async def test_an_order_takes_products_from_the_stock(
    http: AsyncClient, riverpy_session: AsyncSession
) -> None:
    answer = await http.post("/orders", json=NEW_ORDER)
    assert answer.json()["cents"] == 800
    assert (await riverpy_session.get_one(Product, "tea")).stock == 8


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("line", [{"sku": "tea", "quantity": 11}, {"sku": "mug", "quantity": 1}])
async def test_an_order_of_too_much_inserts_nothing(
    line: dict[str, object], http: AsyncClient, riverpy_jobs: SessionJobs
) -> None:
    answer = await http.post("/orders", json={**NEW_ORDER, "lines": [line]})
    assert answer.status_code == 409
    await riverpy_jobs.require_not_inserted(OrderConfirmation)


@pytest.mark.usefixtures("order")
async def test_a_refused_order_keeps_the_stock(
    http: AsyncClient, riverpy_session: AsyncSession
) -> None:
    lines = [*LINES, {"sku": "cup", "quantity": 99}]
    await http.post("/orders", json={**NEW_ORDER, "lines": lines})
    assert (await riverpy_session.get_one(Product, "tea")).stock == 10


@pytest.mark.usefixtures("riverpy_session")
async def test_a_wrong_order_is_refused(http: AsyncClient, riverpy_jobs: SessionJobs) -> None:
    answer = await http.post("/orders", json={"email": "bob@example.org"})
    assert answer.status_code == 422
    await riverpy_jobs.require_not_inserted(OrderConfirmation)


@pytest.mark.usefixtures("riverpy_session")
@pytest.mark.parametrize("path", ["/orders/1", "/orders/1/payment", "/orders/1/reminder"])
async def test_a_missing_order_is_not_found(path: str, http: AsyncClient) -> None:
    answer = await http.request("GET" if path == "/orders/1" else "POST", path)
    assert answer.status_code == 404


async def test_one_reminder_a_day(
    http: AsyncClient, order: Order, riverpy_jobs: SessionJobs, riverpy_clock: FixedClock
) -> None:
    path = f"/orders/{order.id}/reminder"
    assert [(await http.post(path)).json()["is_new"] for _ in range(2)] == [True, False]
    riverpy_clock.advance(timedelta(days=1))
    assert (await http.post(path)).json() == {"is_new": True}
    await riverpy_jobs.require_many_inserted([PaymentReminder(order.id), PaymentReminder(order.id)])


@pytest.mark.usefixtures("riverpy_session")
async def test_one_sync_at_a_time(http: AsyncClient, riverpy_jobs: SessionJobs) -> None:
    first, second = [(await http.post("/stock/sync")).json() for _ in range(2)]
    assert first == second
    job = await riverpy_jobs.require_inserted(StockSync)
    assert job.id == first["job_id"]


async def test_a_paid_order_cannot_be_paid_again(
    http: AsyncClient, order: Order, riverpy_session: AsyncSession, riverpy_client: riverpy.Client
) -> None:
    order.status = "paid"
    riverpy_session.add(order)
    await riverpy_session.flush()
    answer = await http.post(f"/orders/{order.id}/payment")
    assert answer.status_code == 409
    assert not (await riverpy_client.job_list()).jobs
