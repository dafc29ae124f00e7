"""The tables of the shop."""

from datetime import datetime

from sqlalchemy import DateTime, ForeignKey, func
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

new_session = async_sessionmaker(expire_on_commit=False)
"""Makes the sessions of requests and jobs. The start of the program sets its engine (`bind`)."""


class Base(DeclarativeBase):
    pass


class Product(Base):
    __tablename__ = "products"
    sku: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    cents: Mapped[int]
    stock: Mapped[int] = mapped_column(default=0)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    status: Mapped[str] = mapped_column(default="new")  # then paid or declined
    cents: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    lines: Mapped[list["OrderLine"]] = relationship(lazy="selectin", order_by="OrderLine.sku")


class OrderLine(Base):
    __tablename__ = "order_lines"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    sku: Mapped[str] = mapped_column(ForeignKey("products.sku"), primary_key=True)
    quantity: Mapped[int]
