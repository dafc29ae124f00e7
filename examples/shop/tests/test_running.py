"""Requests and jobs together: a running client works jobs that are committed."""

from datetime import timedelta

import pytest
from fakes import FakeMailer, FakePayments
from httpx2 import AsyncClient
from shop import app, jobs
from shop.models import Order
from shop.services import PaymentDeclined

import riverpy
from riverpy.testing import SessionJobs, SessionTime


async def test_a_customer_pays(
    http: AsyncClient, committed_order: Order, riverpy_client: riverpy.Client
) -> None:
    async with riverpy_client.working():
        answer = await http.post(f"/orders/{committed_order.id}/payment")
    assert answer.json() == {"status": "paid", "receipt": f"receipt-{committed_order.id}"}
    assert (await http.get(f"/orders/{committed_order.id}")).json() == {"status": "paid"}


async def test_the_bank_declines(
    http: AsyncClient,
    committed_order: Order,
    riverpy_client: riverpy.Client,
    payments: FakePayments,
) -> None:
    payments.error = PaymentDeclined()
    async with riverpy_client.working():
        answer = await http.post(f"/orders/{committed_order.id}/payment")
    assert answer.status_code == 402


async def test_the_bank_does_not_answer(
    http: AsyncClient, committed_order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PAYMENT_TIMEOUT", timedelta(milliseconds=1))
    answer = await http.post(f"/orders/{committed_order.id}/payment")
    assert (answer.status_code, answer.json()) == (202, {"status": "waiting"})


async def test_an_invoice_follows_the_payment(
    committed_order: Order, riverpy_client: riverpy.Client, riverpy_jobs: SessionJobs
) -> None:
    await riverpy_client.insert(jobs.PaymentCapture(order_id=committed_order.id))
    results = await riverpy_jobs.drain()
    assert [result.job.kind for result in results] == ["payment_capture", "invoice"]


@pytest.mark.usefixtures("riverpy_client")
async def test_a_report_is_inserted_each_night(
    riverpy_jobs: SessionJobs,
    riverpy_time: SessionTime,
    mailer: FakeMailer,
) -> None:
    await riverpy_time.advance(timedelta(days=2))
    await riverpy_jobs.require_many_inserted([jobs.NightlyReport, jobs.NightlyReport])
    for result in await riverpy_jobs.drain():
        result.require_completed()
    assert len(mailer.sent) == 2
