"""Jobs through riverpy's executor, in the transaction of the test."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes import FakeMailer, FakePayments, FakeSupplier
from shop import jobs
from shop.models import Order, Product
from shop.services import PaymentDeclined
from sqlalchemy.ext.asyncio import AsyncSession

from riverpy.testing import SessionJobs


async def test_confirmation_is_mailed(
    order: Order, riverpy_jobs: SessionJobs, mailer: FakeMailer
) -> None:
    result = await riverpy_jobs.work(jobs.OrderConfirmation(order_id=order.id))
    result.require_completed()
    assert mailer.sent == [("ann@example.org", f"Your order {order.id}", "1 × cup\n2 × tea")]


@pytest.mark.usefixtures("riverpy_session")
async def test_confirmation_of_a_deleted_order_is_cancelled(
    riverpy_jobs: SessionJobs, mailer: FakeMailer
) -> None:
    result = await riverpy_jobs.work(jobs.OrderConfirmation(order_id=1))
    assert result.job.state == "cancelled"
    assert mailer.sent == []


async def test_confirmation_is_tried_again_after_an_error(
    order: Order, riverpy_jobs: SessionJobs, mailer: FakeMailer
) -> None:
    mailer.error = ConnectionError("the mail server does not answer")
    result = await riverpy_jobs.work(jobs.OrderConfirmation(order_id=order.id))
    assert result.error is mailer.error
    mailer.error = None
    (await riverpy_jobs.work_job(result.job)).require_completed()
    assert len(mailer.sent) == 1


async def test_payment_is_captured_and_an_invoice_inserted(
    order: Order,
    riverpy_jobs: SessionJobs,
    riverpy_session: AsyncSession,
    payments: FakePayments,
) -> None:
    result = await riverpy_jobs.work(jobs.PaymentCapture(order_id=order.id))
    assert result.require_completed().output == {"receipt": f"receipt-{order.id}"}
    assert payments.captured == [(order.id, 1300)]
    await riverpy_session.refresh(await riverpy_session.get_one(Order, order.id))
    assert (await riverpy_session.get_one(Order, order.id)).status == "paid"
    await riverpy_jobs.require_inserted(jobs.Invoice, order_id=order.id, cents=1300)


async def test_declined_payment_is_cancelled(
    order: Order,
    riverpy_jobs: SessionJobs,
    riverpy_session: AsyncSession,
    payments: FakePayments,
) -> None:
    payments.error = PaymentDeclined()
    result = await riverpy_jobs.work(jobs.PaymentCapture(order_id=order.id))
    assert result.job.state == "cancelled"
    assert (await riverpy_session.get_one(Order, order.id)).status == "declined"
    await riverpy_jobs.require_not_inserted(jobs.Invoice)


async def test_payment_is_tried_again_when_the_bank_is_down(
    order: Order,
    riverpy_jobs: SessionJobs,
    riverpy_session: AsyncSession,
    payments: FakePayments,
) -> None:
    payments.error = ConnectionError("the bank does not answer")
    result = await riverpy_jobs.work(jobs.PaymentCapture(order_id=order.id))
    assert result.job.state == "retryable"
    delay = result.job.scheduled_at - datetime.now(UTC)
    assert timedelta(minutes=1) < delay < timedelta(minutes=3)
    assert (await riverpy_session.get_one(Order, order.id)).status == "new"


@pytest.mark.usefixtures("riverpy_session")
async def test_invoice_is_written_in_a_thread(
    riverpy_jobs: SessionJobs, invoice_directory: Path
) -> None:
    result = await riverpy_jobs.work(jobs.Invoice(order_id=7, lines=["1 × cup"], cents=500))
    assert result.require_completed().output == {"file": "7.pdf", "bytes": 48}
    assert (invoice_directory / "7.pdf").exists()


async def test_stock_is_stored(
    order: Order, riverpy_jobs: SessionJobs, riverpy_session: AsyncSession, mailer: FakeMailer
) -> None:
    (await riverpy_jobs.work(jobs.StockSync())).require_completed()
    assert (await riverpy_session.get_one(Product, "tea")).stock == 20
    assert mailer.sent == [(jobs.OFFICE, "Low stock", "cup")]
    del order


@pytest.mark.usefixtures("riverpy_session")
async def test_a_retry_does_not_ask_the_supplier_again(
    riverpy_jobs: SessionJobs, supplier: FakeSupplier, mailer: FakeMailer
) -> None:
    mailer.error = ConnectionError("the mail server does not answer")
    result = await riverpy_jobs.work(jobs.StockSync())
    assert result.error is mailer.error
    mailer.error = None
    (await riverpy_jobs.work_job(result.job)).require_completed()
    assert supplier.requests == 1


async def test_reminder_is_mailed(
    order: Order, riverpy_jobs: SessionJobs, mailer: FakeMailer
) -> None:
    (await riverpy_jobs.work(jobs.PaymentReminder(order_id=order.id))).require_completed()
    assert mailer.sent == [("ann@example.org", "Please pay", "1300 cents")]


async def test_reminder_of_a_paid_order_is_cancelled(
    order: Order, riverpy_jobs: SessionJobs, riverpy_session: AsyncSession, mailer: FakeMailer
) -> None:
    await riverpy_session.merge(Order(id=order.id, status="paid"))
    await riverpy_session.commit()
    result = await riverpy_jobs.work(jobs.PaymentReminder(order_id=order.id))
    assert result.job.state == "cancelled"
    assert mailer.sent == []


async def test_reminder_waits_while_the_mail_server_is_down(
    order: Order, riverpy_jobs: SessionJobs, mailer: FakeMailer
) -> None:
    mailer.error = ConnectionError()
    result = await riverpy_jobs.work(jobs.PaymentReminder(order_id=order.id))
    assert result.event.kind == "job_snoozed"
    assert (result.job.state, result.job.attempt) == ("scheduled", 0)


async def test_report_counts_the_paid_orders_of_a_day(
    order: Order, riverpy_jobs: SessionJobs, riverpy_session: AsyncSession, mailer: FakeMailer
) -> None:
    await riverpy_session.merge(Order(id=order.id, status="paid"))
    await riverpy_session.commit()
    today = datetime.now(UTC).date()
    result = await riverpy_jobs.work(jobs.NightlyReport(day=today))
    assert result.output == {"orders": 1, "cents": 1300}
    assert mailer.sent == [(jobs.OFFICE, f"Sales of {today}", "1 orders, 1300 cents")]


async def test_report_of_a_day_without_orders(order: Order, riverpy_jobs: SessionJobs) -> None:
    result = await riverpy_jobs.work(jobs.NightlyReport(day=order.created_at.date()))
    assert result.output == {"orders": 0, "cents": 0}
