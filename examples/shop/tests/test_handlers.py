"""Handlers alone: no database, or the test's transaction."""

from datetime import timedelta
from pathlib import Path

import pytest
from fakes import FakeMailer
from shop import jobs
from shop.services import StockLevel

import riverpy
from riverpy.testing import make_job

INVOICE = jobs.Invoice(order_id=7, lines=["2 × tea", "1 × cup"], cents=1300)


def test_invoice_is_written(invoice_directory: Path) -> None:
    jobs.write_invoice(make_job(INVOICE))
    assert (invoice_directory / "7.pdf").read_bytes().startswith(b"%PDF")


def test_invoice_reports_its_file_and_progress() -> None:
    job = make_job(INVOICE)
    jobs.write_invoice(job)
    assert job.recorded_output == {"file": "7.pdf", "bytes": 58}
    assert str(job.recorded_progress) == "4 of 4 (100 %)"


def test_cancelled_invoice_leaves_no_file(invoice_directory: Path) -> None:
    job = make_job(INVOICE)
    job.cancel()
    with pytest.raises(riverpy.JobCancel, match="between two pages"):
        jobs.write_invoice(job)
    assert not list(invoice_directory.iterdir())


@pytest.mark.parametrize(("attempt", "minutes"), [(1, 2), (2, 4), (5, 32)])
def test_captures_wait_longer_each_time(attempt: int, minutes: int) -> None:
    job = make_job(jobs.PaymentCapture(order_id=1), attempt=attempt)
    assert jobs.next_capture(job) == timedelta(minutes=minutes)


def test_captures_have_a_queue_and_ten_attempts() -> None:
    job = make_job(jobs.PaymentCapture(order_id=1))
    assert (job.queue, job.max_attempts) == ("payments", 10)


async def test_low_stock_is_reported_to_the_office(mailer: FakeMailer) -> None:
    await jobs.warn_of_low_stock([StockLevel("tea", 20), StockLevel("cup", 2)])
    assert mailer.sent == [(jobs.OFFICE, "Low stock", "cup")]


async def test_enough_stock_sends_no_mail(mailer: FakeMailer) -> None:
    await jobs.warn_of_low_stock([StockLevel("tea", 20)])
    assert mailer.sent == []
